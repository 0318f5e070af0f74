"""Wait for each collective as late as its readers allow, so that compute can hide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..analysis.reachability import reached
from ..analysis.topological import positions, settle
from ..base import Pass
from ..ir.collectives import Kind, is_wait, waits_of
from ..ir.ops import Trait, has
from ..ir.program import Program
from ..runtime.host_memory import to_host
from .start_early import StartEarly


@dataclass(frozen=True)
class WaitLate(Pass):
    """Each wait, with the nodes that only complete or unpack its result, moves to right before its first reader.

    All other nodes keep their order. The new order depends on the graph alone, so it is the same on all ranks. What is
    reduced with ``Collective.ahead`` is waited for when ``ahead`` others started, so that its operand can go; and if
    it is copied to host memory, that is done right then.
    """

    after: ClassVar[tuple[type[Pass], ...]] = (StartEarly,)

    def rewrite(self, program: Program) -> int:
        """Sink the waits and what unpacks them to their first readers; returns how many waits moved."""
        sinking = _sinking(program.graph)
        before = positions(program.graph, sinking)
        settle(program.graph, sinking)
        _bound(program, sinking)
        after = positions(program.graph, sinking)
        return sum(before[node] != after[node] for node in sinking if is_wait(node))


def _bound(program: Program, sinking: set[fx.Node]) -> None:
    """Wait for each bounded reduction right after the start of the one that is ``ahead`` further down."""
    starts = [node for node in program.collectives() if node.meta["collective"].kind is not Kind.ALL_GATHER]
    starts = [node for node in starts if node.meta["collective"].ahead is not None]
    for k, start in enumerate(starts):
        later = starts[k + start.meta["collective"].ahead :][:1]
        for wait in waits_of(start):
            if later and later[0] < wait:
                later[0].append(wait)
                for part in wait.all_input_nodes:
                    if part is not start:  # of a coalesced result
                        wait.prepend(part)
                _copy_at_once(_complete_at_once(wait), sinking)


def _complete_at_once(wait: fx.Node) -> fx.Node:
    """Compute the result right after ``wait``, if that takes more than to receive; returns the last node of both."""
    for node in wait.users:
        if "completes" in node.meta:
            wait.append(node)
            for own in node.all_input_nodes:
                if own > node:  # this rank's part of the operand, which is a view
                    wait.prepend(own)
            return node
    return wait


def _copy_at_once(result: fx.Node, sinking: set[fx.Node]) -> None:
    """Copy to host memory, right after ``result``, what unpacks it; the nodes in between move along."""
    unpacking = reached([result], lambda node: () if node.target is to_host else sinking.intersection(node.users))
    del unpacking[result]
    copied = set[fx.Node]()
    for node in sorted(unpacking, reverse=True):
        if node.target is to_host or any(user in copied for user in node.users):
            copied.add(node)
    last = result
    for node in sorted(copied):
        last.append(node)
        last = node


def _sinking(graph: fx.Graph) -> set[fx.Node]:
    sinking: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        unpacks = has(node.target, Trait.UNPACKS) and inputs and all(needed in sinking for needed in inputs)
        if is_wait(node) or "completes" in node.meta or unpacks:
            sinking.add(node)
    return sinking
