"""Parts of tensors: each goes to the segment of one of the ranks that hold it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from passes import SpmdError

from ..placements import OnStage, local_shape, local_start
from ..ranks.world import describe

_ALIGNED = 64  # bytes
Box = tuple[tuple[int, ...], tuple[int, ...]]  # first index and size, by dim


@dataclass(frozen=True)
class Tensor:
    """A published tensor: what it is as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A box of the tensor ``name`` in the segment of ``rank``, from the byte ``offset`` on."""

    name: str
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    offset: int

    def of(self, segment: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The part, as a tensor over the bytes of a segment."""
        length = math.prod(self.sizes) * dtype.itemsize
        return segment[self.offset : self.offset + length].view(dtype).view(self.sizes)


@dataclass(frozen=True)
class Layout:
    """All tensors and their parts. ``ties``: from further names of a tensor to the one that it has here.

    ``sizes``: the bytes of a segment, by rank.
    """

    tensors: dict[str, Tensor]
    ties: dict[str, str]
    parts: list[Part]
    sizes: list[int]

    @classmethod
    def of(cls, tensors: dict[str, Tensor], ties: dict[str, str], boxes: Sequence[Mapping[str, Box]]) -> Layout:
        """Give each box to the rank of those that have it which writes least so far; the same on all ranks.

        ``boxes``: what each rank has, by name. Raises ``ValueError`` for a tensor of which parts are missing.
        """
        sizes, parts = [0] * len(boxes), list[Part]()
        for name, tensor in tensors.items():
            holders: dict[Box, list[int]] = {}
            for rank, held in enumerate(boxes):
                if name in held:
                    holders.setdefault(held[name], []).append(rank)
            if sum(math.prod(length) for _, length in holders) != math.prod(tensor.shape):
                raise ValueError(f"{name}: the parts that all ranks hold are not the whole, which they are to publish")
            for (start, length), ranks in holders.items():
                rank = min(ranks, key=sizes.__getitem__)
                parts.append(Part(name, start, length, rank, sizes[rank]))
                sizes[rank] += -(-math.prod(length) * tensor.dtype.itemsize // _ALIGNED) * _ALIGNED
        return cls(tensors, ties, parts, sizes)

    def to_bytes(self) -> bytes:
        """The layout as a file."""
        tensors = {name: [str(each.dtype).removeprefix("torch."), each.shape] for name, each in self.tensors.items()}
        parts = [[each.name, each.start, each.sizes, each.rank, each.offset] for each in self.parts]
        return json.dumps({"tensors": tensors, "ties": self.ties, "parts": parts, "sizes": self.sizes}).encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: Any) -> Layout:
        """The layout in a file. Raises ``SpmdError`` for another one."""
        try:
            read = json.loads(content)
            tensors = {name: Tensor(_dtype(kind), tuple(shape)) for name, (kind, shape) in read["tensors"].items()}
            parts = [Part(n, tuple(start), tuple(sizes), rank, at) for n, start, sizes, rank, at in read["parts"]]
            for part in parts:
                length = math.prod(part.sizes) * tensors[part.name].dtype.itemsize
                ends = zip(part.start, part.sizes, tensors[part.name].shape, strict=True)
                inside = all(0 <= start <= start + size <= whole for start, size, whole in ends)
                if (
                    not inside
                    or part.rank < 0
                    or not 0 <= part.offset <= part.offset + length <= read["sizes"][part.rank]
                ):
                    raise ValueError(part)
            return cls(tensors, dict(read["ties"]), parts, list(read["sizes"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SpmdError(
                f"expected a layout that spmd.publish wrote, but {where} is another file: {error}"
            ) from error


def box_of(tensor: torch.Tensor) -> Box | None:
    """The box of a tensor that this rank has; None if it has nothing. Raises ``ValueError`` for other placements."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    strange = [each for each in tensor.placements if type(each) not in (Replicate, Shard, OnStage)]
    if strange:
        raise ValueError(f"is split as {strange[0]}, of which no part can be published: give it Shard or Replicate")
    if tensor.device_mesh.get_coordinate() is None:
        return None
    mesh, placements = describe(tensor.device_mesh), tuple(tensor.placements)
    sizes = local_shape(tensor.shape, placements, mesh)
    return (local_start(tensor.shape, placements, mesh), sizes) if math.prod(sizes) else None


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found
