"""Data parallelism: the batch is split, parameters are replicated or split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from passes import Input, Mesh, Pass, Program, Role
from passes.ir.program import Placements, replicated

from ..partitioner.plan import Plan
from .base import PlannedMode, check_placements, placed_by_name, state_placements

Style = Literal["replicate", "fully_shard", "default"]
Reduce = Literal["once", "each"]
_STYLES, _REDUCE = get_args(Style), get_args(Reduce)
_WIRE = (torch.bfloat16, torch.float16, torch.float32)


class DataParallel(PlannedMode):
    """Split the batch over the first axis of the mesh; ``parallel_style`` says what happens to the parameters.

    - ``"replicate"``: every rank has all of them; gradients are all-reduced (as DDP does).
    - ``"fully_shard"``: every rank has a part of each, split on dim 0, unevenly where it must be; they are gathered
      before their first use and gradients are reduce-scattered (as FSDP does). 0-dim parameters are replicated.
    - ``"default"``: split what divides evenly on dim 0, replicate the rest.

    ``reduce_gradients`` decides, for parameters that are split, what becomes of the gradients of micro-batches:
    ``"once"`` adds them up whole and reduces the sum, one reduce_scatter per parameter and step; ``"each"`` reduces
    every one and adds up shards, which takes less memory and more traffic. What is replicated is reduced once always.

    ``params``: placements by fnmatch pattern over parameter names (``{"*.up.weight": {"tp": Shard(0)}}``), for a mesh
    with more axes than the batch's: tensor parallel, composed with a style. What is split over another axis stays so
    while forward and backward run; the style splits the first dim that no other axis does.

    ``shard_optimizer``, with ``"replicate"``: each rank updates its part of every parameter, with its part of the
    optimizer's state, and parameters are gathered afterwards (ZeRO, stage 1: Rajbhandari et al. 2020). The numbers are
    the same, for as much traffic and a part of the memory; the state becomes DTensors, split as ``"fully_shard"``
    splits. A gradient that the step leaves in ``.grad`` is reduced whole, since all ranks keep it.

    ``reduce_dtype``, ``gather_dtype``: gradients are reduced, and parameters gathered, in this dtype where theirs is
    wider. Off (None) by default, since that rounds: each rank's share of a gradient and the sums of shares; of gathered
    parameters all that is read in forward and backward, while updates are computed with the parts as they are. With
    ``shard_optimizer`` a rank's own part stays exact in ``state_dict``, too, and those of others are rounded there.

    ``input_batch_dim``: the batch's dim in every tensor argument that ``inputs`` does not name. ``inputs``: placements
    by argument name, for those that are otherwise. Raises ``ValueError`` for a style, a way to reduce or a dtype that
    there is not, and for options that do not go together.
    """

    def __init__(
        self,
        parallel_style: Style = "replicate",
        *,
        mesh: DeviceMesh | None = None,
        input_batch_dim: int = 0,
        inputs: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        custom_passes: Sequence[Pass] | None = None,
        reduce_gradients: Reduce = "once",
        shard_optimizer: bool = False,
        reduce_dtype: torch.dtype | None = None,
        gather_dtype: torch.dtype | None = None,
    ) -> None:
        _check_one_of("parallel_style", parallel_style, _STYLES)
        _check_one_of("reduce_gradients", reduce_gradients, _REDUCE)
        super().__init__(mesh=mesh, inputs=inputs, input_batch_dim=input_batch_dim, custom_passes=custom_passes)
        check_placements("params", "name patterns", params)
        self.params = dict(params or {})
        self.parallel_style, self.reduce_gradients = parallel_style, reduce_gradients
        self.shard_optimizer = _check_sharding(shard_optimizer, parallel_style)
        self.reduce_dtype = _check_dtype("reduce_dtype", reduce_dtype)
        self.gather_dtype = _check_dtype("gather_dtype", gather_dtype)
        if gather_dtype is not None and parallel_style == "replicate" and not shard_optimizer:
            raise ValueError(
                f'expected no gather_dtype, got {gather_dtype}: "replicate" gathers no parameters, unless it has '
                "shard_optimizer=True"
            )

    def plan(self, program: Program) -> Plan:
        """Parameters as the style says; optimizer state where they are updated; buffers replicated."""
        named, mesh = placed_by_name(program, self.params), program.mesh
        declared = [i for i in program.inputs if i.role is Role.PARAMETER]
        given = {i.name: i.placement or named.get(i.name) or replicated(mesh) for i in declared}
        parameters = {i.name: _split(i, given[i.name], mesh, self.parallel_style) for i in declared}
        updates = {i.name: _split(i, given[i.name], mesh, "fully_shard") for i in declared if self.shard_optimizer}
        updates = {name: place for name, place in updates.items() if place != parameters[name]}
        options = {
            "gather_parameters": True,
            "reduce_gradients": self.reduce_gradients,
            "reduce_dtype": self.reduce_dtype,
            "gather_dtype": self.gather_dtype,
        }
        return Plan(self.mesh, state_placements(program, parameters, updates), options=options, updates=updates)

    def __repr__(self) -> str:
        options = {name: getattr(self, name) for name in ("shard_optimizer", "reduce_dtype", "gather_dtype")}
        said = "".join(f", {name}={value}" for name, value in options.items() if value)
        return f"DataParallel({self.parallel_style!r}{said})"


def _split(declared: Input, given: Placements, mesh: Mesh, style: Style) -> Placements:
    """``given``, and over the first axis, if it says nothing of that, what the style says."""
    split = {entry.dim for entry in given if isinstance(entry, Shard)}
    free = [dim for dim in range(len(declared.shape)) if dim not in split]
    if style == "replicate" or not free or not mesh.axes or isinstance(given[0], Shard):
        return given
    if style == "default" and declared.shape[free[0]] % mesh.axes[0].size:
        return given
    return (Shard(free[0]), *given[1:])


def _check_one_of(name: str, given: Any, known: Sequence[str]) -> None:
    if given not in known:
        listed = ", ".join(f'"{each}"' for each in known)
        raise ValueError(f"expected {name} to be one of {listed}, got {given!r}")


def _check_sharding(given: Any, style: Style) -> bool:
    if not isinstance(given, bool):
        raise TypeError(f"expected shard_optimizer to be a bool, got {given!r}")
    if given and style != "replicate":
        raise ValueError(
            f'expected shard_optimizer=True with parallel_style="replicate", got "{style}": that splits the '
            "optimizer's state with its parameters already"
        )
    return given


def _check_dtype(name: str, given: Any) -> torch.dtype | None:
    if given is not None and given not in _WIRE:
        listed = ", ".join(map(str, _WIRE))
        raise ValueError(f"expected {name} to be one of {listed} or None, got {given!r}")
    return given  # type: ignore[no-any-return]
