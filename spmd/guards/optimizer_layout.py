"""Layout of one optimizer's state: its parameters, its groups, its keys, and the positions of its tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch

from .._torch import TensorGuards
from ..call.nested_state import flattened, is_nested
from .tensor_positions import TensorPositions


@dataclass
class OptimizerLayout:
    """The parameters that an optimizer has state for, the keys of that state, and the members of its groups.

    Most of what a call reads is optimizer state, and it is nearly always the very tensors of the call before. Those are
    not compared again.
    """

    owners: list[int] | None  # index of each state entry's parameter, among parameters and then ``left_over``
    left_over: list[torch.Tensor]  # parameters that have state but are in no group any more
    groups: list[list[int] | None]  # indices of each group's parameters
    keys: list[Any]  # of the state of all parameters
    positions: TensorPositions
    guards: TensorGuards
    checked: list[Any]  # all values of the state, when they were last compared
    is_nested: bool  # whether some are in lists, tuples or dicts: the keys stand among the values then

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> OptimizerLayout:
        """The layout now."""
        known = {id(parameter) for parameter in parameters}
        left_over = [parameter for parameter in optimizer.state if id(parameter) not in known]
        index = {id(parameter): k for k, parameter in enumerate([*parameters, *left_over])}
        entries = list(optimizer.state.values())
        is_nested = any(map(is_nested_entry, entries))
        values = list(flattened(entries)) if is_nested else flat_values(entries)
        positions = TensorPositions(values)
        return cls(
            _indices([index[id(parameter)] for parameter in optimizer.state], len(index)),
            left_over,
            [_indices([index[id(p)] for p in group["params"]], len(parameters)) for group in optimizer.param_groups],
            [] if is_nested else list(chain.from_iterable(entries)),
            positions,
            TensorGuards(positions.pick(values) or []),
            values,
            is_nested,
        )

    def read(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The state tensors, or None if groups or state are not as they were."""
        groups, state = optimizer.param_groups, optimizer.state
        if len(groups) != len(self.groups):
            return None
        for group, members in zip(groups, self.groups, strict=True):
            if not _are(group["params"], parameters, members):
                return None
        if not _are(state, [*parameters, *self.left_over], self.owners):
            return None
        entries = list(state.values())
        values = list(flattened(entries)) if self.is_nested else flat_values(entries)
        if len(values) == len(self.checked) and all(map(is_, values, self.checked)):
            return self.positions.take(values)
        keys = [] if self.is_nested else list(chain.from_iterable(entries))
        tensors = self.positions.pick(values) if keys == self.keys else None
        if tensors is None or not self.guards.check(tensors):
            return None
        self.checked = values
        return tensors


def is_nested_entry(entry: Any) -> bool:
    """Whether the state of a parameter, or under a text, is more than a dict of values."""
    return not isinstance(entry, dict) or any(map(is_nested, entry.values()))


def flat_values(dicts: list[dict[Any, Any]]) -> list[Any]:
    """The values of all dicts, in order."""
    return list(chain.from_iterable(map(dict.values, dicts)))


def _indices(indices: list[int], count: int) -> list[int] | None:
    """``indices``, or None where they are 0 to ``count`` in order, as they nearly always are."""
    return None if indices == list(range(count)) else indices


def _are(tensors: Collection[torch.Tensor], among: list[torch.Tensor], indices: list[int] | None) -> bool:
    """Whether ``tensors`` are those of ``among`` at ``indices``."""
    expected = among if indices is None else [among[k] for k in indices]
    return len(tensors) == len(expected) and all(map(is_, tensors, expected))
