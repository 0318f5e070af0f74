"""Collectives on the members of a bucket where they lie: the ops that packed and unpacked them are erased.

Ranks of one host read each other's members (``shared_memory_collectives.py``); NCCL sends them in one launch
(``coalesced_collectives.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..analysis.collective_algorithms import Algorithm
from ..ir.collectives import WAIT, Kind, kind_of, operands, reduction_of
from ..runtime import coalesced_collectives, shared_memory_collectives
from .packed import UnpackedColumns, packed_columns
from .published import publish, scratch
from .realisation import Realisation, take_over

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


def write(task: Realisation) -> set[fx.Node]:
    """Put the ops into the graph; returns the nodes to sink to their first readers."""
    if task.kind is Kind.ALL_GATHER:
        return _gathered(task)
    if task.kind is Kind.REDUCE_SCATTER:
        return _scattered(task)
    operand, op = _in_a_row(task, [task.operand]), shared_memory_collectives.shared_all_reduce.default
    arguments = (operand, scratch(task, operand), reduction_of(task.node))
    return task.finish(task.start(_BY[task.algorithm], op, *arguments))


def _gathered(task: Realisation) -> set[fx.Node]:
    by, op, ranks = _BY[task.algorithm], _GATHER[task.algorithm], task.axis.size
    operand, unpacked = _in_a_row(task, [task.operand]), UnpackedColumns.of(task.node, ranks)
    if unpacked is None:
        return task.finish(task.start(by, op, operand, [task.operand.meta["val"].numel()], ranks))
    sizes = unpacked.sizes
    whole = task.call(WAIT, task.start(by, op, operand, sizes, ranks))  # [ranks * total]
    members = task.call(aten.split_with_sizes.default, whole, [ranks * size for size in sizes])
    sinking = {whole, members}
    for part in unpacked.members:
        member = task.call(operator.getitem, members, part.args[1])
        rows = task.call(aten.view.default, member, [ranks, -1])
        take_over(part, rows)
        sinking |= {member, rows}
        part.graph.erase_node(part)
    for node in (unpacked.parts, unpacked.rows):
        node.graph.erase_node(node)
    return sinking


def _scattered(task: Realisation) -> set[fx.Node]:
    packed, ranks = task.operand, task.axis.size
    members = packed_columns(packed, ranks) or [packed]
    lengths = [member.meta["val"].numel() // ranks for member in members]
    op, by, operand = _SCATTER[task.algorithm], _BY[task.algorithm], _in_a_row(task, members)
    return task.finish(task.start(by, op, operand, reduction_of(task.node), lengths, ranks))


def _in_a_row(task: Realisation, members: Sequence[fx.Node]) -> fx.Node:
    """The members one after the other, (total,), where other ranks can read them if they are to."""
    sent_as_it_is = len(members) == 1 and task.algorithm is not Algorithm.SHARED
    return task.flat(members[0]) if sent_as_it_is else publish(task, members)
