"""Data parallelism: the batch is split, parameters are replicated or split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from passes import Input, Mesh, Pass, Program, Role
from passes.program import Placements, replicated

from .modes import PlannedMode, state_placements
from .plan import Plan

Style = Literal["replicate", "fully_shard", "default"]
_STYLES = get_args(Style)


class DataParallel(PlannedMode):
    """Split the batch over the first axis of the mesh; ``parallel_style`` says what happens to the parameters.

    - ``"replicate"``: every rank has all of them; gradients are all-reduced (as DDP does).
    - ``"fully_shard"``: every rank has a part of each, split on dim 0, unevenly where it must be; they are gathered
      before their first use and gradients are reduce-scattered (as FSDP does). 0-dim parameters are replicated.
    - ``"default"``: split what divides evenly on dim 0, replicate the rest.

    ``input_batch_dim``: the batch's dim in every tensor argument that ``inputs`` does not name. ``inputs``: placements
    by argument name, for those that are otherwise. Raises ``ValueError`` for another style.
    """

    def __init__(
        self,
        parallel_style: Style = "replicate",
        *,
        mesh: DeviceMesh | None = None,
        input_batch_dim: int = 0,
        inputs: Mapping[str, Any] | None = None,
        custom_passes: Sequence[Pass] | None = None,
    ) -> None:
        if parallel_style not in _STYLES:
            known = ", ".join(f'"{style}"' for style in _STYLES)
            raise ValueError(f"expected parallel_style to be one of {known}, got {parallel_style!r}")
        super().__init__(mesh=mesh, inputs=inputs, input_batch_dim=input_batch_dim, custom_passes=custom_passes)
        self.parallel_style = parallel_style

    def plan(self, program: Program) -> Plan:
        """Parameters as the style says; optimizer state with its parameter; buffers replicated."""
        parameters = {
            declared.name: self._place(declared, program.mesh)
            for declared in program.inputs
            if declared.role is Role.PARAMETER
        }
        options = {"gather_parameters": True}
        return Plan(self.mesh, state_placements(program, parameters), options=options)

    def _place(self, declared: Input, mesh: Mesh) -> Placements:
        whole = replicated(mesh)
        if self.parallel_style == "replicate" or not declared.shape or not mesh.axes:
            return whole
        if self.parallel_style == "default" and declared.shape[0] % mesh.axes[0].size:
            return whole
        return (Shard(0), *[Replicate() for _ in mesh.axes[1:]])

    def __repr__(self) -> str:
        return f"DataParallel({self.parallel_style!r})"
