"""Collectives on the members of a bucket, each where it lies: what packed and unpacked them for one message is erased.

Ranks of one host read each other's members (``shared_memory_collectives.py``); NCCL sends them in one launch
(``coalesced_collectives.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..analysis.costs import Algorithm
from ..ir.collectives import WAIT, Kind, kind_of, operands, reduction_of
from ..runtime import coalesced_collectives, shared_memory_collectives
from .packed import UnpackedColumns, packed_columns
from .published import publish, scratch
from .realisation import Chosen, take_over

aten = torch.ops.aten

REDUCTIONS = {
    Algorithm.SHARED: frozenset(shared_memory_collectives.REDUCTIONS),
    Algorithm.COALESCED: frozenset(coalesced_collectives.REDUCTIONS),
}
_BY = {Algorithm.SHARED: "shared memory", Algorithm.COALESCED: "one launch"}
_GATHER: dict[Algorithm, Any] = {
    Algorithm.SHARED: shared_memory_collectives.shared_all_gather.default,
    Algorithm.COALESCED: coalesced_collectives.coalesced_all_gather.default,
}
_SCATTER: dict[Algorithm, Any] = {
    Algorithm.SHARED: shared_memory_collectives.shared_reduce_scatter.default,
    Algorithm.COALESCED: coalesced_collectives.coalesced_reduce_scatter.default,
}


def copied(node: fx.Node, ranks: int) -> int:
    """The number of members that are copied for ``node`` to send or to receive them as one message."""
    if kind_of(node) is Kind.ALL_GATHER:
        unpacked = UnpackedColumns.of(node, ranks)
        return len(unpacked.sizes) if unpacked is not None else 0
    return len(packed_columns(operands(node)[0], ranks))


def write(chosen: Chosen) -> set[fx.Node]:
    """Put the ops into the graph; returns the nodes that shall stand right before their first reader."""
    if chosen.kind is Kind.ALL_GATHER:
        return _gathered(chosen)
    if chosen.kind is Kind.REDUCE_SCATTER:
        return _scattered(chosen)
    operand, op = _in_a_row(chosen, [chosen.operand]), shared_memory_collectives.shared_all_reduce.default
    arguments = (operand, scratch(chosen, operand), reduction_of(chosen.node))
    return chosen.finish(chosen.start(_BY[chosen.algorithm], op, *arguments))


def _gathered(chosen: Chosen) -> set[fx.Node]:
    by, op, ranks = _BY[chosen.algorithm], _GATHER[chosen.algorithm], chosen.axis.size
    operand, unpacked = _in_a_row(chosen, [chosen.operand]), UnpackedColumns.of(chosen.node, ranks)
    if unpacked is None:
        return chosen.finish(chosen.start(by, op, operand, [chosen.operand.meta["val"].numel()], ranks))
    sizes = unpacked.sizes
    whole = chosen.call(WAIT, chosen.start(by, op, operand, sizes, ranks))  # [ranks * total]
    members = chosen.call(aten.split_with_sizes.default, whole, [ranks * size for size in sizes])
    late = {whole, members}
    for part in unpacked.members:
        member = chosen.call(operator.getitem, members, part.args[1])
        rows = chosen.call(aten.view.default, member, [ranks, -1])
        take_over(part, rows)
        late |= {member, rows}
        part.graph.erase_node(part)
    for node in (unpacked.parts, unpacked.rows):
        node.graph.erase_node(node)
    return late


def _scattered(chosen: Chosen) -> set[fx.Node]:
    packed, ranks = chosen.operand, chosen.axis.size
    members = packed_columns(packed, ranks) or [packed]
    lengths = [member.meta["val"].numel() // ranks for member in members]
    op, by, operand = _SCATTER[chosen.algorithm], _BY[chosen.algorithm], _in_a_row(chosen, members)
    return chosen.finish(chosen.start(by, op, operand, reduction_of(chosen.node), lengths, ranks))


def _in_a_row(chosen: Chosen, members: Sequence[fx.Node]) -> fx.Node:
    """The members one after the other, (total,), where other ranks can read them if they are to."""
    sent_as_it_is = len(members) == 1 and chosen.algorithm is not Algorithm.SHARED
    return chosen.flat(members[0]) if sent_as_it_is else publish(chosen, members)
