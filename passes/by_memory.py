"""Collectives among ranks of one host that read each other's memory (``through_memory.py``).

What is posted is a concatenation, even of one tensor: ``ReuseMemory`` gives it a place that others can look at, and
lets what is concatenated be computed there. Members of a bucket are read one by one, where they lie, so the ops that
packed and unpacked them for a message go.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from . import through_memory
from .chosen import Chosen, take_over
from .collectives import WAIT, Kind, is_wait, reduction_of
from .out_forms import CONSTANT_BYTES

aten = torch.ops.aten

_BY = "reading each other's memory"
REDUCTIONS = frozenset(through_memory.REDUCTIONS)


def write(chosen: Chosen) -> set[fx.Node]:
    """Put the ops into the graph; returns the nodes that shall stand right before their first reader."""
    if chosen.kind is Kind.ALL_GATHER:
        return _gathered(chosen)
    if chosen.kind is Kind.REDUCE_SCATTER:
        return _scattered(chosen)
    posted, op = _posted(chosen, [chosen.operand]), through_memory.shared_all_reduce.default
    return chosen.finish(chosen.start(_BY, op, posted, _scratch(chosen), reduction_of(chosen.node)))


def _scratch(chosen: Chosen) -> fx.Node | None:
    """Memory for a part, where it takes less to read that of each rank than all that all have."""
    val, ranks = chosen.operand.meta["val"], chosen.axis.size
    longest = -(-val.numel() // ranks)
    if ranks == 2 or longest * val.element_size() <= CONSTANT_BYTES:
        return None
    scratch = chosen.call(aten.zeros.default, [longest])
    scratch.kwargs = {"dtype": val.dtype, "device": val.device}
    return scratch


def _gathered(chosen: Chosen) -> set[fx.Node]:
    op, ranks = through_memory.shared_all_gather.default, chosen.axis.size
    posted, parts = _posted(chosen, [chosen.operand]), _taken_apart(chosen)
    if parts is None:
        return chosen.finish(chosen.start(_BY, op, posted, [chosen.operand.meta["val"].numel()], ranks))
    lengths = list(parts.args[1])  # type: ignore[arg-type]
    whole = chosen.call(WAIT, chosen.start(_BY, op, posted, lengths, ranks))  # [ranks * total]
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


def _taken_apart(chosen: Chosen) -> fx.Node | None:
    """The node that copies each member's columns out of the result's rows, as ``BucketAllGather`` leaves it."""
    node = chosen.node
    for wanted in (is_wait, _is_rows, _is_copied_apart):
        if len(node.users) != 1 or not wanted(next(iter(node.users))):
            return None
        node = next(iter(node.users))
    return node if node.args[2] == 1 and all(user.target is operator.getitem for user in node.users) else None


def _is_rows(node: fx.Node) -> bool:
    return node.target is aten.view.default and node.meta["val"].ndim == 2


def _is_copied_apart(node: fx.Node) -> bool:
    return node.target is aten.split_with_sizes_copy.default and len(node.args) == 3


def _scattered(chosen: Chosen) -> set[fx.Node]:
    packed, ranks = chosen.operand, chosen.axis.size
    members = _columns(packed, ranks) or [packed]
    lengths = [member.meta["val"].numel() // ranks for member in members]
    posted = _posted(chosen, members)
    op = through_memory.shared_reduce_scatter.default
    return chosen.finish(chosen.start(_BY, op, posted, reduction_of(chosen.node), lengths, ranks))


def _columns(packed: fx.Node, ranks: int) -> Sequence[fx.Node]:
    """What ``BucketReduceScatter`` put side by side, if it did: a row for each rank."""
    if packed.target is not aten.cat.default or packed.args[1:] != (1,) or packed.meta["val"].shape[0] != ranks:
        return []
    return [member for member in packed.args[0] if isinstance(member, fx.Node)]  # type: ignore[union-attr]


def _posted(chosen: Chosen, members: Sequence[fx.Node]) -> fx.Node:
    """The members one after the other, in a tensor that nobody writes to."""
    if len(members) == 1 and members[0].target is aten.cat.default and members[0].meta["val"].ndim == 1:
        return members[0]
    return chosen.call(aten.cat.default, [chosen.flat(member) for member in members])
