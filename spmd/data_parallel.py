"""Data parallelism: the batch is split, parameters are replicated or split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from passes import Input, Mesh, Pass, Program, Role
from passes.program import Placements, replicated

from .modes import PlannedMode, check_placements, placed_by_name, state_placements
from .plan import Plan

Style = Literal["replicate", "fully_shard", "default"]
Reduce = Literal["once", "each"]
_STYLES, _REDUCE = get_args(Style), get_args(Reduce)


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

    ``input_batch_dim``: the batch's dim in every tensor argument that ``inputs`` does not name. ``inputs``: placements
    by argument name, for those that are otherwise. Raises ``ValueError`` for a style, or a way to reduce, that there is
    not.
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
    ) -> None:
        _check_one_of("parallel_style", parallel_style, _STYLES)
        _check_one_of("reduce_gradients", reduce_gradients, _REDUCE)
        super().__init__(mesh=mesh, inputs=inputs, input_batch_dim=input_batch_dim, custom_passes=custom_passes)
        check_placements("params", "name patterns", params)
        self.params = dict(params or {})
        self.parallel_style, self.reduce_gradients = parallel_style, reduce_gradients

    def plan(self, program: Program) -> Plan:
        """Parameters as the style says; optimizer state with its parameter; buffers replicated."""
        named = placed_by_name(program, self.params)
        parameters = {
            declared.name: self._place(declared, named.get(declared.name) or replicated(program.mesh), program.mesh)
            for declared in program.inputs
            if declared.role is Role.PARAMETER
        }
        options = {"gather_parameters": True, "reduce_gradients": self.reduce_gradients}
        return Plan(self.mesh, state_placements(program, parameters), options=options)

    def _place(self, declared: Input, given: Placements, mesh: Mesh) -> Placements:
        """``given``, and over the first axis, if it says nothing of that, what the style says."""
        split = {entry.dim for entry in given if isinstance(entry, Shard)}
        free = [dim for dim in range(len(declared.shape)) if dim not in split]
        if self.parallel_style == "replicate" or not free or not mesh.axes or isinstance(given[0], Shard):
            return given
        if self.parallel_style == "default" and declared.shape[free[0]] % mesh.axes[0].size:
            return given
        return (Shard(free[0]), *given[1:])

    def __repr__(self) -> str:
        return f"DataParallel({self.parallel_style!r})"


def _check_one_of(name: str, given: Any, known: Sequence[str]) -> None:
    if given not in known:
        listed = ", ".join(f'"{each}"' for each in known)
        raise ValueError(f"expected {name} to be one of {listed}, got {given!r}")
