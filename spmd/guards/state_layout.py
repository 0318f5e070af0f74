"""State layout: the dicts that hold a program's state, read in bulk and compared at every call.

Reading 300 parameters and their optimizer state by name takes milliseconds. Here the dicts in which torch keeps state
are flattened in order, and a tensor is identified by its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._torch import TensorGuards, accumulation_hooks, gradient_hooks, local_tensor, own_buffers, own_parameters
from ..call.grad_scaler import state_of
from ..call.state import Arguments, Slot, submodules_of
from .attached import Attached
from .equality import structurally_equal
from .optimizer_layout import OptimizerLayout, flat_values
from .tensor_positions import TensorPositions

_gradient = attrgetter("grad")


@dataclass
class StateLayout:
    """All state of a call, as it was when a program was compiled: parameters, buffers, gradients, then optimizers."""

    parameter_dicts: list[dict[str, Any]]  # of each module that has parameters of its own
    buffer_dicts: list[dict[str, Any]]
    empty_dicts: list[dict[str, Any]]  # of modules that have none
    parameters: TensorPositions
    buffers: TensorPositions
    optimizers: list[OptimizerLayout]
    with_gradient: list[int] | None  # the parameters whose gradients count; None for all
    gradients: TensorPositions
    placements: list[Any]  # of gradients: a sum may be reduced between calls; empty if none is a DTensor
    hooks: list[Any]  # the user's, on parameters
    attached: Attached  # to parameters and buffers
    distributed: bool  # whether some state is a DTensor
    names: list[str]  # of the tensors that ``read`` returns, in order
    guards: TensorGuards = field(repr=False)  # of parameters and buffers
    other_guards: TensorGuards = field(repr=False)  # of gradients, and the state of scalers

    @classmethod
    def of(
        cls,
        arguments: Arguments,
        slots: Sequence[Slot],
        cleared_first: frozenset[str] = frozenset(),
        named: frozenset[str] = frozenset(),
    ) -> StateLayout:
        """The layout now; ``slots`` are the program's, ``cleared_first`` its parameters with any gradient or none.

        ``named``: names in code that ran, which may read attributes of tensors.
        """
        modules = [module for _, module in submodules_of(arguments.modules)]
        owned, buffered = list(map(own_parameters, modules)), list(map(own_buffers, modules))
        parameters = TensorPositions(flat_values(owned))
        tensors = parameters.pick(flat_values(owned)) or []
        buffers = TensorPositions(flat_values(buffered))
        held = buffers.pick(flat_values(buffered)) or []
        names = {id(slot.get()): slot.input.name for slot in slots}
        with_gradient = [k for k, tensor in enumerate(tensors) if names.get(id(tensor)) not in cleared_first]
        gradients = [tensors[k].grad for k in with_gradient]
        layout = cls(
            [each for each in owned if each],
            [each for each in buffered if each],
            [each for each in [*owned, *buffered] if not each],
            parameters,
            buffers,
            [OptimizerLayout.of(optimizer, tensors) for optimizer in arguments.optimizers.values()],
            with_gradient if len(with_gradient) < len(tensors) else None,
            TensorPositions(gradients),
            _placements_of([gradient for gradient in gradients if gradient is not None]),
            _hooks_of(tensors),
            Attached.of([*tensors, *held], named),
            any(isinstance(slot.get(), DTensor) for slot in slots),
            [],
            TensorGuards([*tensors, *held]),
            TensorGuards([]),
        )
        compared, others, of_optimizers = layout._read(arguments) or ([], [], [])
        layout.names = [names.get(id(tensor), "") for tensor in compared + others + of_optimizers]
        layout.other_guards = TensorGuards(others)
        return layout

    def read(self, arguments: Arguments) -> list[torch.Tensor] | None:
        """The state tensors, or None if state is laid out otherwise."""
        found = self._read(arguments)
        if found is None or not self.other_guards.check(found[1]):
            return None
        owned, others, of_optimizers = found
        return owned + others + of_optimizers

    def locals(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's storages of the tensors that ``read`` returned."""
        return list(map(local_tensor, tensors)) if self.distributed else tensors

    def _read(self, arguments: Arguments) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] | None:
        """(parameters and buffers, what ``other_guards`` compare, state of optimizers)."""
        if any(self.empty_dicts):
            return None
        parameters = self.parameters.pick(flat_values(self.parameter_dicts))
        buffers = self.buffers.pick(flat_values(self.buffer_dicts))
        if parameters is None or buffers is None:
            return None
        owned = [*parameters, *buffers]
        if not self.guards.check(owned):  # first: what took the place of one may be None, and has no hooks
            return None
        if not structurally_equal(_hooks_of(parameters), self.hooks) or not self.attached.holds(owned):
            return None
        observed = parameters if self.with_gradient is None else [parameters[k] for k in self.with_gradient]
        gradients = self.gradients.pick(list(map(_gradient, observed)))
        if gradients is None or (self.placements and _placements_of(gradients) != self.placements):
            return None
        others, of_optimizers = list(gradients), []
        for layout, optimizer in zip(self.optimizers, arguments.optimizers.values(), strict=True):
            state = layout.read(optimizer, parameters)
            if state is None:
                return None
            of_optimizers += state
        for scaler in arguments.scalers.values():
            state = state_of(scaler)
            if state is None:
                return None
            others += state
        return owned, others, of_optimizers


def _placements_of(gradients: list[torch.Tensor]) -> list[Any]:
    """The placement of each gradient, None for a plain tensor; empty if all are plain."""
    placements = [each.placements if isinstance(each, DTensor) else None for each in gradients]
    return placements if any(placements) else []


def _hooks_of(parameters: list[torch.Tensor]) -> list[Any]:
    """The user's hooks on parameters: nearly always none."""
    if not any(map(gradient_hooks, parameters)) and not any(map(accumulation_hooks, parameters)):
        return []
    return [list((hooks(p) or {}).values()) for hooks in (gradient_hooks, accumulation_hooks) for p in parameters]
