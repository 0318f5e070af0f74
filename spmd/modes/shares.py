"""Shares of parameters in data parallelism: as the annotation of a module asks, else as the mode's options do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch.distributed.tensor import Shard

from passes import AxisRole, Input, Memory, Mesh, OutputKind, PlacementError, Program, Role
from passes.ir.program import Placements

from ..annotations.resolve import Annotations, Unit

Style = Literal["replicate", "fully_shard", "default"]
StyleName = Literal["replicate", "fully_shard", "default", "ddp", "fsdp", "zero1"]

STYLES: Mapping[StyleName, tuple[Style, bool]] = {
    "replicate": ("replicate", False),
    "fully_shard": ("fully_shard", False),
    "default": ("default", False),
    "ddp": ("replicate", False),
    "fsdp": ("fully_shard", False),
    "zero1": ("replicate", True),
}
"""The names of styles, also those that other projects have: the style, and whether it splits the optimizer's state."""


@dataclass(frozen=True)
class Share:
    """The treatment of one parameter.

    ``dim``: the one to split, None for the first that no other axis splits. ``reshards``: whether it is gathered again
    for backward, or how many ranks keep it together until then; None: if it lies in a repeated block.
    ``reduce_dtype``: of its gradient's reduction. ``unit``: the annotation that it follows. ``memory``: where it lives.
    """

    style: Style
    dim: int | None = None
    reshards: bool | int | None = None
    reduce_dtype: torch.dtype | None = None
    unit: Unit | None = None
    memory: Memory = Memory.DEVICE

    @classmethod
    def of_unit(cls, unit: Unit, shard: Shard | None) -> Share:
        """The treatment of a parameter that an annotation claims."""
        dim, policy = shard.dim if shard is not None else None, unit.mp_policy
        wire = policy.wire_dtype if policy is not None else None
        memory = unit.offload_policy.memory if unit.offload_policy is not None else Memory.DEVICE
        return cls(unit.annotation.api, dim, unit.reshards, wire, unit, memory)

    def placement(self, declared: Input, given: Placements, mesh: Mesh) -> Placements:
        """``given``, with the split of the style over the axes that split parameters, if ``given`` has none there."""
        shard = mesh.axes_with(AxisRole.SHARD)
        over = [k for k in shard if not _stays_split(mesh, k, given)]
        if self.style == "fully_shard" and mesh.axes and not shard:
            raise PlacementError(
                f"{self.unit or declared.name} is to be split over the ranks, but no axis of {mesh} has the role "
                '"shard": give it to one, as axes={"batch": "dp"} does, or axes={"shard": "dp"}'
            )
        if not over or any(isinstance(given[k], Shard) for k in over):
            self._check_kept(declared, given, mesh, over)
            return given
        split = {entry.dim for entry in given if isinstance(entry, Shard)}
        free = [dim for dim in range(len(declared.shape)) if dim not in split]
        if self.style == "replicate" or not free:
            return given
        dim = free[0] if self.dim is None else self.dim
        if dim not in free:
            raise PlacementError(
                f"{self.unit} splits dim {dim} of {declared.name} over {_listed(mesh, over)}, but it is placed as "
                f"{given} already: choose another dim"
            )
        if self.style == "default" and declared.shape[dim] % prod(mesh.axes[k].size for k in over):
            return given
        return tuple(Shard(dim) if k in over else entry for k, entry in enumerate(given))

    def _check_kept(self, declared: Input, given: Placements, mesh: Mesh, over: Sequence[int]) -> None:
        """Raise ``PlacementError`` for a parameter that lives split otherwise than its annotation says."""
        if self.unit is None or not over or not declared.placement:
            return
        kept = [given[k] for k in over]
        asked = kept if self.dim is None else [Shard(self.dim)] * len(over)
        if self.style == "replicate" or asked != kept:
            wish = "replicates it" if self.style == "replicate" else f"splits it as {asked[0]}"
            raise PlacementError(
                f"{self.unit} {wish}, but an earlier step has split {declared.name} over {_listed(mesh, over)} as "
                f"{kept[0]}: annotate a model before its first step, or build it anew"
            )


def _stays_split(mesh: Mesh, axis: int, given: Placements) -> bool:
    """Whether rows go to the parts of a parameter along an axis, so that styles split it over the others alone."""
    return mesh.axes[axis].rows_move and isinstance(given[axis], Shard)


def _listed(mesh: Mesh, axes: Sequence[int]) -> str:
    return " and ".join(mesh.axes[k].name for k in axes)


def check_untrained(program: Program, annotations: Annotations) -> None:
    """Raise ``PlacementError`` for a parameter that is ignored and trained: each rank would train it by itself."""
    for output in program.outputs:
        name = output.of if output.role is Role.GRADIENT else output.name
        changes = output.kind is OutputKind.UPDATE or output.role is Role.GRADIENT
        if changes and name in annotations.ignored and output.role in (Role.PARAMETER, Role.GRADIENT):
            raise PlacementError(
                f"{name} is among the ignored parameters, but the step trains it: each rank would do so with the "
                "gradient of its own part of the batch. Freeze it with requires_grad_(False), or do not ignore it"
            )


def check_gather_dtype(program: Program, dtype: torch.dtype | None) -> None:
    """Raise ``PlacementError`` for a dtype to gather in that is narrower than that of no parameter."""
    dtypes = {i.dtype for i in program.inputs if i.role is Role.PARAMETER}
    found = {each for each in dtypes if each is not None and each.is_floating_point}
    if dtype is not None and found and all(each.itemsize <= dtype.itemsize for each in found):
        raise PlacementError(
            f"expected gather_dtype to be narrower than the parameters, got {dtype} for {', '.join(map(str, found))}: "
            "gathered in it they would have the same values, so leave it out"
        )
