"""An order of the reductions left in flight: those that stand in line start in the order in which forward reads them.

Backward completes the gradients of the first layers last, and forward reads their parameters first. Where reductions
stand in line when backward ends, one behind the other, those of the first layers start first then, so that forward can
begin while the others are in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.agreed_sizes import has_unequal_parts
from ..ir.collectives import is_collective
from ..ir.program import OutputKind, Program
from .node_costs import NodeCosts
from .simulation import simulate


def starts_to_hold(steady: Program, costs: NodeCosts) -> list[str]:
    """The names of the starts that had better stand last, in this order; none where the order is as good as it is.

    ``steady`` is the end of one step and the start of the next. Those are tried that stand in line when a call ends,
    then one more, and so on, as long as the simulated call gets shorter. Where ranks hold unequal parts, each would
    estimate something else, and none is held.
    """
    if has_unequal_parts(steady):
        return []
    timeline = simulate(steady, costs, with_memory=False)
    read = _first_reads(steady)
    waiting = [each.node for each in timeline.transfers if each.node in read and each.start >= timeline.seconds]
    issued = [each.node for each in timeline.transfers if each.node in read]
    held, best = list[str](), timeline.seconds
    for count in range(len(waiting), len(issued) + 1) if waiting else ():
        trial, names = steady.copy(), sorted(issued[len(issued) - count :], key=read.__getitem__)
        start_last(trial, names)
        again = NodeCosts(trial, costs.rates, costs.table, backend=costs.backend)
        seconds = simulate(trial, again, with_memory=False).seconds
        if seconds >= best and count > max(2, len(waiting)):
            break
        if seconds < best:
            held, best = names, seconds
    return held


def _first_reads(steady: Program) -> dict[str, int]:
    """For each start that is left in flight, the position at which the next call reads its result."""
    position = {node: k for k, node in enumerate(steady.graph.nodes)}
    inputs = zip(steady.inputs, steady.placeholders, strict=True)
    read = {declared.name: min((position[user] for user in node.users), default=0) for declared, node in inputs}
    outputs = zip(steady.outputs, steady.output_values(), strict=True)
    return {value.name: read[o.name] for o, value in outputs if o.kind is OutputKind.CHANNEL and is_collective(value)}


def start_last(program: Program, names: Sequence[str]) -> None:
    """Let the collectives of these names start last, in this order."""
    by_name = {node.name: node for node in program.graph.nodes}
    for name in names:
        program.output_node.prepend(by_name[name])
