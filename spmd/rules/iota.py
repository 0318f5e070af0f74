"""Track which tensors hold 0, 1, 2, ... along a dim, and are constant along the others.

``x[torch.arange(len(x)), last]`` and masks built from ``arange`` index each row of a tensor by its own number. Where
the rows are split, each rank numbers its own rows from 0, so nothing has to be gathered; but a rule may only do that
for an index that is known to be an iota. ``arange`` creates one, and views and copies preserve it.
"""

from __future__ import annotations

from math import prod

from .aten import aten
from .base import OpCall
from .cat_split import is_cut, takes_all

ARANGES = frozenset(aten("arange", "arange.start", "arange.start_step"))
EXPANDS = frozenset(aten("expand", "expand_copy"))
PRESERVING = frozenset(
    aten(
        *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims"),
        *("_to_copy", "clone", "detach", "alias", "lift_fresh_copy", "contiguous"),
    )
)


def iota_dim_of(call: OpCall) -> int | None:
    """The dim along which the result of ``call`` holds 0, 1, 2, ..., or None if it is not known to."""
    result = call.results[0]
    if call.target in ARANGES:
        from_zero = call.arg("start", 0) == 0 and call.arg("step", 1) == 1
        return 0 if from_zero and result is not None and not result.dtype.is_floating_point else None
    source = call.operands[0] if len(call.operands) == 1 else None
    if source is None or source.iota_dim is None or result is None or result.dtype.is_floating_point:
        return None
    if call.target in EXPANDS:
        return source.iota_dim + result.ndim - source.ndim
    if is_cut(call) and takes_all(call):
        return source.iota_dim
    alone = prod(source.shape) == prod(result.shape) == source.shape[source.iota_dim] > 1
    return result.shape.index(prod(result.shape)) if call.target in PRESERVING and alone else None
