"""Placements given by the user for parameters and inputs; the partitioner derives the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from passes import Pass, Program, Role
from passes.ir.program import replicated

from ..interpreter.keywords import checks_keywords
from ..partitioner.plan import Plan
from .base import PlannedMode
from .named_placements import check_placements, parameter_placements, state_placements


class DTensorExpand(PlannedMode):
    """Partition the program by given placements.

    ``inputs``: placements by argument name; tensors not named are split on dim 0 over the first axis of the mesh.
    ``params``: placements by fnmatch pattern over parameter names (``"*.up.weight"``); the first match
    counts, and parameters without a match are replicated. Raises ``PlacementError`` for a pattern without a match.
    """

    @checks_keywords("spmd.DTensorExpand")
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
        """Parameters by the patterns; optimizer state as its parameter; buffers replicated."""
        parameters = {i.name: replicated(program.mesh) for i in program.inputs if i.role is Role.PARAMETER}
        parameters |= parameter_placements(program, self.params)
        return Plan(self.mesh, state_placements(program, parameters))

    def __repr__(self) -> str:
        return f"DTensorExpand(params={self.params!r})"
