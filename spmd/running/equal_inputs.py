"""What of a call must be equal on all ranks: the number that ranks compare before it, and a line for each value."""

from __future__ import annotations

from typing import Any

import torch

from ..call.rng import describe_seed
from ..call.state import Arguments
from ..capture import Captured
from ..guards.guards import Guards, Live
from ..ranks.consensus import identity_of
from ..ranks.equal_values import Digests, contents, digest, number

_INTENT_BITS = (1 << 60) - 1


def intent_of(value: int) -> int:
    """A number that ranks compare before a call, which is none of those with a meaning of their own."""
    return value & _INTENT_BITS | 16


class EqualInputs:
    """The numbers and tensors of a program's calls that must be equal on all ranks."""

    def __init__(self, captured: Captured, guards: Guards, draws: bool, communicates: bool) -> None:
        """``draws``: whether the program takes a seed. ``communicates``: with other ranks."""
        self._captured, self._guards = captured, guards
        self._draws, self._communicates = draws, communicates
        self._digests = Digests()
        self._replicated = self._find_replicated()

    def _find_replicated(self) -> list[int]:
        """Which tensor arguments must be equal on all ranks, and lie where a call can look at them without waiting."""
        inputs = {each.name: each for each in self._captured.program.inputs if not each.role.is_state}
        found = zip(self._guards.leaves.tensor_names(), self._guards.leaves.tensor_specs(), strict=True)
        return [
            k
            for k, (name, spec) in enumerate(found)
            if name in inputs and spec.type is torch.Tensor and spec.shape and spec.device.type == "cpu"
            if inputs[name].placement and all(entry.is_replicate() for entry in inputs[name].placement)
        ]

    def identity(self, identity: int, arguments: Arguments, live: Live) -> int:
        """``identity``, of the program, with the call's numbers and tensors, and the seed where it draws."""
        of_program = identity_of(str(identity), describe_seed()) if self._draws else identity
        digests = self._digests.of(self._tensors(arguments)) if self._communicates else []
        return of_program ^ digest([*self._numbers(arguments, live), *digests])

    def describe(self, arguments: Arguments, live: Live) -> list[str]:
        """A line for each number and tensor."""
        leaves = self._guards.leaves
        names = [*self._guards.groups.names, *leaves.tensor_names()]
        found = zip(names, self._numbers(arguments, live), strict=True)
        lines = [f"{name} = {each}" for name, value in found if (each := number(value)) is not None]
        given = leaves.tensors(arguments)
        lines += [f"{leaves.tensor_names()[k]} = {contents(given[k])}" for k in self._replicated]
        return [*lines, *map(self._describe_constant, self._captured.constants)]

    def _tensors(self, arguments: Arguments) -> list[torch.Tensor]:
        """The tensors whose contents must be equal: constants, and arguments that are replicated."""
        if not self._replicated:
            return self._captured.constants
        given = self._guards.leaves.tensors(arguments)
        return [*self._captured.constants, *(given[k] for k in self._replicated)]

    def _describe_constant(self, tensor: torch.Tensor) -> str:
        name = self._guards.reads.names.get(id(tensor), "a tensor")
        return (
            f"{name}, which is no argument but found by its name, so that it must be equal on all ranks (pass rows of "
            f"the batch as arguments): {contents(tensor)}"
        )

    def _numbers(self, arguments: Arguments, live: Live) -> list[Any]:
        return [*live.numbers, *self._guards.leaves.tensors(arguments)]
