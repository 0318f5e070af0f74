"""``Effect``: what each call of a program repeats: writes to containers, prints, calls of ``logging``.

In come the writes that a trace recorded (``../reads/journals.py``).
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from passes import CaptureError

from ..._torch import TreeSpec, tree_flatten, tree_unflatten
from ...call.refusals import refuse
from ...call.state import Arguments
from ..reads.journals import Journal, Written
from ..reads.logging_calls import LogCall
from ..reads.read_sites import Reference
from .carried import leaf_name
from .lost_graph import mark


@dataclass(frozen=True)
class ArgumentLog:
    """A log among the arguments, by the name of its leaf."""

    name: str

    def find(self, arguments: Arguments) -> Any:
        """That of a call."""
        return next(leaf.value.container for leaf in arguments.leaves if leaf.name == self.name)


@dataclass(frozen=True)
class StateMemory:
    """A leaf that is the memory of a state tensor, by its name: what a person keeps changes with it, as in eager."""

    name: str


@dataclass(frozen=True, eq=False)
class Effect:
    """A method that each call calls on a live container. ``leaves``: of its arguments, as those of a ``Write``."""

    target: Reference | ArgumentLog | LogCall
    method: str
    leaves: list[Any]
    spec: TreeSpec
    line: str
    had_graph: bool

    @property
    def name(self) -> str:
        """The name of the container in the user's words."""
        return self.target.name

    @property
    def is_kept(self) -> bool:
        """Whether it writes to a container of the user's that is no argument."""
        return isinstance(self.target, Reference) and self.target is not _PRINT

    def names(self) -> list[str]:
        """A name for each leaf."""
        return [leaf_name(self.name, k, len(self.leaves)) for k in range(len(self.leaves))]

    def apply(self, arguments: Arguments, current: Callable[[Any], Any]) -> None:
        """Write the values of a call; ``current`` gives that of a leaf."""
        leaves = [current(leaf) for leaf in self.leaves]
        if self.had_graph:
            for leaf in leaves:
                mark(leaf)
        args, kwargs = tree_unflatten(leaves, self.spec)
        getattr(self.target.find(arguments), self.method)(*args, **kwargs)


_PRINT = Reference("print", vars(builtins), "print")


def _target(journal: Journal | LogCall | None) -> Reference | ArgumentLog | LogCall:
    if isinstance(journal, LogCall):
        return journal
    if journal is None:
        return _PRINT
    return ArgumentLog(journal.arguments[0][0]) if journal.arguments else journal.references[0]


def effects_of(written: Iterable[Written]) -> list[Effect]:
    """The effects that each call repeats."""
    found = []
    for each in written:
        if each.changed():
            refuse(
                CaptureError,
                "what is printed or logged is changed later in the step, and would be shown as it is in the end: "
                "print or log a clone\n"
                f"    {each.line}",
            )
        leaves, spec = tree_flatten((each.args, each.kwargs))
        target = _target(each.journal)
        had_graph = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        found.append(Effect(target, each.method, leaves, spec, each.line, had_graph))
    return found
