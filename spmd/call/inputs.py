"""Place the tensor arguments of a call on the mesh, which gives their global shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from passes import AxisRole, Mesh, PlacementError, Role
from passes.ir.program import Placements, is_sharded, replicated

from ..placements import check_dims, global_shape, normalize
from .state import Arguments

_LISTED = 8  # tensors that an error lists


def is_index(tensor: torch.Tensor) -> bool:
    """Whether it has indices, such as labels or token ids."""
    return tensor.dtype in (torch.int64, torch.int32)


def is_apart(tensor: torch.Tensor) -> bool:
    """Whether it has neither a graph that made it nor a gradient, as its fake in a trace."""
    return tensor.is_leaf and tensor.grad is None


@dataclass(frozen=True, eq=False)
class BatchInput:
    """One tensor argument with its placement; ``shape`` is the global one.

    ``is_named``: ``inputs`` says where it lives. ``is_uneven``: ranks have unequal parts.
    """

    name: str
    value: torch.Tensor
    placement: Placements
    shape: tuple[int, ...]
    is_named: bool
    is_uneven: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.value.dtype

    @property
    def role(self) -> Role:
        """A batch if it is split, else any other argument."""
        return Role.BATCH if is_sharded(self.placement) else Role.ARGUMENT


def place_inputs(
    arguments: Arguments,
    named: Mapping[str, Any] | None,
    batch_dim: int,
    mesh: Mesh,
    uneven: Mapping[str, int] | None = None,
) -> list[BatchInput]:
    """Give every tensor argument its placement: as named, else split along ``batch_dim`` over the axes of the batch.

    The name of an argument that holds others (a dict, a list) is the placement of all that no longer name says more of.
    0-dim tensors are replicated. ``uneven``: how many rows all ranks have, of the arguments of which they have unequal
    parts. Raises ``PlacementError`` if the tensors that ``named`` leaves out differ in size
    along ``batch_dim``, if a name fits no argument, or for a DTensor.
    """
    tensors = arguments.tensors()
    named = _by_tensor(dict(named or {}), [leaf.name for leaf in tensors])
    for leaf in tensors:
        if isinstance(leaf.value, DTensor):
            raise PlacementError(
                f"{leaf.name} is a DTensor, but a step takes plain tensors: pass this rank's part, "
                f"{leaf.name}.to_local(), and say how it is placed, as inputs={{'{leaf.name}': Shard(0)}} does"
            )
    silent = [leaf for leaf in tensors if leaf.name not in named and leaf.value.ndim > 0]
    placed, rows_over = [], mesh.axes_with(AxisRole.BATCH)
    _check_sizes([(leaf.name, leaf.value) for leaf in silent], batch_dim, bool(rows_over) or not mesh.axes)
    for leaf in tensors:
        if leaf.name in named:
            placement = normalize(named[leaf.name], mesh, leaf.name)
        elif leaf.value.ndim == 0 or not mesh.axes:
            placement = replicated(mesh)
        else:
            placement = tuple(Shard(batch_dim) if k in rows_over else Replicate() for k in range(len(mesh.axes)))
        placement = check_dims(placement, leaf.value.ndim, leaf.name)
        shape = global_shape(leaf.value.shape, placement, mesh)
        rows = (uneven or {}).get(leaf.name)
        if rows is not None:
            dim = next(entry.dim for entry in placement if isinstance(entry, Shard))
            shape = (*shape[:dim], rows, *shape[dim + 1 :])
        placed.append(BatchInput(leaf.name, leaf.value, placement, shape, leaf.name in named, rows is not None))
    return placed


def _by_tensor(named: Mapping[str, Any], tensors: list[str]) -> dict[str, Any]:
    """The entry of ``named`` for each tensor that has one: the longest name of the tensor or of what holds it."""
    fitting = {tensor: [name for name in named if f"{tensor}.".startswith(f"{name}.")] for tensor in tensors}
    unknown = sorted(set(named).difference(*fitting.values()))
    if unknown:
        raise PlacementError(f"inputs names {unknown}, but the tensor arguments of the step are {tensors}")
    return {tensor: named[max(names, key=len)] for tensor, names in fitting.items() if names}


def _check_sizes(tensors: list[tuple[str, torch.Tensor]], dim: int, are_split: bool) -> None:
    short = [name for name, tensor in tensors if not -tensor.ndim <= dim < tensor.ndim]
    sizes = {name: tensor.shape[dim] for name, tensor in tensors if name not in short}
    if short or len(set(sizes.values())) > 1:
        listed = [f"{name} has {size}" for name, size in sizes.items()]
        listed += [f"{name} has no such dim" for name in short]
        if len(listed) > _LISTED:
            listed[_LISTED:] = [f"and {len(listed) - _LISTED} more"]
        shared = _shared(sizes)
        rows = next((name for name, _ in tensors if name.split(".")[0] != shared), tensors[0][0])
        split = f"'{rows}': Shard({dim}), " if are_split else ""
        raise PlacementError(
            f"the tensor arguments must agree in size along the batch dim {dim}, but {', '.join(listed)}. "
            f"Say what they are with inputs={{{split}'{shared}': Replicate()}}{_packed(sizes)}"
        )


def _packed(sizes: Mapping[str, int]) -> str:
    """Advice on an argument that seems to hold several entries for each row of the others, as patches do."""
    rows = min(sizes.values(), default=0)
    name = next((name for name, size in sizes.items() if rows and size > rows and size % rows == 0), "")
    if not name:
        return ""
    each = sizes[name] // rows
    return (
        f"; or, if {name} packs {each} entries for each of {rows} rows, as patches of pictures, pass a row of them "
        f"for each, as .view({rows}, {each}, ...), and let the step call .flatten(0, 1)"
    )


def _shared(sizes: Mapping[str, int]) -> str:
    """An argument that holds tensors of several sizes: these can be no rows of one batch."""
    found: dict[str, set[int]] = {}
    for name, size in sizes.items():
        found.setdefault(name.split(".")[0], set()).add(size)
    return next((name for name, several in found.items() if len(several) > 1), "a_table_all_ranks_share")
