"""The programs of one step that may run again, and how many of them are kept."""

from __future__ import annotations

import weakref
from typing import Any

from passes import Program

from ..call.call import Call
from ..capture import Captured
from ..guards.recompiles import reason_to_compile
from ..interpreter.source_lines import warn_user
from .compiled import Compiled
from .deferred_program import DeferredProgram

_MANY = 8  # programs of one step, before it warns
_MOST_NODES = 100_000  # captured nodes of all programs that are kept of the sizes that one capture serves: 0.6 GB


class KeptPrograms:
    """The programs of the step ``name`` in the order in which they were compiled, and the ``last`` one run.

    ``compiled``: how many there were so far, with those of models that are gone. ``most``: to keep, where the user
    names a number.
    """

    def __init__(self, name: str, most: int | None) -> None:
        self._name, self._most = name, most
        self.all: list[Compiled] = []
        self.compiled = 0
        self.last: Compiled | None = None
        self._used: dict[str, int] = {}  # the captured nodes of programs, by name, those of the one last run at the end
        self._changes: dict[int, str] = {}  # the reason that each program was compiled for, by its id
        self._cleared: list[tuple[weakref.ref[Any], frozenset[str]]] = []  # by owner, also of programs that are gone

    @property
    def graphs(self) -> list[Program]:
        """All that programs keep in memory."""
        return [graph for each in self.all for graph in each.graphs]

    @property
    def by_last_run(self) -> list[Compiled]:
        """All, the one last run first."""
        last = [self.last] if self.last else []
        return [*last, *(each for each in self.all if each is not self.last)]

    def deferred(self) -> list[DeferredProgram]:
        """The programs that leave their update to the next call."""
        return [each for each in self.all if isinstance(each, DeferredProgram)]

    def of_models(self, call: Call) -> list[Compiled]:
        """The programs of the models of a call."""
        return [each for each in self.all if not each.guards.dead and each.guards.shares_owners_with(call.given)]

    def cleared_first(self, call: Call) -> frozenset[str]:
        """The parameters whose gradient the programs so far clear before they read it, of the models of a call.

        Ranks have to agree on it, so also of programs that are gone: a part of their model was replaced.
        """
        return frozenset[str]().union(*(names for owner, names in self._cleared if call.given.has(owner())))

    def captures(self, call: Call) -> list[Captured]:
        """The captures of the models of a call, the newest first."""
        return [each.captured for each in reversed(self.of_models(call))]

    def reason_to_compile(self, call: Call) -> str:
        """The reason to compile, in the user's words."""
        if call.answers:  # the last of them is another one than the program was traced for
            return str(call.answers[-1])
        if self.last is not None and self.last.captured.specs != call.watched:
            return f"other watched values: {', '.join(map(str, call.watched)) or 'none'}"
        return reason_to_compile(call, self.last, self.of_models(call))

    def add(self, compiled: Compiled, change: str) -> None:
        """Keep a new program, compiled since ``change``; warn if its model has many.

        Programs of models, process groups and connections that are gone are dropped: when that is noticed depends on
        each rank's garbage collector, so nothing that ranks agree on may depend on ``all``.
        """
        self.compiled += 1
        self._cleared = [(owner, names) for owner, names in self._cleared if owner() is not None]
        owners = [reference() for reference in compiled.guards.owners()]
        self._cleared += [(weakref.ref(each), compiled.captured.cleared_first) for each in owners if each is not None]
        self.all = [*(each for each in self.all if each.is_alive()), compiled]
        self._changes = {id(each): self._changes.get(id(each), change) for each in self.all}
        of_model = [each for each in self.all if each.guards.has_owners_of(compiled.guards)]
        sizes = sum(each.is_of_one_size for each in of_model)
        if sizes == _MANY and compiled.is_of_one_size:
            warn_user(
                f"{self._name} has compiled {sizes} programs that differ in sizes of arguments alone; the last one: "
                f"{change}. Each size takes a program, which is cheaper than the first, not free: pad to a few lengths "
                "(the next multiple of 64, say), or group rows of one length"
            )
        of_model = [each for each in of_model if not each.is_of_one_size]
        if len(of_model) == _MANY and not compiled.is_of_one_size:
            changes = [self._changes[id(each)] for each in of_model[-3:]]
            warn_user(
                f"{self._name} has compiled {_MANY} programs. The last ones were compiled because this changed: "
                f"{'; '.join(changes)}. Pass what changes at every call as a tensor, or leave it out"
            )

    def use(self, compiled: Compiled) -> None:
        """Note that a call runs a program; of more than ``most``, the one that was run longest ago goes.

        Where the user names no number, those count that are cheap to make again, since their capture is kept, by the
        memory that they take. Programs of models that are gone count, too, since ranks notice at different times that a
        model is gone.
        """
        counts = self._most is not None or compiled.is_of_one_size
        if compiled is self.last or not counts:
            self.last = compiled
            return
        self.last, name = compiled, compiled.program.name
        self._used.pop(name, None)
        self._used[name] = compiled.captured.program.node_count
        while self._keeps_too_many():
            oldest = next(iter(self._used))
            del self._used[oldest]
            for each in [each for each in self.all if each.program.name == oldest]:
                self.all.remove(each)
                each.drop()

    def _keeps_too_many(self) -> bool:
        if self._most is not None:
            return len(self._used) > self._most
        return len(self._used) > 1 and sum(self._used.values()) > _MOST_NODES
