"""Put global values together from the parts of all ranks, by their placement; and compare values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from passes import Mesh
from passes.ir.program import Placements

from ..placements import Interleaved, chunk

_ROUNDING = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 5e-2  # of bfloat16, float16 and narrower dtypes


@dataclass(frozen=True)
class Difference:
    """Where two values differ first: the ``index`` of an element, both values, and the sentence about them."""

    expected: Any
    actual: Any
    says: str


class UnequalReplicasError(Exception):
    """Ranks that should hold equal values do not."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.says)
        self.difference = difference


def rounding_of(dtypes: Sequence[torch.dtype]) -> float:
    """The relative error to allow for sums in another order, where values pass through these dtypes."""
    return max([_ROUNDING[torch.float64], *(_ROUNDING.get(each, _COARSE) for each in dtypes if _rounds(each))])


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def part_of(whole: Tensor, placement: Placements, mesh: Mesh) -> Tensor:
    """A rank's part of a whole tensor; all of it along axes that do not split it."""
    for entry, axis in zip(placement, mesh.axes, strict=False):
        if isinstance(entry, Shard):
            outer = entry.outer if isinstance(entry, Interleaved) else 1
            runs = whole.unflatten(entry.dim, (outer, -1)) if outer > 1 else whole.unsqueeze(entry.dim)
            start, length = chunk(runs.shape[entry.dim + 1], axis.size, axis.coordinate)
            whole = runs.narrow(entry.dim + 1, start, length).flatten(entry.dim, entry.dim + 1)
    return whole


def put_together(
    parts: Sequence[Any], shape: Sequence[int], placement: Placements, meshes: Sequence[Mesh], rounding: float
) -> Any:
    """The global value of which each rank, with its mesh, has a part; plain values as they are on the first rank.

    Raises ``UnequalReplicasError`` where ranks hold the same part with other values.
    """
    if not all(isinstance(part, Tensor) for part in parts):
        return _equal_on_all(parts)
    owners: dict[tuple[int, ...], int] = {}
    for rank, mesh in enumerate(meshes):
        owner = owners.setdefault(_owner(placement, mesh), rank)
        _check_replica(parts, owner, rank, rounding)
    if len(owners) == 1:
        return parts[0]
    summed = any(isinstance(entry, Partial) for entry in placement)
    positions = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    whole = torch.zeros(positions.numel(), dtype=parts[0].dtype)
    for rank in owners.values():
        mine = part_of(positions, placement, meshes[rank]).reshape(-1)
        if mine.numel() != parts[rank].numel():
            says = f"rank {rank} has {tuple(parts[rank].shape)}, which is no part of {tuple(shape)} under {placement}"
            raise UnequalReplicasError(Difference(tuple(shape), tuple(parts[rank].shape), says))
        values = parts[rank].detach().reshape(-1)
        whole[mine] = whole[mine] + values if summed else values
    return whole.view(tuple(shape))


def _owner(placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The key of ranks that hold the same part: their coordinates along axes that divide it."""
    axes = zip(placement, mesh.axes, strict=False)
    return tuple(axis.coordinate for entry, axis in axes if isinstance(entry, (Shard, Partial)))


def _check_replica(parts: Sequence[Tensor], owner: int, rank: int, rounding: float) -> None:
    found = difference(parts[owner], parts[rank], rounding) if rank != owner else None
    if found is not None:
        says = f"ranks {owner} and {rank} should hold the same value, but {found.says}"
        raise UnequalReplicasError(Difference(found.expected, found.actual, says))


def _equal_on_all(parts: Sequence[Any]) -> Any:
    for rank, part in enumerate(parts):
        found = difference(parts[0], part, 0.0)
        if found is not None:
            raise UnequalReplicasError(
                Difference(parts[0], part, f"rank 0 has {parts[0]!r}, but rank {rank} has {part!r}")
            )
    return parts[0]


def difference(expected: Any, actual: Any, rounding: float) -> Difference | None:
    """The element that differs most, None if all agree to within ``rounding``; 0.0 asks for equal bits."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return _difference_of_numbers(expected, actual, rounding)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        one, other = (f"{value.dtype} {tuple(value.shape)}" for value in (expected, actual))
        return Difference(one, other, f"expected {one}, got {other}")
    if expected.numel() == 0:
        return None
    exact = not _rounds(expected.dtype)
    precise = torch.complex128 if expected.is_complex() else (expected.dtype if exact else torch.float64)
    want, have = expected.detach().cpu().to(precise), actual.detach().cpu().to(precise)
    if exact:
        error, allowed = (want != have).double(), torch.zeros(())
    else:
        size = want.abs().nan_to_num(posinf=0.0)
        scale = max(1.0, float(size.max()))
        error, allowed = (want - have).abs(), rounding * (size + 0.1 * scale)
        same = (want == have) | (want.isnan() & have.isnan())
        error = torch.where(same, 0.0, error.nan_to_num(nan=float("inf")))
    wrong = error > allowed
    if not wrong.any():
        return None
    at = int(torch.where(wrong, error, -1.0).argmax())
    index = [int(each) for each in torch.unravel_index(torch.tensor(at), expected.shape)] if expected.ndim else []
    pair = want.reshape(-1)[at].item(), have.reshape(-1)[at].item()
    where = f"at {index} " if index else ""
    count = f", and {int(wrong.sum()) - 1} of {expected.numel()} more differ" if int(wrong.sum()) > 1 else ""
    return Difference(*pair, f"{where}expected {pair[0]!r}, got {pair[1]!r}{count}")


def _difference_of_numbers(expected: Any, actual: Any, rounding: float) -> Difference | None:
    if isinstance(expected, float) and isinstance(actual, float):
        one, other = (torch.tensor(value, dtype=torch.float64) for value in (expected, actual))
        return difference(one, other, rounding)
    if type(expected) is type(actual) and (isinstance(expected, Tensor) or bool(expected == actual)):
        return None
    return Difference(expected, actual, f"expected {expected!r}, got {actual!r}")
