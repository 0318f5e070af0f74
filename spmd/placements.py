"""Placements in uniform form, a tuple with one per mesh axis, and the local shapes they give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Mesh, PartitionError, PlacementError
from passes.ir.program import Placements

from ._torch import accept_unequal_to_shard

FEWEST = 256  # rows on a rank, or of a pair, for there to be room for a multiple of their mean

AnyPlacement = Placement | Sequence[Placement] | Mapping[str, Placement]


class Interleaved(Shard):
    """Split along ``dim``, which has ``outer`` runs of equal length: each rank has the same part of every run.

    A (time, batch, width) that is split along its batch has it when time and batch are flattened: ``dim`` is 0, with
    one run per time. It occurs only inside of programs; runs always split evenly. On a mesh of several axes, ``outer``
    is the number of runs that the previous axes leave.
    """

    def __init__(self, dim: int, outer: int) -> None:
        super().__init__(dim)
        self.outer = outer

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (self.dim, self.outer) == (other.dim, other.outer)

    def __hash__(self) -> int:
        return hash((type(self), self.dim, self.outer))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, outer={self.outer})"

    __str__ = __repr__


class Mirrored(Interleaved):
    """Split along ``dim`` so that each rank has an early and a late part of every run: of causal rows, equal work.

    Each run consists of twice as many pieces as there are ranks, of equal length. The rank at ``r`` of ``n`` has the
    pieces ``r`` and ``2 * n - 1 - r``, in this order.
    """


class OwnRows(Placement):
    """Rows of ``dim`` that have one owner each along the axis: a rank has its own, in order, in front.

    Behind them, up to ``length``, are rows with any values, which must reach no other row. It occurs only inside of
    programs.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def along(self, dim: int) -> OwnRows:
        """The same rows, as those of another dim."""
        return type(self)(dim)

    def length(self, size: int, ranks: int) -> int:
        """The rows that each of ``ranks`` has room for, of ``size`` in all."""
        raise NotImplementedError

    def _key(self) -> tuple[object, ...]:
        return (self.dim,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnRows) and type(other) is type(self) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash((type(self).__name__, *self._key()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._key()}".replace(",)", ")")

    __str__ = __repr__


class Dealt(OwnRows):
    """Rows dealt out like cards: row k is that of rank k mod ranks."""

    def length(self, size: int, ranks: int) -> int:
        """The number of rows that the first rank is dealt: none has more."""
        return -(-size // ranks)


class OwnOrder(OwnRows):
    """Rows that a step sorts: a rank has those of its own part of what is sorted, in the order in which it sorts them.

    So only an op that sees no order of rows has a result of the same rows. Numbers of rows are those of a rank's own.
    """

    def length(self, size: int, ranks: int) -> int:
        """The number of rows on each rank, equal on all."""
        return size // ranks


class ByGroup(OwnRows):
    """Rows by group: those of the experts that a rank has, of ``count`` experts in all.

    ``of`` is the captured node that says whose they are. ``ends``: it holds the row at which each expert's rows end,
    of rows that are sorted by expert; else the expert of each row. ``rows``: their number; those behind the last end
    are the last rank's. ``room``: for which multiple of the ranks' mean there is room; None: for all rows.
    """

    def __init__(self, dim: int, of: str, count: int, ends: bool, rows: int, room: float | None = None) -> None:
        super().__init__(dim)
        self.of, self.count, self.ends, self.rows, self.room = of, count, ends, rows, room

    def along(self, dim: int) -> ByGroup:
        """The same rows, as those of another dim."""
        return ByGroup(dim, self.of, self.count, self.ends, self.rows, self.room)

    def length(self, size: int, ranks: int) -> int:
        """All of them, since one rank may have the experts of every row; or what there is room for."""
        if self.room is None or size < FEWEST * ranks:  # of few, chance alone may give a rank many more than the mean
            return size
        return min(size, math.ceil(self.room * size / ranks))

    def slots(self, ranks: int) -> int:
        """The rows that each pair of ranks may exchange: of no more than there is room for; all where these are few."""
        return self.rows if self.rows < FEWEST * ranks**2 else self.length(self.rows, ranks) // ranks

    def _key(self) -> tuple[object, ...]:
        return (self.dim, self.of, self.count, self.ends, self.rows, self.room)


class OnStage(Shard):
    """Whole on the ranks of some stages of a pipeline, and nowhere else: there it has no rows of dim 0."""

    def __init__(self, stages: Iterable[int]) -> None:
        super().__init__(0)
        self.stages = tuple(sorted(stages))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnStage) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash((type(self), self.stages))

    def __reduce__(self) -> tuple[Any, ...]:
        return OnStage, (self.stages,)

    def __repr__(self) -> str:
        return f"OnStage({', '.join(map(str, self.stages))})"

    __str__ = __repr__


accept_unequal_to_shard(OnStage)

OWN_PLACEMENTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "interleaved": (Interleaved, ("dim", "outer")),
    "mirrored": (Mirrored, ("dim", "outer")),
    "by group": (ByGroup, ("dim", "of", "count", "ends", "rows", "room")),
    "dealt": (Dealt, ("dim",)),
    "own order": (OwnOrder, ("dim",)),
    "on stages": (OnStage, ("stages",)),
}
"""All of these by name, each with the attributes that its constructor takes."""


def extent(placement: Shard, size: int, axis: Axis) -> tuple[int, int]:
    """(start, length) of the rows that a rank has of ``size`` rows along an axis that splits them."""
    if isinstance(placement, OnStage):
        return 0, size if axis.coordinate in placement.stages else 0
    return chunk(size, axis.size, axis.coordinate)


def splits(placement: Placement, dim: int) -> bool:
    """Whether a placement splits ``dim``, in runs or not."""
    return isinstance(placement, Shard) and placement.dim == dim


def rows(dim: int, outer: int = 1) -> Shard:
    """Split along ``dim`` in ``outer`` runs; a plain ``Shard`` for one run."""
    return Shard(dim) if outer == 1 else Interleaved(dim, outer)


def same_rows(like: Shard, dim: int, outer: int = 1) -> Shard:
    """Split along ``dim`` in ``outer`` runs, each of them as ``like`` splits its own."""
    return Mirrored(dim, outer) if isinstance(like, Mirrored) else rows(dim, outer)


def mirrored_pieces(rank: int, ranks: int) -> tuple[int, int]:
    """The pieces of a run that a rank has where it is mirrored."""
    return rank, 2 * ranks - 1 - rank


def normalize(placement: Any, mesh: Mesh, name: str) -> Placements:
    """One placement for a 1-D mesh, a list with one per axis, or a dict by axis name (axes left out are replicated).

    Raises ``PlacementError`` for anything else; ``name`` is that of its tensor.
    """
    axes = [axis.name for axis in mesh.axes]
    given = _entries(placement, axes, name)
    if len(given) != len(axes):
        raise PlacementError(
            f"the placement of {name} has {len(given)} entries, but the mesh has {len(axes)} axes {axes}: "
            "give one placement per axis, or a dict from axis name to placement"
        )
    for entry in given:
        if not isinstance(entry, (Shard, Replicate, Partial)):
            raise PlacementError(f"expected Shard, Replicate or Partial for {name}, got {entry!r}")
    return tuple(given)


def _entries(placement: Any, axes: list[str], name: str) -> list[Any]:
    if isinstance(placement, Mapping):
        unknown = sorted(set(placement) - set(axes))
        if unknown:
            raise PlacementError(f"the placement of {name} names the mesh axes {unknown}; the mesh has {axes}")
        return [placement.get(axis, Replicate()) for axis in axes]
    if isinstance(placement, Placement):
        return [placement]
    if isinstance(placement, Sequence) and not isinstance(placement, str):
        return list(placement)
    raise PlacementError(f"expected a placement for {name} (Shard, Replicate, Partial), got {placement!r}")


def check_dims(placement: Placements, ndim: int, name: str) -> Placements:
    """Raise ``PlacementError`` if a split dim does not exist; negative dims become positive."""
    checked: list[Placement] = []
    for entry in placement:
        if isinstance(entry, Shard):
            dim = entry.dim + ndim if entry.dim < 0 else entry.dim
            if not 0 <= dim < ndim:
                raise PlacementError(f"{name} has {ndim} dims, so it cannot be split along dim {entry.dim}")
            entry = Shard(dim)
        checked.append(entry)
    return tuple(checked)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part ``index`` of ``size`` rows, cut as by ``torch.chunk``; the last parts may be empty."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def local_shape(shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The shape of this rank's part."""
    local = list(shape)
    for entry, axis in nested(placement, mesh.axes):
        if isinstance(entry, Shard):
            local[entry.dim] = extent(entry, local[entry.dim], axis)[1]
        elif isinstance(entry, OwnRows):
            local[entry.dim] = entry.length(local[entry.dim], axis.size)
    return tuple(local)


def left_to_cut(has: Placements, placement: Placements) -> Placements:
    """The placement to cut a part of by ``has``, so that it becomes that by ``placement``, which splits further."""
    return tuple(Replicate() if own == entry else entry for own, entry in zip(has, placement, strict=True))


_PLAIN = frozenset({Replicate, Shard, Partial})


def nested(placement: Placements, axes: Sequence[Axis]) -> list[tuple[Placement, Axis]]:
    """The entries of a placement, each with its axis, as they divide rows: each rank's own order first, groups last."""

    def turn(pair: tuple[Placement, Axis]) -> int:
        return isinstance(pair[0], ByGroup) - isinstance(pair[0], OwnOrder)

    pairs = list(zip(placement, axes, strict=True))
    # Most placements are plain, and torch's check of a placement's class is slow.
    return pairs if _PLAIN.issuperset(map(type, placement)) else sorted(pairs, key=turn)


def smallest_shape(shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The smallest length of each dim over all ranks; with two axes on one dim, any of its ranks may have it."""
    return tuple(map(min, zip(*all_shapes(shape, placement, mesh.axes), strict=True)))


def all_shapes(shape: Sequence[int], placement: Placements, axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    """The shapes of the parts on the ranks of ``axes``, each once, the first rank's first."""
    shapes = [tuple(shape)]
    for entry, axis in nested(placement, axes):
        if isinstance(entry, Shard):
            cut = [_with_length(one, entry.dim, n) for one in shapes for n in _lengths(one[entry.dim], axis.size)]
            shapes = list(dict.fromkeys(cut))
        elif isinstance(entry, OwnRows):
            shapes = [_with_length(s, entry.dim, entry.length(s[entry.dim], axis.size)) for s in shapes]
    return shapes


def _lengths(size: int, parts: int) -> list[int]:
    return [chunk(size, parts, index)[1] for index in first_of_each_length(size, parts)]


def first_of_each_length(size: int, parts: int) -> list[int]:
    """The first index of each length among the parts of ``chunk``: full, shorter, empty."""
    step = max(-(-size // parts), 1)
    full = size // step
    shorter = [full] if full < parts else []
    empty = [full + 1] if size % step and full + 1 < parts else []
    return [0, *(index for index in shorter + empty if index)]


def _with_length(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def local_start(shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The start of this rank's part along each dim; 0 for a dim that is cut in runs."""
    local, starts = list(shape), [0] * len(shape)
    for entry, axis in nested(placement, mesh.axes):
        if isinstance(entry, Shard):
            start, local[entry.dim] = extent(entry, local[entry.dim], axis)
            starts[entry.dim] += 0 if isinstance(entry, Interleaved) else start
        elif isinstance(entry, OwnOrder):
            local[entry.dim] = entry.length(local[entry.dim], axis.size)
    return tuple(starts)


def local_runs(shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[tuple[int, int, int], ...]:
    """This rank's part of a global shape: (first index, length, length of the whole) of each dim.

    A dim that is cut in runs counts as two, the runs and the rows of one.
    """
    dims = [[(0, size, size)] for size in shape]
    for entry, axis in zip(placement, mesh.axes, strict=True):
        if isinstance(entry, Shard):
            outer = entry.outer if isinstance(entry, Interleaved) else 1
            _cut(dims[entry.dim], outer, axis.size, axis.coordinate)
    return tuple(run for dim in dims for run in dim)


def _cut(dim: list[tuple[int, int, int]], outer: int, ranks: int, coordinate: int) -> None:
    """Cut each of the ``outer`` runs that this rank has of a dim, in place; the dim is given by its factors."""
    for k, (start, length, size) in enumerate(dim):
        rows = length // outer
        if 1 < outer < length and not (length % outer or start % rows or size % rows):  # runs begin inside this factor
            dim[k : k + 1] = [(start // rows, outer, size // rows), (0, rows, rows)]
            outer = 1
        elif outer > 1 and outer % length == 0:
            outer //= length
        elif outer == 1 and (k == len(dim) - 1 or length % ranks == 0):
            first, rows = chunk(length, ranks, coordinate)
            dim[k] = (start + first, rows, size)
            return
        elif outer == 1 and ranks % length == 0:  # several ranks share a run
            ranks //= length
            dim[k] = (start + coordinate // ranks, 1, size)
            coordinate %= ranks
        else:
            raise PartitionError(
                f"expected {ranks} ranks to have whole runs of rows, or equal parts of one, but there are {outer} runs "
                f"in {length} rows: draw random numbers before dims that two mesh axes split are flattened"
            )


def global_shape(shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The global shape, if every rank has an equal part of this shape."""
    full = list(shape)
    for entry, axis in zip(placement, mesh.axes, strict=True):
        if isinstance(entry, Shard):
            full[entry.dim] *= axis.size
    return tuple(full)
