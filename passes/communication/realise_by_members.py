"""Collectives on the members of a bucket, each where it lies: the ops that packed and unpacked them for a message go.

Ranks of one host read each other's members (``shared_memory_collectives.py``); NCCL sends them in one launch
(``coalesced_collectives.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..analysis.agreed_sizes import most_bytes
from ..analysis.costs import Algorithm
from ..analysis.out_variants import CONSTANT_BYTES
from ..ir.collectives import WAIT, Kind, group_of, is_wait, kind_of, operands, reduction_of
from ..runtime import coalesced_collectives, shared_memory_collectives
from .realisation import Chosen, take_over

aten = torch.ops.aten

REDUCTIONS = {
    Algorithm.SHARED: frozenset(shared_memory_collectives.REDUCTIONS),
    Algorithm.COALESCED: frozenset(coalesced_collectives.REDUCTIONS),
}
_BY = {Algorithm.SHARED: "reading each other's memory", Algorithm.COALESCED: "one launch for all members"}
_GATHER: dict[Algorithm, Any] = {
    Algorithm.SHARED: shared_memory_collectives.shared_all_gather.default,
    Algorithm.COALESCED: coalesced_collectives.coalesced_all_gather.default,
}
_SCATTER: dict[Algorithm, Any] = {
    Algorithm.SHARED: shared_memory_collectives.shared_reduce_scatter.default,
    Algorithm.COALESCED: coalesced_collectives.coalesced_reduce_scatter.default,
}


def copied(node: fx.Node, ranks: int) -> int:
    """How many members are copied for ``node`` to send or receive them as one message."""
    if kind_of(node) is Kind.ALL_GATHER:
        parts = _taken_apart(node, ranks)
        return len(_lengths(parts)) if parts is not None else 0
    return len(_columns(operands(node)[0], ranks))


def write(chosen: Chosen) -> set[fx.Node]:
    """Put the ops into the graph; returns the nodes that shall stand right before their first reader."""
    if chosen.kind is Kind.ALL_GATHER:
        return _gathered(chosen)
    if chosen.kind is Kind.REDUCE_SCATTER:
        return _scattered(chosen)
    posted, op = _posted(chosen, [chosen.operand]), shared_memory_collectives.shared_all_reduce.default
    return chosen.finish(
        chosen.start(_BY[chosen.algorithm], op, posted, _scratch(chosen, posted), reduction_of(chosen.node))
    )


def _scratch(chosen: Chosen, posted: fx.Node) -> fx.Node | None:
    """Memory for a part, where it takes less to read that of each rank than all that all have."""
    val, ranks = chosen.operand.meta["val"], chosen.axis.size
    if ranks == 2 or most_bytes(chosen.node) <= ranks * CONSTANT_BYTES:
        return None
    op, longest = shared_memory_collectives.scratch.default, -(-val.numel() // ranks)
    return chosen.call(op, posted, longest, reduction_of(chosen.node), group_of(chosen.node))


def _gathered(chosen: Chosen) -> set[fx.Node]:
    by, op, ranks = _BY[chosen.algorithm], _GATHER[chosen.algorithm], chosen.axis.size
    posted, parts = _posted(chosen, [chosen.operand]), _taken_apart(chosen.node, ranks)
    if parts is None:
        return chosen.finish(chosen.start(by, op, posted, [chosen.operand.meta["val"].numel()], ranks))
    lengths = _lengths(parts)
    whole = chosen.call(WAIT, chosen.start(by, op, posted, lengths, ranks))  # [ranks * total]
    members = chosen.call(aten.split_with_sizes.default, whole, [ranks * length for length in lengths])
    late = {whole, members}
    for part in list(parts.users):
        member = chosen.call(operator.getitem, members, part.args[1])
        rows = chosen.call(aten.view.default, member, [ranks, -1])
        take_over(part, rows)
        late |= {member, rows}
        part.graph.erase_node(part)
    for node in (parts, parts.args[0]):
        node.graph.erase_node(node)  # type: ignore[union-attr, arg-type]
    return late


def _taken_apart(node: fx.Node, ranks: int) -> fx.Node | None:
    """The node that copies each member's columns out of the result's rows, as ``BucketAllGather`` leaves it."""
    for wanted in (is_wait, _is_rows, _is_copied_apart):
        if len(node.users) != 1 or not wanted(next(iter(node.users))):
            return None
        node = next(iter(node.users))
    rows: Any = node.args[0]
    by_column = node.args[2] == 1 and rows.meta["val"].shape[0] == ranks
    return node if by_column and all(user.target is operator.getitem for user in node.users) else None


def _lengths(parts: fx.Node) -> list[int]:
    return list(parts.args[1])  # type: ignore[arg-type]


def _is_rows(node: fx.Node) -> bool:
    return node.target is aten.view.default and node.meta["val"].ndim == 2


def _is_copied_apart(node: fx.Node) -> bool:
    return node.target is aten.split_with_sizes_copy.default and len(node.args) == 3


def _scattered(chosen: Chosen) -> set[fx.Node]:
    packed, ranks = chosen.operand, chosen.axis.size
    members = _columns(packed, ranks) or [packed]
    lengths = [member.meta["val"].numel() // ranks for member in members]
    posted = _posted(chosen, members)
    start = chosen.start(
        _BY[chosen.algorithm], _SCATTER[chosen.algorithm], posted, reduction_of(chosen.node), lengths, ranks
    )
    return chosen.finish(start)


def _columns(packed: fx.Node, ranks: int) -> Sequence[fx.Node]:
    """What ``BucketReduceScatter`` put side by side, if it did: a row for each rank."""
    if packed.target is not aten.cat.default or packed.args[1:] != (1,) or packed.meta["val"].shape[0] != ranks:
        return []
    return [member for member in packed.args[0] if isinstance(member, fx.Node)]  # type: ignore[union-attr]


def _posted(chosen: Chosen, members: Sequence[fx.Node]) -> fx.Node:
    """The members one after the other, in a tensor that nobody writes to.

    For others to look at it is a concatenation, even of one tensor: ``ReuseMemory`` gives that a place that others see,
    and lets what is concatenated be computed there.
    """
    if len(members) == 1 and chosen.algorithm is not Algorithm.SHARED:
        return chosen.flat(members[0])
    if len(members) == 1 and members[0].target is aten.cat.default and members[0].meta["val"].ndim == 1:
        return members[0]
    return chosen.call(aten.cat.default, [chosen.flat(member) for member in members])
