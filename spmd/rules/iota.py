"""Track which tensors hold 0, 1, 2, ... along a dim, and are constant along the others.

``x[torch.arange(len(x)), last]`` and masks built from ``arange`` index each row of a tensor by its own number. Where
the rows are split, each rank numbers its own rows from 0, so nothing has to be gathered; but a rule may only do that
for an index that is known to be an iota. ``arange`` creates one, and views and copies preserve it.

A function per kind of op proposes the dim; ``iota_dim_of`` alone decides whether it is a fact. What cannot be one is
unknown, which costs a gather at most.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .base import Info, OpCall
from .cat_split import is_cut, takes_all
from .optional_ops import aten
from .views import groups

Proposal = Callable[[OpCall, Info, int, Info], int | None]
"""``(call, operand, its iota dim, result) -> dim of the result``."""


def iota_dim_of(call: OpCall) -> int | None:
    """The dim along which the result of ``call`` holds 0, 1, 2, ..., or None if it is not known to."""
    result = call.results[0] if call.results else None
    if result is None:
        return None
    if call.target in _ARANGES:
        given = call.arg("start", 0), call.arg("step", 1)
        from_zero = not any(isinstance(each, torch.SymInt) for each in given) and given == (0, 1)  # a number may change
        return 0 if from_zero and _counts(result, 0) else None
    source = call.operands[0] if len(call.operands) == 1 else None
    if source is None or source.iota_dim is None or not _counts(source, source.iota_dim):
        return None
    dim = moved_dim(call, source, source.iota_dim, result)
    if dim is None or not _counts(result, dim) or result.shape[dim] != source.shape[source.iota_dim]:
        return None
    return dim


def _counts(info: Info, dim: int) -> bool:
    """Whether a tensor can hold 0, 1, 2, ... along ``dim``: more than one number, and none too large for its dtype."""
    if not 0 <= dim < info.ndim or info.dtype is torch.bool or info.dtype.is_floating_point or info.dtype.is_complex:
        return False
    return 1 < info.shape[dim] <= torch.iinfo(info.dtype).max


def moved_dim(call: OpCall, source: Info, dim: int, result: Info) -> int | None:
    """The dim of the result that has the same rows as ``dim`` of ``source``, if a view or copy is known to have one."""
    if is_cut(call):
        return dim if takes_all(call) else None
    proposal = _PROPOSALS.get(call.target)
    return proposal(call, source, dim, result) if proposal is not None else None


def _same(call: OpCall, source: Info, dim: int, result: Info) -> int | None:
    return dim


def _aligned(call: OpCall, source: Info, dim: int, result: Info) -> int | None:
    """New dims of an expanded tensor come first."""
    return dim + result.ndim - source.ndim


def _left_alone(call: OpCall, source: Info, dim: int, result: Info) -> int | None:
    """The dim that has the same rows after a reshape; None if they are in several dims, or with others in one."""
    found = (after for before, after in groups(source.shape, result.shape) if before == [dim] and len(after) == 1)
    return next((after[0] for after in found), None)


_ARANGES = frozenset(aten("arange", "arange.start", "arange.start_step"))
_PROPOSALS: dict[object, Proposal] = {
    **dict.fromkeys(aten("_to_copy", "clone", "detach", "alias", "lift_fresh_copy", "contiguous"), _same),
    **dict.fromkeys(aten("expand", "expand_copy"), _aligned),
    **dict.fromkeys(
        aten("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims"), _left_alone
    ),
}
