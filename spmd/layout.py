"""Where a program's state is, to read all of it at once and to see whether it is laid out as it was.

Reading 300 parameters and their optimizer state by name takes milliseconds at every call. Here the dicts in which torch
keeps state are flattened in bulk, in the order in which they stand; a tensor is known by its position.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._torch import TensorGuards, local_tensor
from .scalers import state_of
from .state import Arguments, Slot, is_number, submodules_of

_gradient = attrgetter("grad")
_early = attrgetter("_backward_hooks")
_late = attrgetter("_post_accumulate_grad_hooks")


@dataclass
class Places:
    """Positions of tensors in a flat list; ``others`` must be what they were, entry for entry."""

    count: int
    tensors: tuple[int, ...]
    twins: list[tuple[int, int]]  # the same tensor at two places (tied)
    others: list[tuple[int, Any]]

    @property
    def plain(self) -> bool:
        """Whether there is nothing but tensors, each once."""
        return not self.twins and not self.others

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Places:
        """Each tensor once, at its first place."""
        first: dict[int, int] = {}
        twins = []
        for position, value in enumerate(flat):
            if isinstance(value, torch.Tensor):
                before = first.setdefault(id(value), position)
                if before != position:
                    twins.append((before, position))
        others = [(k, _settled(value)) for k, value in enumerate(flat) if not isinstance(value, torch.Tensor)]
        return cls(len(flat), tuple(first.values()), twins, others)

    def pick(self, flat: list[Any]) -> list[torch.Tensor] | None:
        """The tensors, or None if other things stand elsewhere."""
        if len(flat) != self.count:
            return None
        if self.plain:
            return flat
        if self.others and not self._others_hold(flat):
            return None
        if not all(flat[a] is flat[b] for a, b in self.twins):
            return None
        return list(map(flat.__getitem__, self.tensors))

    def _others_hold(self, flat: list[Any]) -> bool:
        positions, values = zip(*self.others, strict=True)
        now = list(map(flat.__getitem__, positions))
        return all(map(is_, now, values)) or all(map(same, map(_settled, now), values))


def _settled(value: Any) -> Any:
    """What a program takes for granted of what is no tensor: of a number that is read at each call, its type."""
    return type(value) if is_number(value) else value


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are one to a trace: of one type, and equal to the last bit."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    try:
        return bool(a == b)
    except Exception:
        return False


@dataclass
class OptimizerLayout:
    """One optimizer: whose state it has under which keys, and who is in which group."""

    owners: list[int]  # positions among the parameters (and strangers), in the order of the state dict
    strangers: list[torch.Tensor]  # has state for them, but updates them no more
    keys: list[Any]  # of the state of all parameters
    places: Places
    groups: list[list[int]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> OptimizerLayout:
        """As it is now."""
        known = {id(parameter) for parameter in parameters}
        strangers = [parameter for parameter in optimizer.state if id(parameter) not in known]
        positions = {id(parameter): k for k, parameter in enumerate([*parameters, *strangers])}
        entries = list(optimizer.state.values())
        return cls(
            [positions[id(parameter)] for parameter in optimizer.state],
            strangers,
            list(chain.from_iterable(entries)),
            Places.of(_flat(entries)),
            [[positions[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups],
        )

    def read(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The state tensors, or None if the optimizer holds something else than it did."""
        groups, state = optimizer.param_groups, optimizer.state
        if len(groups) != len(self.groups) or len(state) != len(self.owners):
            return None
        for group, members in zip(groups, self.groups, strict=True):
            if not _are(group["params"], parameters, members):
                return None
        if not _are(state, [*parameters, *self.strangers], self.owners):
            return None
        entries = list(state.values())
        if list(chain.from_iterable(entries)) != self.keys:
            return None
        return self.places.pick(_flat(entries))


@dataclass
class StateLayout:
    """All state of a call, as it was when a program was compiled: parameters, buffers, optimizer state, gradients."""

    owned: list[dict[str, Any]]  # the parameters of each module that has some
    buffered: list[dict[str, Any]]  # the buffers
    empty: list[dict[str, Any]]  # those of modules that have none
    parameters: Places
    buffers: Places
    optimizers: list[OptimizerLayout]
    gradients: list[bool]  # whether each parameter has one
    hooks: list[Any]
    distributed: bool
    names: list[str]  # of what ``read`` finds
    guards: Any = field(repr=False)

    @classmethod
    def of(cls, arguments: Arguments, slots: Sequence[Slot]) -> StateLayout:
        """The layout now; ``slots`` are the program's."""
        modules = [module for _, module in submodules_of(arguments.modules)]
        owned: list[dict[str, Any]] = [module._parameters for module in modules]
        buffered: list[dict[str, Any]] = [module._buffers for module in modules]
        parameters = Places.of(_flat(owned))
        tensors = parameters.pick(_flat(owned)) or []
        layout = cls(
            [holder for holder in owned if holder],
            [holder for holder in buffered if holder],
            [holder for holder in [*owned, *buffered] if not holder],
            parameters,
            Places.of(_flat(buffered)),
            [OptimizerLayout.of(optimizer, tensors) for optimizer in arguments.optimizers.values()],
            [tensor.grad is not None for tensor in tensors],
            _hooks_of(tensors),
            any(isinstance(slot.get(), DTensor) for slot in slots),
            [],
            None,
        )
        found = layout._read(arguments)
        assert found is not None, "state was laid out so a moment ago"
        names = {id(slot.get()): slot.input.name for slot in slots}
        layout.names = [names.get(id(tensor), "") for tensor in found]
        layout.guards = TensorGuards(found)
        return layout

    @property
    def of_modules(self) -> int:
        """How many of what ``read`` finds are parameters and buffers: they come first."""
        return len(self.parameters.tensors) + len(self.buffers.tensors)

    def read(self, arguments: Arguments) -> list[torch.Tensor] | None:
        """The state tensors, or None if anything is laid out otherwise."""
        found = self._read(arguments)
        return found if found is not None and self.guards.check(found) else None

    def locals(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's storages of what ``read`` found."""
        return list(map(local_tensor, tensors)) if self.distributed else tensors

    def _read(self, arguments: Arguments) -> list[torch.Tensor] | None:
        if any(self.empty):
            return None
        parameters = self.parameters.pick(_flat(self.owned))
        buffers = self.buffers.pick(_flat(self.buffered))
        if parameters is None or buffers is None or not same(_hooks_of(parameters), self.hooks):
            return None
        found = [*parameters, *buffers]
        for layout, optimizer in zip(self.optimizers, arguments.optimizers.values(), strict=True):
            state = layout.read(optimizer, parameters)
            if state is None:
                return None
            found += state
        for scaler in arguments.scalers.values():
            state = state_of(scaler)
            if state is None:
                return None
            found += state
        gradients = list(map(_gradient, parameters))
        if [gradient is not None for gradient in gradients] != self.gradients:
            return None
        return [*found, *(gradient for gradient in gradients if gradient is not None)]


def _flat(dicts: list[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _are(tensors: Collection[torch.Tensor], among: list[torch.Tensor], positions: list[int]) -> bool:
    """Whether ``tensors`` are those at ``positions``."""
    return len(tensors) == len(positions) and all(map(is_, tensors, map(among.__getitem__, positions)))


def _hooks_of(parameters: list[torch.Tensor]) -> list[Any]:
    """The user's hooks on parameters: nearly always none."""
    if not any(map(_early, parameters)) and not any(map(_late, parameters)):
        return []
    return [list((hooks(p) or {}).values()) for hooks in (_early, _late) for p in parameters]
