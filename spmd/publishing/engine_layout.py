"""Names and parts of tensors that a reader wants, of those that are published: an inference engine's own.

A table of names, as that of ``spmd.from_pretrained``, renames, fuses and splits. ``split`` then has, by pattern of the
reader's names, the dim along which a tensor is split over the ranks of the engine:

    {"*.q_proj.weight": 0, "*.o_proj.weight": 1}
    {"*.qkv.weight": (0, (512, 128, 128))}          a fused one: these numbers of rows each by itself

Tensors that the table fuses along this dim are split one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from typing import Any

import torch

from ..checkpoints.names import Names, Piece, Pieces
from .layout import Layout, Part, Tensor

Split = Mapping[str, int | tuple[int, Sequence[int]]]
Run = tuple[int, int, int]  # of a dim: the first index in the whole, the first index in the part, the length


@dataclass(frozen=True)
class Target:
    """A tensor of the reader: ``shape`` is that of its part, which is these runs of ``dim`` of the whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    runs: tuple[Run, ...]


class EngineLayout:
    """The tensors of a reader's rank by name, and how they are put together of published parts."""

    def __init__(self, layout: Layout, names: Names | None, split: Split | None, rank: int, ranks: int) -> None:
        """Raises ``TypeError`` or ``ValueError`` for tables that do not fit what is published."""
        known = {name: layout.tensors[layout.ties.get(name, name)] for name in [*layout.tensors, *layout.ties]}
        self._layout = layout
        self._pieces = Pieces.by(names, {name: each.shape for name, each in known.items()})
        self._parts: dict[str, list[Part]] = {}
        for part in layout.parts:
            self._parts.setdefault(part.name, []).append(part)
        dims = _dims(split, self._pieces)
        self.tensors = {
            source: _target_of(source, shape, known, self._pieces.sources[source], dims.get(source), rank, ranks)
            for source, shape in self._pieces.shapes.items()
        }

    def first_names(self) -> dict[str, str]:
        """From the names of tensors that are tied where they were published to the first ones."""
        found: dict[str, str] = {}
        for name, first in self._layout.ties.items():
            pairs = zip(self._pieces.of[name], self._pieces.of[first], strict=False)
            found |= {one.source: other.source for one, other in pairs if one.source != other.source}
        return found

    def fill(self, name: str, target: torch.Tensor, segments: Sequence[torch.Tensor]) -> None:
        """Copy the values of a tensor into ``target``, from the segments of all ranks."""
        wanted = self.tensors[name]
        if not wanted.shape:
            return self._fill(self._pieces.sources[name][0].name, (), target, segments)
        for start, at, length in wanted.runs:
            first = [0] * target.ndim
            first[wanted.dim] = start
            for piece in self._pieces.sources[name]:
                self._fill_piece(piece, first, target.narrow(wanted.dim, at, length), segments)

    def _fill_piece(
        self, piece: Piece, first: Sequence[int], target: torch.Tensor, segments: Sequence[torch.Tensor]
    ) -> None:
        """Copy those of the rows from ``first`` on that a piece has."""
        low, high = max(first[0], piece.start), min(first[0] + target.shape[0], piece.start + piece.rows)
        if low >= high:
            return
        target = target[low - first[0] : high - first[0]]
        start = (low - piece.start + piece.at, *first[1:])
        if piece.index is not None:
            start, target = (piece.index, *start), target[None]
        self._fill(piece.name, start, target, segments)

    def _fill(self, name: str, first: Sequence[int], target: torch.Tensor, segments: Sequence[torch.Tensor]) -> None:
        """Copy the box of a published tensor that starts at ``first``, and has the shape of ``target``."""
        name = self._layout.ties.get(name, name)
        dtype = self._layout.tensors[name].dtype
        for part in self._parts.get(name, []):
            to, of = target, part.of(segments[part.rank], dtype)
            for dim, (low, size, start, length) in enumerate(
                zip(first, target.shape, part.start, part.sizes, strict=True)
            ):
                begin, end = max(low, start), min(low + size, start + length)
                if begin >= end:
                    break
                to, of = to.narrow(dim, begin - low, end - begin), of.narrow(dim, begin - start, end - begin)
            else:
                to.copy_(of)


def _dims(split: Split | None, pieces: Pieces) -> dict[str, tuple[str, int | tuple[int, Sequence[int]]]]:
    """For each name that a pattern matches, the first such pattern and what it says."""
    if split is not None and not isinstance(split, Mapping):
        raise TypeError(f"expected split to be a dict from patterns of names to dims, got {split!r}")
    for pattern, value in (split or {}).items():
        if not isinstance(pattern, str) or not _is_split(value):
            raise ValueError(f"expected a dim, or (dim, sizes), for a pattern of names, got {pattern!r}: {value!r}")
        if not any(fnmatch(name, pattern) for name in pieces.shapes):
            raise ValueError(f"split has {pattern!r}, which matches none of {_some(pieces.shapes)}")
    return {
        name: next((pattern, value) for pattern, value in split.items() if fnmatch(name, pattern))
        for name in (pieces.shapes if split else ())
        if split and any(fnmatch(name, pattern) for pattern in split)
    }


def _is_split(value: Any) -> bool:
    if type(value) is int:
        return True
    if not isinstance(value, (tuple, list)) or len(value) != 2 or type(value[0]) is not int:
        return False
    sizes = value[1]
    return isinstance(sizes, (tuple, list)) and bool(sizes) and all(type(each) is int and each > 0 for each in sizes)


def _target_of(
    name: str,
    shape: tuple[int, ...],
    known: Mapping[str, Tensor],
    pieces: Sequence[Piece],
    given: tuple[str, int | tuple[int, Sequence[int]]] | None,
    rank: int,
    ranks: int,
) -> Target:
    kinds = {known[piece.name].dtype for piece in pieces}
    if len(kinds) > 1:
        raise ValueError(f"names makes {name} of tensors of {' and '.join(sorted(map(str, kinds)))}")
    (dtype,) = kinds
    if given is None:
        return Target(dtype, shape, 0, ((0, 0, shape[0]),) if shape else ())
    pattern, value = given
    dim, sizes = value if isinstance(value, (tuple, list)) else (value, None)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"split has dim {dim} for {pattern!r}, but {name} has the shape {list(shape)}")
    dim %= len(shape)
    if sizes is None:
        fused = dim == 0 and len(pieces) > 1
        sizes = [piece.rows for piece in pieces] if fused else [shape[dim]]
    if sum(sizes) != shape[dim]:
        raise ValueError(f"split has the sizes {list(sizes)} for {name}, but dim {dim} of it has {shape[dim]}")
    uneven = [size for size in sizes if size % ranks]
    if uneven:
        raise ValueError(
            f"split has dim {dim} of {name} over {ranks} ranks, but {uneven[0]} is no multiple of that: leave it out "
            "for the whole, or pass another number of ranks"
        )
    runs = tuple(_runs(sizes, rank, ranks))
    return Target(dtype, (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :]), dim, runs)


def _runs(sizes: Sequence[int], rank: int, ranks: int) -> Iterator[Run]:
    start = at = 0
    for size in sizes:
        yield start + rank * (size // ranks), at, size // ranks
        start, at = start + size, at + size // ranks


def _some(names: Mapping[str, object]) -> str:
    return f"{', '.join(list(names)[:3])}, ..."
