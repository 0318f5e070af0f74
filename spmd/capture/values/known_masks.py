"""Selections by masks whose values are known while tracing, their unique values, and counts into known classes.

``s[~torch.eye(n, dtype=torch.bool)]`` has a shape that depends on values, but here they follow from no input: the
positions become constants of the program.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._torch import disable_modes
from .known_values import known_value

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_UNIQUE = (
    *(aten._unique2.default, aten.unique_consecutive.default),
    *(aten.unique_dim.default, aten.unique_dim_consecutive.default),
)


def known_mask_table() -> dict[Any, Any]:
    """Decompositions of the first trace."""
    return {
        aten.index.Tensor: _index,
        aten.masked_select.default: _masked_select,
        aten.nonzero.default: _nonzero,
        aten.bincount.default: _bincount,
        **{op: partial(_unique, op) for op in _UNIQUE},
    }


def _positions(mask: Tensor) -> Tensor | None:
    """The positions of the true elements, a row each, as a constant; None if they are not known."""
    value = known_value(mask)
    if value is None:
        return None
    with disable_modes(), torch.no_grad():
        positions = value.nonzero()
    constant: Tensor = aten.lift_fresh.default(positions)
    return constant


def _index(x: Tensor, indices: list[Tensor | None]) -> Any:
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        return NotImplemented
    known: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            known.append(index)
            continue
        positions = _positions(index)
        if positions is None:
            return NotImplemented
        known += positions.unbind(1)
    return aten.index.Tensor(x, known)


def _masked_select(x: Tensor, mask: Tensor) -> Any:
    x, mask = torch.broadcast_tensors(x, mask)
    return _index(x, [mask])


def _nonzero(x: Tensor) -> Any:
    positions = _positions(x)
    return NotImplemented if positions is None else positions


def _unique(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The results of an op on a known value, as constants: how many crops have each of some sizes, say."""
    value = known_value(x)
    if value is None:
        return NotImplemented
    with disable_modes(), torch.no_grad():
        results = op(value, *args, **kwargs)
    return tuple(aten.lift_fresh.default(each) for each in results)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Counts of ``minlength`` classes; a number beyond them is an error when the program runs."""
    if not minlength:
        return NotImplemented
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    return torch.zeros(minlength, dtype=weights.dtype, device=x.device).scatter_add(0, x.long(), weights)
