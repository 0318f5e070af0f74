"""The inputs of a program in one call: live state, numbers and arguments, in the order in which it takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from passes import Input, OutputKind, Program
from passes.ir.numbers import pack

from ..call.rng import next_call
from ..call.state import Arguments
from ..capture import Captured
from ..guards.guards import Guards, Live
from ..state.flat_storage import FlatInputs

_OF_RUNS = "of runs"  # the place of what no call brings


@dataclass
class Running:
    """A call between its two halves: ``inputs`` are the program's, the rest is what its end has to write to.

    ``given``: the tensors among the arguments, and ``contiguous`` what the program reads for each.
    """

    arguments: Arguments
    tensors: list[torch.Tensor]
    given: list[torch.Tensor]
    contiguous: list[torch.Tensor]
    inputs: list[Any]


class Inputs:
    """All values of a call in one list, and the position of each input of the program in it, found once.

    ``names``: of the tensor arguments, and ``written`` the positions of those that the program writes to.
    ``draws``: whether the program takes a seed. ``added``: state that a transform added, and master copies, by name.
    """

    def __init__(self, program: Program, captured: Captured, guards: Guards, added: dict[str, torch.Tensor]) -> None:
        self._captured, self._guards, self._added = captured, guards, added
        self._flats = FlatInputs(program.inputs, guards.layout.names)
        self._cleared = [k for k, name in enumerate(guards.layout.names) if name in captured.cleared_first]
        self.names = [*guards.leaves.tensor_names(), *guards.carried.names]
        self.draws = program.draws
        constants = [f"constant.{k}" for k in range(len(captured.constants))]
        state = [*guards.layout.names, *self._flats.names]
        order = [*state, *guards.groups.names, *self.names, *added, *constants, "seed", _OF_RUNS]
        at = {name: k for k, name in enumerate(order)}
        packed = [(declared, node) for declared, node in program.values().values() if declared.numbers]
        self._packed = [DeviceBuffer(declared, node.meta["val"].device, at) for declared, node in packed]
        at |= {declared.name: len(order) + k for k, (declared, _) in enumerate(packed)}
        self._positions = [at[_value_of(declared, program)] for declared in program.inputs]
        outputs = captured.program.outputs
        writes = {o.name for o in outputs if o.kind is OutputKind.UPDATE and not o.role.is_state}
        self.written = [k for k, name in enumerate(self.names) if name in writes]

    def enter(self, arguments: Arguments, live: Live) -> Running:
        """The inputs of a call; from now until ``leave`` state lies where the program has it."""
        given = self._given(arguments)
        contiguous = [tensor.contiguous() for tensor in given]
        state = self._guards.layout.locals(live.tensors)
        state = [*state, *self._flats.enter(state)]
        return Running(arguments, live.tensors, given, contiguous, self._in_order(live.numbers, state, contiguous))

    @property
    def clears(self) -> bool:
        """Whether the step clears gradients before it reads them."""
        return bool(self._cleared)

    def cleared(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters among the live state of a call whose gradients the step clears before it reads them."""
        return [tensors[k] for k in self._cleared]

    def leave(self) -> None:
        """Copy state back to where its owners have it, if it lies elsewhere."""
        self._flats.leave()

    def release(self) -> None:
        """Hold on to no state."""
        self._flats.release()

    def by_name(self, arguments: Arguments, live: Live) -> dict[str, Any]:
        """The inputs of a call by name, each by itself, as the call finds them; no draw is made, the seed is 1."""
        guards = self._guards
        named = dict(zip(guards.layout.names, guards.layout.locals(live.tensors), strict=True))
        named |= zip(guards.groups.names, live.numbers, strict=True)
        named |= zip(self.names, self._given(arguments), strict=True)
        constants = {f"constant.{k}": each for k, each in enumerate(self._captured.constants)}
        return named | self._added | constants | {"seed": 1}

    def of_state(self, state: list[torch.Tensor]) -> list[Any]:
        """The inputs as far as they are at the same place at each call, and None for all others; ends with ``leave``.

        ``state``: this rank's storages of the live state of the last call.
        """
        values: list[Any] = [*state, *self._flats.enter(state)]
        values += [None] * (len(self._guards.groups.names) + len(self.names))
        values += [*self._added.values(), *self._captured.constants, None, None]
        values += [each.tensor for each in self._packed]
        return [values[k] for k in self._positions]

    def _given(self, arguments: Arguments) -> list[torch.Tensor]:
        return [*self._guards.leaves.tensors(arguments), *self._guards.carried.tensors()]

    def _in_order(self, numbers: list[Any], state: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[Any]:
        values = [*state, *numbers, *given, *self._added.values(), *self._captured.constants, self._seed(), None]
        if self._packed:
            values += [each.filled(values) for each in self._packed]
        return [values[k] for k in self._positions]

    def _seed(self) -> int | None:
        if not self.draws:
            return None
        torch.empty((), dtype=torch.int64).random_()  # as eager, a call with random ops moves the generator on
        return next_call()


def _value_of(declared: Input, program: Program) -> str:
    """The name of the value of a call that an input takes; runs of a micro-batch bring some of their own."""
    if declared.role.is_given_by_runs:
        return _OF_RUNS
    return program.taken_from(declared)


class DeviceBuffer:
    """The memory of the numbers that calls bring to the device, the same at every call."""

    def __init__(self, declared: Input, device: torch.device, at: Mapping[str, int]) -> None:
        """``at``: the position of each number among the values of a call."""
        self._declared, self._positions = declared, {name: at[name] for name in declared.numbers}
        self.tensor = torch.empty(declared.shape, dtype=declared.dtype, device=device)

    def filled(self, values: Sequence[Any]) -> torch.Tensor:
        """The buffer, with the numbers of a call."""
        packed = pack(self._declared, {name: values[k] for name, k in self._positions.items()})
        # From pageable memory the host would wait until the device has done all that was issued before.
        return self.tensor.copy_(packed.pin_memory() if self.tensor.is_cuda else packed, non_blocking=True)
