"""The estimated time of one step, for reports: the simulation of a final program by a table of costs."""

from __future__ import annotations

from collections.abc import Mapping

from ..analysis.costs import BUILT_IN, Table
from ..ir.program import Program
from .node_costs import NodeCosts, device_of
from .rates import rates_of
from .simulation import Timeline, simulate
from .streams import runs_on_streams


def estimate(
    program: Program,
    table: Table = BUILT_IN,
    *,
    backend: str | None = None,
    measured: Mapping[str, float] | None = None,
    with_memory: bool = True,
) -> Timeline | None:
    """The step of one rank as it is expected to run; None on a device of which nothing is known.

    ``backend`` overrides that of the mesh; ``measured``: seconds of ops by the name of their node, where known.
    ``with_memory``: with the bytes in use.
    """
    rates = rates_of(table, device_of(program), program.mesh)
    if rates is None:
        return None
    overlap = runs_on_streams(program)
    costs = NodeCosts(program, rates, table, backend=backend, measured=measured, copies_overlap=overlap)
    return simulate(program, costs, with_memory=with_memory)
