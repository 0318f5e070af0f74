"""Positions of tensors in a flat list of state, to read all of them at once and to see that nothing else changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any

import torch

from ..call.state import is_number
from .equality import structurally_equal


class TensorPositions:
    """The positions of the tensors in a flat list, each tensor once; all other entries must stay what they were."""

    def __init__(self, flat: list[Any]) -> None:
        first: dict[int, int] = {}
        for position, value in enumerate(flat):
            if isinstance(value, torch.Tensor):
                first.setdefault(id(value), position)
        self.count = len(flat)
        self.positions = list(first.values())
        self._take = _getter(self.positions)
        others = [k for k, value in enumerate(flat) if not isinstance(value, torch.Tensor)]
        self._others, self._values = _getter(others), [_value_or_type(flat[k]) for k in others]
        self._all_none = all(value is None for value in flat)  # as where no parameter has a gradient
        seen = {*self.positions, *others}
        # (position, first position) of a tensor that stands at several positions: tied parameters.
        self._ties = [(k, first[id(flat[k])]) for k in range(len(flat)) if k not in seen]

    def pick(self, flat: list[Any]) -> list[torch.Tensor] | None:
        """The tensors of ``flat``, or None if its other entries are not as they were."""
        if len(flat) != self.count:
            return None
        if self._all_none:
            return [] if flat.count(None) == self.count else None
        if self._values and not _unchanged(self._others(flat), self._values):
            return None
        return self.take(flat) if all(flat[a] is flat[b] for a, b in self._ties) else None

    def take(self, flat: list[Any]) -> list[torch.Tensor]:
        """The tensors of a list whose other entries are known to be as they were."""
        return flat if len(self.positions) == self.count else list(self._take(flat))


def _value_or_type(value: Any) -> Any:
    """The part of an entry that must not change, if it is no tensor: the type of a number that each call reads anew."""
    return type(value) if is_number(value) else value


def _getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda flat: [flat[k] for k in positions]


def _unchanged(now: Sequence[Any], values: Sequence[Any]) -> bool:
    return all(map(is_, now, values)) or all(map(structurally_equal, map(_value_or_type, now), values))
