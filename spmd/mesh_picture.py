"""``spmd.show``: which rank holds which part of a tensor, as a picture of the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from passes.ir.printer import short_dtype

from .placements import chunk

_GRID = 8  # the longest axis that is drawn


def show(tensor: torch.Tensor) -> None:
    """Print which rank holds which part of ``tensor``: a DTensor, or a plain one, which every rank holds whole.

    Parts are slices of the global tensor. A mesh of one or two axes is drawn, the first axis downwards; of a larger one
    each part is listed with the ranks that hold it. No rank communicates. Raises ``TypeError`` for what is no tensor,
    and for a DTensor whose parts are no slices.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected spmd.show to be given a tensor, got {type(tensor).__name__}")
    console = Console()
    title = f"{short_dtype(tensor.dtype)}{list(tensor.shape)}"
    if not isinstance(tensor, DTensor):
        console.print(Text(f"{title}, a plain tensor: whole on every rank"))
        return
    if any(type(placement) not in (Shard, Replicate, Partial) for placement in tensor.placements):
        raise TypeError(f"expected placements that are Shard, Replicate or Partial, got {tensor.placements}")
    mesh, drawn = tensor.device_mesh, tensor.device_mesh.ndim <= 2 and max(tensor.device_mesh.shape) <= _GRID
    console.print(Text(f"{title}, {_describe_placements(tensor)}"))
    console.print(_grid(tensor, mesh) if drawn else _list(tensor, mesh))


def _describe_placements(tensor: DTensor) -> str:
    """``split along dim 0 over dp, whole over tp``."""
    placed = zip(tensor.placements, _names(tensor.device_mesh), strict=True)
    return ", ".join(f"{_describe(placement)} over {axis}" for placement, axis in placed)


def _describe(placement: object) -> str:
    if isinstance(placement, Shard):
        return f"split along dim {placement.dim}"
    return f"pending {placement.reduce_op}" if isinstance(placement, Partial) else "whole"


def _names(mesh: DeviceMesh) -> list[str]:
    return [str(name) for name in mesh.mesh_dim_names or range(mesh.ndim)]


def _grid(tensor: DTensor, mesh: DeviceMesh) -> Table:
    """One cell a rank: the first axis downwards, the second one to the right."""
    table, names = _table(), _names(mesh)
    columns = mesh.shape[1] if mesh.ndim == 2 else 1
    table.show_header = mesh.ndim == 2
    table.add_column("")
    for column in range(columns):
        table.add_column(f"{names[-1]} {column}", no_wrap=True)
    cells = [Text(f"rank {rank}  {part}") for rank, part in _parts(tensor)]
    for row in range(mesh.shape[0]):
        table.add_row(Text(f"{names[0]} {row}"), *cells[columns * row : columns * (row + 1)])
    return table


def _list(tensor: DTensor, mesh: DeviceMesh) -> Table:
    """Each part, with the ranks that hold it."""
    table, holders = _table(), dict[str, list[int]]()
    table.add_column("part", no_wrap=True)
    table.add_column("ranks")
    for rank, part in _parts(tensor):
        holders.setdefault(part, []).append(rank)
    for part, ranks in holders.items():
        table.add_row(Text(part), Text(", ".join(map(str, ranks))))
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _parts(tensor: DTensor) -> Iterator[tuple[int, str]]:
    """Each rank of the mesh with its part, in the order of their coordinates."""
    mesh = tensor.device_mesh
    for coordinates in product(*map(range, mesh.shape)):
        yield int(mesh.mesh[coordinates]), _part(tensor, coordinates)


def _part(tensor: DTensor, coordinates: tuple[int, ...]) -> str:
    """``[0:4, :]`` of the global tensor, ``all`` of one without dims, ``nothing`` if there are more ranks than rows."""
    spans = [(0, size) for size in tensor.shape]
    for placement, axis_size, coordinate in zip(tensor.placements, tensor.device_mesh.shape, coordinates, strict=True):
        if isinstance(placement, Shard):
            start, length = spans[placement.dim]
            offset, part = chunk(length, axis_size, coordinate)
            spans[placement.dim] = start + offset, part
    if any(length == 0 < size for (_, length), size in zip(spans, tensor.shape, strict=True)):
        return "nothing"
    whole = zip(spans, tensor.shape, strict=True)
    shown = [":" if length == size else f"{start}:{start + length}" for (start, length), size in whole]
    return f"[{', '.join(shown)}]" if shown else "all"
