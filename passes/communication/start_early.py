"""Start each collective as early as its operand allows, so that compute can hide it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..analysis.topological import arrange, positions
from ..base import Pass
from ..ir.collectives import Kind, is_collective, is_message, is_wait, waits_of
from ..ir.effects import is_pure, is_random
from ..ir.ops import Trait, has
from ..ir.program import Program
from ..ir.roles import Role


@dataclass(frozen=True)
class StartEarly(Pass):
    """Each collective, with the nodes that only pack its operand, moves to right after the nodes that it needs.

    An operand that is computed from the call's arguments alone (the number of labels, say) moves along: it is known
    when the call begins. All other nodes keep their order, and so do messages, and collectives that become ready
    together. The new order depends on the graph alone, so it is the same on all ranks. Memory: results of collectives
    live longer; those with ``Collective.ahead`` start when the result of the one that stands ``ahead`` before them, in
    the order of readers, is read.
    """

    def rewrite(self, program: Program) -> int:
        """Sort by the position at which each moving node is ready; returns how many collectives moved."""
        moving = _moving(program)
        before = positions(program.graph, moving)
        arrange(program.graph, _by_readiness(program, moving))
        after = positions(program.graph, moving)
        return sum(before[node] != after[node] for node in program.collectives())


def _by_readiness(program: Program, moving: set[fx.Node]) -> list[fx.Node]:
    """The nodes by the position after which each can stand; of a node that does not move, its own."""
    first = last_message = len(program.placeholders) - 1
    earliest, ready = _bounds(program), dict[fx.Node, int]()
    for position, node in enumerate(program.graph.nodes):
        needed = (ready[argument] for argument in node.all_input_nodes)
        ready[node] = max((first, earliest.get(node, first), *needed)) if node in moving else position
        if is_message(node):  # another rank's program has the other ends, in this order
            last_message = ready[node] = max(last_message, ready[node])
    for node in reversed(program.graph.nodes):  # an operand is packed when it is sent
        packs = node in moving and not is_collective(node) and all(user in moving for user in node.users)
        if packs and any(user in earliest for user in node.users):
            ready[node] = earliest[node] = max(ready[node], min(ready[user] for user in node.users))
    return sorted(ready, key=lambda node: (ready[node], node in moving))  # sorted keeps the order of equals


def _bounds(program: Program) -> dict[fx.Node, int]:
    """The positions after which bounded gathers may start: right before the result of an earlier one is waited for."""
    position = {node: k for k, node in enumerate(program.graph.nodes)}
    starts = [node for node in program.collectives() if node.meta["collective"].kind is Kind.ALL_GATHER]
    bounded = [node for node in starts if node.meta["collective"].ahead is not None]
    read = {start: min((position[wait] for wait in waits_of(start)), default=0) for start in bounded}
    ordered = sorted(bounded, key=lambda start: (read[start], position[start]))
    aheads = [start.meta["collective"].ahead for start in ordered]
    return {
        start: read[ordered[k - ahead]] - 1
        for k, (start, ahead) in enumerate(zip(ordered, aheads, strict=True))
        if k >= ahead
    }


def _moving(program: Program) -> set[fx.Node]:
    """The collectives, the nodes that only pack their operands, and those that are known when the call begins."""
    moving: set[fx.Node] = set()
    given = _given(program)
    for node in reversed(program.graph.nodes):
        read = [user in moving for user in node.users]
        packs = has(node.target, Trait.PACKS) and read and all(read)
        if is_collective(node) or packs or (node in given and any(read)):
            moving.add(node)
    return moving


def _given(program: Program) -> set[fx.Node]:
    """The nodes that are computed from the call's arguments alone, without waiting for another rank."""
    inputs = zip(program.placeholders, program.inputs, strict=True)
    arguments = {node for node, declared in inputs if declared.role in (Role.BATCH, Role.ARGUMENT)}
    given: set[fx.Node] = set()
    for node in program.graph.nodes:
        needed = node.all_input_nodes
        known = needed and not is_wait(node) and all(n in given or n in arguments for n in needed)
        if known and is_pure(node) and not is_random(node):
            given.add(node)
    return given
