"""The steps of a redistribution, one mesh axis each, and their costs: seconds, collectives and bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Kind, Mesh
from passes.ir.program import Placements

from ..placements import Interleaved, OwnOrder, OwnRows, local_shape, splits

# Reading and writing a byte here counts as this share of sending it: without communication, the least work is chosen.
_LOCAL = 1e-3
_RUNS_STAY = 1e6  # collectives: rows of other micro-batches are not there, and any traffic is taken before


def steps(source: Placements, target: Placements, mesh: Mesh) -> Iterator[tuple[Placements, int, Placement]]:
    """The steps from ``source`` to ``target``: the placement before each, the axis that it changes, and its new entry.

    Slices first, then sums (those over micro-batches, then those that leave a part, unless an axis says ``sums_last``,
    then the others, the nearest ranks first), then gathers, so that little is communicated. A dim that several axes
    split is cut by the outermost one first: an axis that would break this order is replicated, and cut in the end. Own
    rows are taken last, when no other axis moves rows any more, and put back first, as a sum of one summand a rank.
    """
    current, goals = _on_many_ranks(source, mesh), _on_many_ranks(target, mesh)
    axes, runs = range(len(current)), _name_runs(current, goals, mesh)
    own = [k for k in axes if _moves_own_rows(current, goals, k)]
    for index in reversed(own):
        if isinstance(current[index], OwnRows):
            yield tuple(current), index, Partial()
            current[index] = Partial()
    last = [(index, goals[index]) for index in own if isinstance(goals[index], OwnRows)]
    for index, _ in last:
        goals[index] = Replicate()
    whole = [k for k in axes if isinstance(current[k], Replicate)]
    in_time = [k for k in axes if not mesh.axes[k].of_ranks]
    sums = [k for k in axes if isinstance(current[k], Partial)]
    leave_parts = {k for k in sums if isinstance(goals[k], Shard)}
    first = leave_parts if any(mesh.axes[k].sums_last for k in in_time) else in_time
    sums.sort(key=lambda k: (k not in first, k not in in_time, k not in leave_parts, k if k in leave_parts else -k))
    split = [k for k in reversed(axes) if isinstance(current[k], Shard)]
    for index in [*whole, *sums, *split, *axes]:
        goal = goals[index] if _keeps_order(current, goals, index, runs) else Replicate()
        if goal != current[index]:
            yield tuple(current), index, goal
            current[index] = goal
    for index, rows in last:
        yield tuple(current), index, rows
        current[index] = rows


def _moves_own_rows(current: Sequence[Placement], goals: Sequence[Placement], index: int) -> bool:
    """Whether an axis takes or puts back own rows: it changes, or another axis that divides the same dim does."""
    held = [p for p in (current[index], goals[index]) if isinstance(p, OwnRows)]
    if current[index] == goals[index] and isinstance(current[index], OwnOrder):  # other axes divide what it leaves
        return False
    others = [k for k in range(len(current)) if k != index and current[k] != goals[k]]
    divided = [p.dim for k in others for p in (current[k], goals[k]) if isinstance(p, (Shard, OwnRows))]
    return bool(held) and (current[index] != goals[index] or any(p.dim in divided for p in held))


def _on_many_ranks(placements: Placements, mesh: Mesh) -> list[Placement]:
    """The placements, replicated over axes of one rank, where all placements are the same."""
    return [Replicate() if axis.size == 1 else p for p, axis in zip(placements, mesh.axes, strict=True)]


def _name_runs(current: list[Placement], goals: list[Placement], mesh: Mesh) -> set[int]:
    """Name a cut inside of an outer axis's part by the runs that it is of the whole, where that axis alone moves.

    So parts of parts are gathered, or scattered, along the outer axis, and stay on the ranks of the inner one. Returns
    the inner axes.
    """
    found = set()
    for outer, axis in enumerate(mesh.axes):
        for inner in range(outer + 1, len(current)):
            for ends, others in ((current, goals), (goals, current)):
                cut, runs = ends[outer], others[inner]
                if not isinstance(cut, Shard) or not ends[inner] == cut != others[outer]:
                    continue
                if type(cut) is Shard and runs == Interleaved(cut.dim, axis.size):
                    ends[inner] = runs
                    found.add(inner)
    return found


def _keeps_order(current: Sequence[Placement], goals: Sequence[Placement], index: int, runs: Collection[int]) -> bool:
    """Whether the axis at ``index`` can take its goal now: cut inside what outer axes leave, and outside inner ones."""
    goal = goals[index]
    if not isinstance(goal, Shard) or index in runs:
        return True
    outer = [k for k in range(index) if splits(current[k], goal.dim) or splits(goals[k], goal.dim)]
    outer_done = all(current[k] == goals[k] for k in outer)
    inner_cuts = any(splits(p, goal.dim) for k, p in enumerate(current) if k > index and k not in runs)
    return outer_done and (goal == current[index] or not inner_cuts)


def cost(source: Placement, target: Placement, nbytes: float, axis: Axis, may_become_sum: bool = False) -> float:
    """The seconds of a step along one axis, estimated by its rate and the bytes that a rank sends.

    ``nbytes`` is the size of the value before this axis splits it; ``may_become_sum``: whether a replicated one may.
    Infinite where no step leads from ``source`` to ``target``.
    """
    ranks, rate = axis.size, axis.rate
    if source == target or ranks == 1:
        return 0.0
    part, rest = nbytes / ranks, nbytes * (ranks - 1) / ranks
    match source, target:  # what is frequent comes first: torch's check of a placement's class is slow
        case Replicate(), Shard():
            return _local_work(part, axis)
        case Shard(), Replicate():
            return rate.seconds(rest)
        case Partial(), Replicate():
            return rate.seconds(2 * rest)
        case Replicate(), Partial(reduce_op="sum"):
            # A sum over micro-batches is known after the last of them: it cannot be a summand in each.
            stays = not may_become_sum or axis.ordered or not axis.at_once
            return math.inf if stays else _local_work(nbytes, axis)
        case (Replicate(), OwnRows()) | (OwnRows(), Partial(reduce_op="sum")):
            return _local_work(part, axis)
        case OwnRows(), _:
            return cost(Partial(), target, nbytes, axis)
        case _, OwnRows():
            return cost(source, Replicate(), nbytes, axis) + _local_work(part, axis)
        case (Interleaved(), Shard()) | (Shard(), Interleaved()):
            return cost(source, Replicate(), nbytes, axis) + _local_work(part, axis)
        case Shard(), Shard():
            return rate.seconds(rest / ranks) + _local_work(nbytes, axis)
        case Partial(reduce_op="sum"), Shard():
            # What was added up over micro-batches is whole, also where a part would do.
            return rate.seconds(rest) if axis.of_ranks else math.inf
        case Partial(), Shard():
            return rate.seconds(2 * rest) + _local_work(part, axis)
        case _:
            return math.inf


def cost_outside_runs(source: Placements, goal: Placement, index: int, mesh: Mesh) -> float:
    """The seconds by which a cut of rows is avoided that would come outside of that into micro-batches; mostly none.

    No micro-batch has all rows of such a part. Each has the whole of its own rows instead, for which a rank may gather
    what else is split.
    """
    if not isinstance(goal, Shard) or goal == source[index]:
        return 0.0
    is_outside = any(source[k] == goal and not mesh.axes[k].at_once for k in range(index + 1, len(mesh.axes)))
    return _RUNS_STAY * mesh.axes[index].rate.latency if is_outside else 0.0


def _local_work(nbytes: float, axis: Axis) -> float:
    """Seconds, next to none, in which a rank reads and writes this many bytes."""
    return _LOCAL * nbytes * axis.rate.per_byte


def total_cost(source: Placements, target: Placements, nbytes: float, mesh: Mesh) -> float:
    """The sum of ``cost`` over the steps from ``source`` to ``target``; the whole value has ``nbytes``."""
    total = 0.0
    for current, index, goal in steps(source, target, mesh):
        others = [axis.size for k, axis in enumerate(mesh.axes) if k != index and isinstance(current[k], Shard)]
        nbytes_here = nbytes / math.prod(others)
        total += cost(current[index], goal, nbytes_here, mesh.axes[index], may_become_sum=True)
    return total


@dataclass(frozen=True)
class Traffic:
    """One collective: its kind, the name of its axis, and the bytes of one rank's local input, padding included."""

    kind: Kind
    axis: str
    nbytes: int


def traffic(
    shape: Sequence[int], itemsize: int, source: Placements, target: Placements, mesh: Mesh
) -> Iterator[Traffic]:
    """The collectives of a redistribution, as ``redistribute.py`` emits them."""
    for current, index, goal in steps(source, target, mesh):
        kind = _kind(shape, current, index, goal, mesh)
        if kind is not None:
            yield Traffic(kind, mesh.axes[index].name, itemsize * _sent(shape, current, index, kind, goal, mesh))


def _kind(shape: Sequence[int], current: Placements, index: int, goal: Placement, mesh: Mesh) -> Kind | None:
    match current[index], goal:
        case (OwnRows(), _) | (_, OwnRows()):
            return None
        case Partial(reduce_op="sum"), Shard():
            return Kind.REDUCE_SCATTER
        case Partial(), _:
            return Kind.ALL_REDUCE
        case (Interleaved(), _) | (Shard(), Interleaved() | Replicate()):
            return Kind.ALL_GATHER
        case Shard(dim=before), Shard(dim=after):
            even = is_cut_evenly(shape, current, index, before, mesh) and is_cut_evenly(
                shape, current, index, after, mesh
            )
            return Kind.ALL_TO_ALL if even else Kind.ALL_GATHER
    return None


def _sent(shape: Sequence[int], current: Placements, index: int, kind: Kind, goal: Placement, mesh: Mesh) -> int:
    """The elements that this rank sends: a dim that the axis does not cut into equal parts is padded."""
    axis, placement = mesh.axes[index], current[index]
    whole = list(local_shape(shape, (*current[:index], Replicate(), *current[index + 1 :]), mesh))
    cut = placement if isinstance(placement, Shard) else goal
    if kind is Kind.ALL_REDUCE or not isinstance(cut, Shard):
        return math.prod(whole)
    if not is_cut_evenly(shape, current, index, cut.dim, mesh):
        before = local_shape(shape, current[:index], Mesh(mesh.axes[:index]))[cut.dim]
        whole[cut.dim] = -(-before // axis.size) * axis.size
    return math.prod(whole) // (1 if kind is Kind.REDUCE_SCATTER else axis.size)


def is_cut_evenly(shape: Sequence[int], current: Placements, index: int, dim: int, mesh: Mesh) -> bool:
    """Whether the axis at ``index``, and those before that split ``dim``, cut it into equal parts."""
    cuts = (axis.size for p, axis in zip(current[:index], mesh.axes, strict=False) if splits(p, dim))
    return shape[dim] % (mesh.axes[index].size * math.prod(cuts)) == 0
