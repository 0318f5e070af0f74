"""Deferred updates: a call leaves its last reductions and its update to the next one.

``DeferredUpdate`` belongs to one compiled program. A call runs ``first`` of its bundle, or ``steady`` where the update
of the call before is pending; ``finish`` runs that update alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from passes import Program
from passes.ir.bundle import Bundle

from .._torch import local_tensor, version_of
from ..call.state import Arguments
from ..lowering.arenas import Arenas
from ..lowering.codegen import Compiles
from ..lowering.run_bundle import BundleExecutable
from ..state.commit import Commit
from ..state.flat_storage import address_of


@dataclass
class PendingUpdate:
    """The state ``tensors`` and the ``owners`` of a call whose update is pending.

    ``memory``: views of this rank's part of each tensor where it lay when the call ended, and ``addresses`` where
    that is. The update is of that memory, whatever has taken its place since. ``versions``: how often each of
    ``written``, which the update writes to, had been written to by then.
    """

    tensors: list[torch.Tensor]
    owners: list[Any]
    memory: list[torch.Tensor] = field(default_factory=list)
    addresses: list[Any] = field(default_factory=list)
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    def watch(self, written: dict[str, torch.Tensor]) -> None:
        """Note where the state lies, and how often these tensors were written to."""
        self.written, self.versions = written, _versions(written)
        if not self.memory:
            with torch.no_grad():
                self.memory = [each.detach() for each in map(local_tensor, self.tensors)]
            self.addresses = [*map(address_of, self.memory)]

    def replaced(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The positions at which the state of a call is another tensor, or the same one with other memory."""
        where = [*map(address_of, map(local_tensor, tensors))]
        if all(map(is_, tensors, self.tensors)) and where == self.addresses:
            return []
        pairs = zip(tensors, self.tensors, where, self.addresses, strict=True)
        return [k for k, (one, other, here, there) in enumerate(pairs) if one is not other or here != there]

    def changed(self) -> list[str]:
        """The tensors that were written to since then."""
        now = _versions(self.written)
        return [name for name, one, other in zip(self.written, self.versions, now, strict=True) if one != other]


class DeferredUpdate:
    """The bundle, lowered, and what is known of the update that is pending between two calls."""

    def __init__(self, bundle: Bundle, arenas: Arenas, commit: Commit, regions: Compiles | None = None) -> None:
        self.bundle, self._commit = bundle, commit
        self.pending: PendingUpdate | None = None
        self.is_lost = False  # whether a call failed that was to run a pending update
        self.last: Program | None = None  # that of the last call
        self._executable = BundleExecutable(bundle, 0, arenas, commit, regions)
        declared = [part for i in bundle.programs["finish"].inputs for part in i.inside]
        self.written = frozenset(each.name for each in declared if each.in_place)

    @property
    def steady(self) -> Program:
        """The program of all calls but the first."""
        return self.bundle.programs["steady"]

    def of_call(self, arguments: Arguments, tensors: list[torch.Tensor]) -> Callable[[Sequence[Any]], list[Any]]:
        """Make a function that runs a call on these state tensors; it takes and returns what the whole program does."""
        owners = [*arguments.modules.values(), *arguments.optimizers.values()]

        def run(inputs: Sequence[Any]) -> list[Any]:
            before, self.pending = self.pending, None
            name = "first" if before is None else "steady"
            if name == "steady":
                self.is_lost = True  # unless it goes well
                self._commit.skip_barrier()
            self.last = self.bundle.programs[name]
            returned = self._executable.run(name, lambda *_: inputs)
            memory, addresses = ([], []) if before is None else (before.memory, before.addresses)  # it still lies there
            self.is_lost, self.pending = False, PendingUpdate(tensors, owners, memory, addresses)
            return returned

        return run

    def finish(self, inputs: Sequence[Any]) -> None:
        """Run the pending update. ``inputs``: of its call, of which it reads state alone."""
        assert self.pending is not None, "an update is pending"
        self.pending = None
        self._commit.skip_barrier()
        self._executable.run("finish", lambda *_: inputs)

    def lose(self) -> None:
        """Drop what is pending."""
        self.pending = None
        self._executable.in_flight.clear()

    def close(self) -> None:
        """Drop what is pending, all references to state, and the generated code."""
        self.pending = None
        self._executable.close()


def _versions(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors.values()]
