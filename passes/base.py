"""The pass contract: a frozen dataclass whose fields are options and whose one method edits a program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal

from .ir.program import Program

Numerics = Literal["exact", "exact if aligned", "reassociates", "approximate"]


class Fact(StrEnum):
    """A fact that a pass needs and the graph does not have; the compiler that runs it finds it out first."""

    STORAGE = "storage"  # which state shares a storage, and which must stay where it is: Program.stored and .fixed
    SHARED_AXES = "shared axes"  # along which axes all ranks of a group share memory: Axis.shared


class Pass(ABC):
    """One rewrite of a program.

    A subclass is a ``@dataclass(frozen=True)`` whose docstring says what it does, assumes and leaves. It knows nothing
    of checking, timing, history and dumps: ``passes.run`` does that. A pass that finds nothing does nothing.
    Insert and replace nodes by ``ir/edit.py``, which carries their ``meta`` over. Keys that a pass of yours adds to
    ``node.meta`` need a dot in their names (``"mypackage.cost"``); ``ir/meta.py`` has all others.

    - ``numerics``: "exact" (same bits), "exact if aligned" (values come to begin at other addresses, by which kernels
      of matrix products round), "reassociates" (the same sums in another order) or "approximate". The history names it
      where a pass that is not exact made edits.
    - ``after``: pass classes that must come earlier *if they are in the same pipeline*.
    - ``needs``: pass classes without which this one cannot work.
    - ``facts``: what it reads of the program that is not in the graph; without a fact it does less.
    - ``last``: nothing may run after it, because it fixes the order of the nodes; but for passes with ``keeps_order``,
      which change nodes where they stand.
    """

    numerics: ClassVar[Numerics] = "exact"
    after: ClassVar[tuple[type[Pass], ...]] = ()
    needs: ClassVar[tuple[type[Pass], ...]] = ()
    facts: ClassVar[frozenset[Fact]] = frozenset()
    last: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False

    @abstractmethod
    def rewrite(self, program: Program) -> int:
        """Edit ``program`` and return the number of edits."""

    def __str__(self) -> str:
        declared: tuple[Any, ...] = fields(self) if is_dataclass(self) else ()  # a pass without options need not be one
        options = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in declared if each.repr)
        return f"{type(self).__name__}({options})" if options else type(self).__name__


def facts_of(passes: Iterable[Pass]) -> frozenset[Fact]:
    """Every fact that one of ``passes`` reads."""
    return frozenset[Fact]().union(*(each.facts for each in passes))
