"""Where a program's state is, to read all of it at once and to see whether it is laid out as it was.

Reading 300 parameters and their optimizer state by name takes milliseconds at every call. Here the dicts in which torch
keeps state are flattened in bulk, in the order in which they stand; a tensor is known by its position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._torch import TensorGuards, accumulation_hooks, gradient_hooks, local_tensor, own_buffers, own_parameters
from ..call.grad_scaler import state_of
from ..call.state import Arguments, Slot, is_number, submodules_of

_gradient = attrgetter("grad")


class Places:
    """Where tensors stand in a flat list, each once; everything else in it must be what it was, entry for entry."""

    def __init__(self, flat: list[Any]) -> None:
        first: dict[int, int] = {}
        for position, value in enumerate(flat):
            if isinstance(value, torch.Tensor):
                first.setdefault(id(value), position)
        self.count = len(flat)
        self.tensors = list(first.values())
        self._take = _taking(self.tensors)
        others = [k for k, value in enumerate(flat) if not isinstance(value, torch.Tensor)]
        self._others, self._values = _taking(others), [_settled(flat[k]) for k in others]
        self._nothing = all(value is None for value in flat)  # as where no parameter has a gradient
        known = {*self.tensors, *others}
        # The same tensor at two places (tied).
        self._twins = [(k, first[id(flat[k])]) for k in range(len(flat)) if k not in known]

    def pick(self, flat: list[Any]) -> list[torch.Tensor] | None:
        """The tensors, or None if other things stand elsewhere."""
        if len(flat) != self.count:
            return None
        if self._nothing:
            return [] if flat.count(None) == self.count else None
        if self._values and not _all_same(self._others(flat), self._values):
            return None
        return self.take(flat) if all(flat[a] is flat[b] for a, b in self._twins) else None

    def take(self, flat: list[Any]) -> list[torch.Tensor]:
        """The tensors of a list that is known to be laid out so."""
        return flat if len(self.tensors) == self.count else list(self._take(flat))


def _settled(value: Any) -> Any:
    """What a program takes for granted of what is no tensor: of a number that is read at each call, its type."""
    return type(value) if is_number(value) else value


def _taking(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda flat: [flat[k] for k in positions]


def _all_same(now: Sequence[Any], values: Sequence[Any]) -> bool:
    return all(map(is_, now, values)) or all(map(same, map(_settled, now), values))


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are one to a trace: of one type, equal to the last bit, and with equal attributes."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, partial):
        return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    try:
        return bool(a == b) and same(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
    except Exception:
        return False


@dataclass
class OptimizerLayout:
    """One optimizer: whose state it has under which keys, and who is in which group.

    Most of what a call reads is optimizer state, and it is nearly always the very tensors of the call before: then they
    are not looked into again.
    """

    owners: list[int] | None  # positions among the parameters (and strangers), in the order of the state dict
    strangers: list[torch.Tensor]  # has state for them, but updates them no more
    groups: list[list[int] | None]
    keys: list[Any]  # of the state of all parameters
    places: Places
    guards: TensorGuards
    held: list[Any]  # all values of the state, when they were last looked into

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> OptimizerLayout:
        """As it is now."""
        known = {id(parameter) for parameter in parameters}
        strangers = [parameter for parameter in optimizer.state if id(parameter) not in known]
        positions = {id(parameter): k for k, parameter in enumerate([*parameters, *strangers])}
        entries = list(optimizer.state.values())
        held = _flat(entries)
        places = Places(held)
        return cls(
            _order([positions[id(parameter)] for parameter in optimizer.state], len(positions)),
            strangers,
            [_order([positions[id(p)] for p in group["params"]], len(parameters)) for group in optimizer.param_groups],
            list(chain.from_iterable(entries)),
            places,
            TensorGuards(places.pick(held) or []),
            held,
        )

    def read(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The state tensors, or None if the optimizer holds something else than it did."""
        groups, state = optimizer.param_groups, optimizer.state
        if len(groups) != len(self.groups):
            return None
        for group, members in zip(groups, self.groups, strict=True):
            if not _are(group["params"], parameters, members):
                return None
        if not _are(state, [*parameters, *self.strangers], self.owners):
            return None
        entries = list(state.values())
        values = _flat(entries)
        if len(values) == len(self.held) and all(map(is_, values, self.held)):
            return self.places.take(values)
        tensors = self.places.pick(values) if list(chain.from_iterable(entries)) == self.keys else None
        if tensors is None or not self.guards.check(tensors):
            return None
        self.held = values
        return tensors


@dataclass
class StateLayout:
    """All state of a call, as it was when a program was compiled: first parameters and buffers, then the rest."""

    owned: list[dict[str, Any]]  # the parameters of each module that has some
    buffered: list[dict[str, Any]]  # the buffers
    empty: list[dict[str, Any]]  # those of modules that have none
    parameters: Places
    buffers: Places
    optimizers: list[OptimizerLayout]
    gradients: Places
    hooks: list[Any]
    distributed: bool
    names: list[str]  # of what ``read`` finds
    guards: Any = field(repr=False)

    @classmethod
    def of(cls, arguments: Arguments, slots: Sequence[Slot]) -> StateLayout:
        """The layout now; ``slots`` are the program's."""
        modules = [module for _, module in submodules_of(arguments.modules)]
        owned: list[dict[str, Any]] = [own_parameters(module) for module in modules]
        buffered: list[dict[str, Any]] = [own_buffers(module) for module in modules]
        parameters = Places(_flat(owned))
        tensors = parameters.pick(_flat(owned)) or []
        layout = cls(
            [holder for holder in owned if holder],
            [holder for holder in buffered if holder],
            [holder for holder in [*owned, *buffered] if not holder],
            parameters,
            Places(_flat(buffered)),
            [OptimizerLayout.of(optimizer, tensors) for optimizer in arguments.optimizers.values()],
            Places(list(map(_gradient, tensors))),
            _hooks_of(tensors),
            any(isinstance(slot.get(), DTensor) for slot in slots),
            [],
            None,
        )
        known, of_optimizers = layout._read(arguments) or ([], [])
        names = {id(slot.get()): slot.input.name for slot in slots}
        layout.names = [names.get(id(tensor), "") for tensor in known + of_optimizers]
        layout.guards = TensorGuards(known)
        return layout

    def read(self, arguments: Arguments) -> list[torch.Tensor] | None:
        """The state tensors, or None if anything is laid out otherwise."""
        found = self._read(arguments)
        if found is None or not self.guards.check(found[0]):
            return None
        return found[0] + found[1]

    def locals(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's storages of what ``read`` found."""
        return list(map(local_tensor, tensors)) if self.distributed else tensors

    def _read(self, arguments: Arguments) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """All but the state of optimizers, and that."""
        if any(self.empty):
            return None
        parameters = self.parameters.pick(_flat(self.owned))
        buffers = self.buffers.pick(_flat(self.buffered))
        if parameters is None or buffers is None or not same(_hooks_of(parameters), self.hooks):
            return None
        gradients = self.gradients.pick(list(map(_gradient, parameters)))
        if gradients is None:
            return None
        known, of_optimizers = [*parameters, *buffers, *gradients], []
        for layout, optimizer in zip(self.optimizers, arguments.optimizers.values(), strict=True):
            state = layout.read(optimizer, parameters)
            if state is None:
                return None
            of_optimizers += state
        for scaler in arguments.scalers.values():
            state = state_of(scaler)
            if state is None:
                return None
            known += state
        return known, of_optimizers


def _flat(dicts: list[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _order(positions: list[int], count: int) -> list[int] | None:
    """None where the positions are all of them, in order, as they nearly always are."""
    return None if positions == list(range(count)) else positions


def _are(tensors: Collection[torch.Tensor], among: list[torch.Tensor], positions: list[int] | None) -> bool:
    """Whether ``tensors`` are those at ``positions``."""
    expected = among if positions is None else [among[k] for k in positions]
    return len(tensors) == len(expected) and all(map(is_, tensors, expected))


def _hooks_of(parameters: list[torch.Tensor]) -> list[Any]:
    """The user's hooks on parameters: nearly always none."""
    if not any(map(gradient_hooks, parameters)) and not any(map(accumulation_hooks, parameters)):
        return []
    return [list((hooks(p) or {}).values()) for hooks in (gradient_hooks, accumulation_hooks) for p in parameters]
