"""Calls as the next mesh axis sees them: on the shapes that the options chosen for the axes before leave.

All ranks must choose the same option, and what is right for parts of one length may be wrong for others; so a call is
narrowed for ranks that have parts of every length there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Mesh
from passes.ir.program import Placements

from ..placements import Interleaved, OwnOrder, OwnRows, all_shapes, chunk, first_of_each_length, local_shape, splits
from ..rules import Info, OpCall, Option, localize_of
from ..rules.sequences.bands import Band
from .experts.own_order import splits_tokens
from .experts.whole_parts import cut_in_place
from .values import Value


def narrowed(
    call: OpCall, operands: Sequence[Value], chosen: Sequence[Option], mesh: Mesh, hint: Placements | None = None
) -> list[OpCall]:
    """The call as the axis after those of ``chosen`` sees it: the first rank's, then those of ranks that differ.

    ``hint``: the placement that the (first) result should have, in whose runs a replicated operand can be cut.
    """
    axis, hinted = mesh.axes[len(chosen)], _hinted_runs(chosen, hint, mesh)
    goal = hint[len(chosen)] if hint is not None else None
    along = [_along_next(value, [o.operands[k] for o in chosen], mesh) for k, value in enumerate(operands)]
    known: dict[str, Any] = {
        "size": axis.size,
        "interleaved": tuple(
            _runs(placed, hinted if _has_rows(value, call, hinted) else None)
            for value, placed in zip(operands, along, strict=True)
        ),
        "owned": tuple(tuple(dict.fromkeys(p for p in each if isinstance(p, OwnRows))) for each in along),
        "hinted": goal if isinstance(goal, OwnRows) and not isinstance(goal, OwnOrder) else None,  # sorts make those
    }
    return [replace(each, **known) for each in _on_all_lengths(call, *_with_own_order(call, chosen, mesh))]


def _with_own_order(call: OpCall, chosen: Sequence[Option], mesh: Mesh) -> tuple[Sequence[Option], Mesh]:
    """The options chosen for, and those along later axes over which each rank sorts rows by itself; and their axes."""
    if call.own_order is None:
        return chosen, mesh
    later = [axis for axis in mesh.axes[len(chosen) + 1 :] if splits_tokens(axis)]
    return [*chosen, *(call.own_order for _ in later)], Mesh((*mesh.axes[: len(chosen)], *later))


def _along_next(value: Value, before: Sequence[Placement], mesh: Mesh) -> list[Placement]:
    """The placements that a value has along the next axis, where the axes before leave it ``before``."""
    along = [placement[len(before)] for placement in value.nodes if _begins(placement, before, mesh)]
    cut = cut_in_place(value, before, mesh)
    return along if cut is None else [*along, cut]


def _begins(placement: Placements, before: Sequence[Placement | None], mesh: Mesh) -> bool:
    """Whether a placement is ``before`` over the first axes; over one rank all are the same."""
    pairs = zip(placement, before, mesh.axes, strict=False)
    return not before or all(entry == other or axis.size == 1 for entry, other, axis in pairs)


def _runs(along: Sequence[Placement], hinted: Interleaved | None) -> tuple[Interleaved, ...]:
    """Those that are splits in runs of rows. ``hinted``: the runs in which to cut the value if it is replicated."""
    cut = [hinted] if hinted is not None and Replicate() in along else []
    return tuple(dict.fromkeys(p for p in [*along, *cut] if isinstance(p, Interleaved)))


def _hinted_runs(chosen: Sequence[Option], hint: Placements | None, mesh: Mesh) -> Interleaved | None:
    """The runs that a hint asks for along the next axis, if the axes before are split as it says."""
    if hint is None or not _begins(hint, [option.results[0] for option in chosen], mesh):
        return None
    hinted = hint[len(chosen)]
    return hinted if isinstance(hinted, Interleaved) else None


def _has_rows(value: Value, call: OpCall, runs: Interleaved | None) -> bool:
    """Whether a value has as many rows as the (first) result, where that is split, or is one number for all."""
    result = call.results[0]
    if runs is None or result is None or runs.dim >= len(value.shape):
        return runs is not None and not value.shape
    return value.shape[runs.dim] == result.shape[runs.dim]


def _on_all_lengths(call: OpCall, chosen: Sequence[Option], mesh: Mesh) -> list[OpCall]:
    if not any(map(_divides, chosen)):
        return [call]
    return [_on_rank(call, chosen, rank) for rank in _different_ranks(call, chosen, mesh.axes[: len(chosen)])]


def _divides(option: Option) -> bool:
    return any(isinstance(p, (Shard, OwnRows)) for p in (*option.operands, *option.results))


def _different_ranks(call: OpCall, chosen: Sequence[Option], axes: Sequence[Axis]) -> list[Mesh]:
    """The axes seen from ranks whose parts have all the lengths there are: from one rank, if all is split evenly."""
    coordinates: list[set[int]] = [{0} for _ in axes]
    for info, placement in _placed(call, chosen):
        for k, entry in enumerate(placement):
            if isinstance(entry, Shard):
                sizes = {shape[entry.dim] for shape in all_shapes(info.shape, placement[:k], axes[:k])}
                coordinates[k].update(n for size in sizes for n in _nonempty(size, axes[k].size))
    ranks = product(*map(sorted, coordinates))
    return [Mesh(tuple(replace(axis, coordinate=n) for axis, n in zip(axes, rank, strict=True))) for rank in ranks]


def _placed(call: OpCall, chosen: Sequence[Option]) -> list[tuple[Info, Placements]]:
    """Each tensor of a call, with its placement over the axes chosen for."""
    operands = [(info, tuple(o.operands[k] for o in chosen)) for k, info in enumerate(call.operands)]
    results = [
        (info, tuple(o.results[k] or Replicate() for o in chosen)) for k, info in enumerate(call.results) if info
    ]
    return operands + results


def _nonempty(size: int, ranks: int) -> list[int]:
    """The first rank of each length of part, but for empty parts, for which any option is right."""
    return [n for n in first_of_each_length(size, ranks) if chunk(size, ranks, n)[1]]


def _on_rank(call: OpCall, chosen: Sequence[Option], axes: Mesh) -> OpCall:
    """The call on the parts that one rank has."""

    def narrow(info: Info, placement: tuple[Any, ...], iota_dim: int | None = None) -> Info:
        return Info(local_shape(info.shape, placement, axes), info.dtype, iota_dim, info.group, numbered=info.numbered)

    operands = [
        replace(
            narrow(info, tuple(o.operands[k] for o in chosen), _iota_dim_left(info, k, chosen)),
            positions=_band_left(info, k, chosen),
        )
        for k, info in enumerate(call.operands)
    ]
    results = tuple(
        None if info is None else narrow(info, tuple(o.results[k] for o in chosen))
        for k, info in enumerate(call.results)
    )
    remaining = iter(operands)
    args, kwargs = _map_infos((call.args, call.kwargs), lambda _: next(remaining))
    localize = localize_of(call.target)
    if localize is not None:
        args = localize(call, args, kwargs, tuple(None if info is None else info.shape for info in results))
    of_parts = any(map(_divides, (option for option in chosen if option is not call.own_order)))
    return replace(call, args=args, kwargs=kwargs, operands=tuple(operands), results=results, of_parts=of_parts)


def _iota_dim_left(info: Info, position: int, chosen: Sequence[Option]) -> int | None:
    """The iota dim of an operand, if the axes before leave it counting from 0."""
    cut = (o for o in chosen if splits(o.operands[position], info.iota_dim or 0) and position not in o.from_zero)
    return info.iota_dim if next(cut, None) is None else None


def _band_left(info: Info, position: int, chosen: Sequence[Option]) -> Band | None:
    """The band of a mask, if the axes before leave its last two dims whole."""
    cut = any(splits(o.operands[position], info.ndim - d) for o in chosen for d in (1, 2))
    return info.positions if isinstance(info.positions, Band) and not cut else None


def _map_infos(tree: Any, function: Any) -> Any:
    if isinstance(tree, Info):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map_infos(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_infos(item, function) for key, item in tree.items()}
    return tree
