"""Placements by the user: every parameter and input where they say, the rest follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from passes import Pass, Program, Role
from passes.ir.program import replicated

from ..partitioner.plan import Plan
from .base import PlannedMode, check_placements, placed_by_name, state_placements


class DTensorExpand(PlannedMode):
    """Expand the graph with the placements given.

    ``inputs``: placements by argument name; tensors not named are split on dim 0 over the first axis of the mesh.
    ``params``: placements by fnmatch pattern over parameter names (``"*.up.weight"``); the first pattern that fits
    counts, parameters that none fits are replicated. Raises ``PlacementError`` for a pattern that fits no parameter.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        inputs: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        custom_passes: Sequence[Pass] | None = None,
    ) -> None:
        super().__init__(mesh=mesh, inputs=inputs, custom_passes=custom_passes)
        check_placements("params", "name patterns", params)
        self.params = dict(params or {})

    def plan(self, program: Program) -> Plan:
        """Parameters as the patterns say; optimizer state with its parameter; buffers replicated."""
        parameters = {i.name: replicated(program.mesh) for i in program.inputs if i.role is Role.PARAMETER}
        parameters |= placed_by_name(program, self.params)
        return Plan(self.mesh, state_placements(program, parameters))

    def __repr__(self) -> str:
        return f"DTensorExpand(params={self.params!r})"
