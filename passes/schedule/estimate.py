"""The estimated time of one step, for reports: the simulation of a final program by a table of costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..analysis.collective_algorithms import BUILT_IN, Table
from ..ir.program import Program
from .node_costs import NodeCosts, device_of
from .rates import rates_of
from .simulation import Timeline, in_turn, simulate
from .streams import runs_on_streams


def estimate_runs(program: Program, table: Table = BUILT_IN, **options: Any) -> list[tuple[Program, Timeline | None]]:
    """The programs that a call runs, in order, each with the time that it takes; ``options`` as for ``estimate``."""
    runs = program.in_order()
    times = {id(each): _of_one(each, table, **options) for each in {id(each): each for each in runs}.values()}
    return [(each, times[id(each)]) for each in runs]


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
    ``with_memory``: with the bytes in use. Of a call that runs several, it is all of them, one after the other.
    """
    found = estimate_runs(program, table, backend=backend, measured=measured, with_memory=with_memory)
    timelines = [timeline for _, timeline in found if timeline is not None]
    return timelines[0] if len(found) == len(timelines) == 1 else in_turn(timelines)


def _of_one(
    program: Program,
    table: Table,
    backend: str | None = None,
    measured: Mapping[str, float] | None = None,
    **options: Any,
) -> Timeline | None:
    rates = rates_of(table, device_of(program), program.mesh)
    if rates is None:
        return None
    overlap = runs_on_streams(program)
    costs = NodeCosts(program, rates, table, backend=backend, measured=measured, copies_overlap=overlap)
    return simulate(program, costs, **options)
