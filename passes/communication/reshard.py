"""Gather parameters again for each pass over the model, so that they are whole only while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from torch import fx

from ..analysis.topological import settle
from ..base import Pass
from ..cleanup.merge_equal import MergeEqual
from ..ir.collectives import Kind, is_wait, operands
from ..ir.meta import Relation, carried
from ..ir.ops import Trait, has
from ..ir.program import Program
from ..ir.roles import Phase, Role
from .form_units import FormUnits

_ONE = 1  # more unit whose gradients are on their way while those of the next are computed


@dataclass(frozen=True)
class Reshard(Pass):
    """Parameters in ``program.reshard`` are gathered for forward, and once more for backward (as in FSDP).

    Each run of readers in one phase gets a gather of its own, with what packs its operand and unpacks its result; so
    micro-batches gather for each forward and each backward. What was gathered is dead after its last reader in a run.
    A repeated gather is marked (``meta["recompute_of"]``), and no pass merges it back. How far ahead of its readers a
    gather may start is ``program.prefetch``, and a gradient is on its way alone (``Collective.ahead``), so at most so
    many units are whole at once. Parameters that are not in ``program.reshard`` stay whole after their first use.
    """

    after: ClassVar[tuple[type[Pass], ...]] = (MergeEqual, FormUnits)

    def rewrite(self, program: Program) -> int:
        """Give each run of readers its gather; returns how many gathers there are more."""
        if not program.reshard:
            return 0
        position = {node: k for k, node in enumerate(program.graph.nodes)}
        added = 0
        for gather in [node for node in program.collectives() if _is_of(node, Role.PARAMETER, Kind.ALL_GATHER)]:
            if program.reshard.issuperset(gather.meta["collective"].of):
                runs = list(_runs(_readers(gather), position))
                for first, *others in runs[1:]:
                    _gather_again(gather, first, [first, *others])
                added += len(runs) - 1
        settle(program.graph)
        for node in program.collectives():
            _bound(node, program)
        return added


def _is_of(node: fx.Node, role: Role, kind: Kind) -> bool:
    described = node.meta["collective"]
    return described.role is role and described.kind is kind


def _bound(node: fx.Node, program: Program) -> None:
    """Write how many units ahead a gather may start, or how many units a gradient may be on its way for."""
    described = node.meta["collective"]
    if not program.reshard.issuperset(described.of) or not described.of:
        return
    if _is_of(node, Role.GRADIENT, Kind.REDUCE_SCATTER):
        node.meta["collective"] = replace(described, ahead=_ONE)
    elif _is_of(node, Role.PARAMETER, Kind.ALL_GATHER):
        phases = {reader.meta.get("phase") for reader in _readers(node)}
        ahead = program.prefetch[0 if Phase.FORWARD in phases else 1]
        node.meta["collective"] = replace(described, ahead=ahead)


def _unpacking(gather: fx.Node) -> list[fx.Node]:
    """The nodes that only bring the result of ``gather`` into shape, in order: its wait, views, casts, joined parts."""
    found = dict.fromkeys([gather])
    for node in found_in_order(gather):
        shapes = is_wait(node) or has(node.target, Trait.VIEW, Trait.UNPACKS, Trait.JOINS)
        if shapes and all(argument in found for argument in node.all_input_nodes):
            found[node] = None
    return list(found)[1:]


def found_in_order(first: fx.Node) -> Iterator[fx.Node]:
    """The nodes after ``first`` that are computed from it, in the order of the graph."""
    reached, node = {first}, first.next
    while node.op != "output":
        if any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
            yield node
        node = node.next
