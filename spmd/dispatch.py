"""Dispatch: which program a call runs, agreed between the ranks before any of them begins.

Ranks that would run different programs raise in the same call, all of them, since every call starts with one exchange
(``ranks/consensus.py``). A call that no program fits is compiled, on all ranks or on none.
"""

from __future__ import annotations

import inspect
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from passes import RankMismatchError

from .call.call import Call
from .call.rng import describe_seed
from .call.state import ArgumentReader
from .compiled import Compiled
from .guards.leaves import Leaves
from .options import Options
from .ranks.consensus import COMPILE, FAILED, MeshRanks

_MANY = 8  # programs of one step, before it warns


class Choice(NamedTuple):
    """A call and the program that fits it, with the live state it runs on; None where it has to be compiled."""

    call: Call
    compiled: Compiled | None
    state: list[torch.Tensor] | None


class Dispatch:
    """The programs of one step, in the order in which they were compiled, and the one last run."""

    def __init__(self, name: str, signature: inspect.Signature, options: Options) -> None:
        self.name, self.options = name, options
        self.programs: list[Compiled] = []
        self.last: Compiled | None = None
        self._reader = ArgumentReader(signature)
        self._changes: list[str] = []  # why each program was compiled

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """Find the program for a call. Raises ``RankMismatchError`` on all ranks unless all choose the same."""
        try:
            choice = self.fit(args, kwargs)
            ranks = choice.compiled.ranks if choice.compiled else self.ranks_of(choice.call)
        except Exception as error:
            self._report_failure(error)
            raise
        intent = choice.compiled.intent() if choice.compiled else COMPILE
        ranks.agree_on_program(self.name, intent, lambda: self._describe(choice))
        return choice

    def fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """The program that this rank would run; the one last run is asked first."""
        mode, arguments = self.options.mode, self._reader.read(args, kwargs)
        call = Call(arguments, mode.mesh, mode.inputs, mode.input_batch_dim)
        last = [self.last] if self.last else []
        for compiled in [*last, *(each for each in self.programs if each is not self.last)]:
            state = compiled.guards.admit(arguments) if compiled.is_connected() else None
            if state is not None:
                return Choice(call, compiled, state)
        return Choice(call, None, None)

    def ranks_of(self, call: Call) -> MeshRanks:
        """The ranks that a call compiles with."""
        return MeshRanks.of(call.device_mesh, self.options.timeout)

    def change(self, call: Call) -> str:
        """The first difference between a call and the one before it, in the user's words."""
        if self.last is None:
            return ""
        if not self.last.is_connected():
            return "a call failed as it began, and ranks of one host have to connect anew"
        return self.last.guards.difference(call.given, call.slots)

    def add(self, compiled: Compiled, change: str) -> None:
        """Keep a new program, compiled since ``change``; warn if there are many."""
        self.programs.append(compiled)
        self._changes.append(change)
        if len(self.programs) == _MANY:
            warnings.warn(
                f"{self.name} has compiled {_MANY} programs. The last ones were compiled because this changed: "
                f"{'; '.join(self._changes[-3:])}. Pass what changes at every call as a tensor, or leave it out",
                stacklevel=5,
            )

    def _describe(self, choice: Choice) -> list[str]:
        """The call in lines, for ranks that differ to find the first difference."""
        lines = Leaves.of(choice.call.given).describe()
        if choice.compiled is not None:
            return [*lines, f"runs program {self.programs.index(choice.compiled)}", describe_seed()]
        return [*lines, f"has to compile, since this changed: {self.change(choice.call) or 'nothing was compiled yet'}"]

    def _report_failure(self, error: Exception) -> None:
        """Report to the other ranks, which wait for this call to begin, that it failed before it could."""
        mesh = self.options.mode.mesh or (self.last.device_mesh if self.last else None)
        with suppress(RankMismatchError):
            message = f"failed: {type(error).__name__}: {error}"
            MeshRanks.of(mesh, self.options.timeout).agree_on_program(self.name, FAILED, lambda: [message])
