"""``spmd.constrain``: constrain the placement of an activation.

It returns the tensor that it is given. While a step is captured, the call becomes a node of its own, ``CONSTRAIN``,
with the dims as they are given, in the order or by the names of mesh axes, and so does its backward: so the graph is
that of any mesh. The partitioner redistributes there and leaves no node behind. A gradient has the placement of its
tensor, but where that is replicated, a pending sum stays pending: it is reduced where it is needed, perhaps after it
has become smaller.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Mesh, PlacementError
from passes.ir.ops import PURE_FUNCTIONS
from passes.ir.program import Placements

from ..interpreter.source_lines import user_line
from ..placements import AnyPlacement, check_dims, normalize

_library = torch.library.Library("spmd", "DEF")
_library.define("constrain(Tensor x, int[] dims, str[]? axes=None, *, bool gradient=False) -> Tensor")
_REPLICATED = -1  # in ``dims``: the axis splits nothing
_meshes: list[Mesh] = []  # one for each capture that runs


@torch.library.impl(_library, "constrain", "CompositeExplicitAutograd")
def _copy(
    x: torch.Tensor, dims: Sequence[int], axes: Sequence[str] | None = None, gradient: bool = False
) -> torch.Tensor:
    return x.clone()


def _save_dims(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: torch.Tensor) -> None:
    _, ctx.dims, ctx.axes = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return CONSTRAIN(gradient, ctx.dims, ctx.axes, gradient=True), None, None


torch.library.register_autograd("spmd::constrain", _backward, setup_context=_save_dims, lib=_library)
CONSTRAIN = torch.ops.spmd.constrain.default
PURE_FUNCTIONS.add(CONSTRAIN)


def constrain(tensor: torch.Tensor, placement: AnyPlacement) -> torch.Tensor:
    """Give ``tensor`` a placement from here on, inside of a compiled step; returns it.

    ``placement``: ``Shard`` or ``Replicate`` for a 1-D mesh, a list with one per mesh axis, or a dict by axis name
    (axes left out are replicated). The tensor is redistributed once, and so is its gradient in backward::

        hidden = spmd.constrain(self.up(x), {"dp": Shard(0), "tp": Shard(2)})

    No value changes. Raises ``TypeError`` for arguments that are no tensor or no placement, and ``PlacementError``, at
    the user's line, while a step compiles whose mesh has no such axis or whose tensor has no such dim.
    """
    _check_types(tensor, placement)
    if not _meshes:
        return tensor
    try:
        normalize(placement, _meshes[-1], "the tensor")
        axes, entries = _as_given(placement)
        entries = check_dims(entries, tensor.ndim, "the tensor")
        if any(isinstance(p, Partial) for p in entries):
            raise PlacementError("the tensor cannot be Partial by choice, pass Replicate() or Shard(dim)")
    except PlacementError as error:
        raise PlacementError(f"spmd.constrain: {error}, at {user_line(sys._getframe(1))}") from None
    dims = [p.dim if isinstance(p, Shard) else _REPLICATED for p in entries]
    constrained: torch.Tensor = CONSTRAIN(tensor, dims, axes)
    return constrained


def _as_given(placement: AnyPlacement) -> tuple[list[str] | None, Placements]:
    """The names of axes, None where placements stand in the order of the mesh, and their placements."""
    if isinstance(placement, Mapping):
        return sorted(placement), tuple(placement[axis] for axis in sorted(placement))
    return None, (placement,) if isinstance(placement, Placement) else tuple(placement)


@contextmanager
def constraints_on(mesh: Mesh) -> Iterator[None]:
    """Capture calls of ``constrain`` for the length of the context; those that do not fit ``mesh`` are refused."""
    _meshes.append(mesh)
    try:
        yield
    finally:
        _meshes.pop()


def constrained_to(node: fx.Node, operand: Placements, mesh: Mesh) -> Placements:
    """The placement of the result of a ``CONSTRAIN`` node on ``mesh``, from the placement of its operand."""
    dims, axes = cast(Any, (*node.args[1:], None)[:2])  # a default is left out
    if axes is not None:
        by_axis = dict(zip(axes, dims, strict=True))
        dims = [by_axis.get(axis.name, _REPLICATED) for axis in mesh.axes]
    placements: list[Placement] = [Replicate() if dim == _REPLICATED else Shard(dim) for dim in dims]
    if node.kwargs.get("gradient"):
        placements = [
            before if isinstance(before, Partial) and isinstance(p, Replicate) else p
            for before, p in zip(operand, placements, strict=True)
        ]
    return tuple(placements)


def _check_types(tensor: Any, placement: Any) -> None:
    entries = placement.values() if isinstance(placement, Mapping) else placement
    listed = list(entries) if isinstance(placement, (list, tuple, Mapping)) else [placement]
    if not isinstance(tensor, torch.Tensor) or not all(isinstance(entry, Placement) for entry in listed):
        raise TypeError(
            "spmd.constrain: expected a tensor and its placement (Shard, Replicate, a list of them or a dict by mesh "
            f"axis), got {type(tensor).__name__} and {placement!r}"
        )
