"""Operands that other ranks of the host read: how ``Realise`` writes them, and how the passes over memory find them.

An operand is published as a concatenation, even of one tensor: a value that nothing else writes to, that
``ReuseMemory`` can put where other ranks read it, and whose members can be computed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..analysis.agreed_sizes import most_bytes
from ..analysis.out_variants import CONSTANT_BYTES
from ..ir.collectives import Kind, group_of, kind_of, reduction_of, waits_of
from ..runtime import shared_memory_collectives
from .realisation import Realisation

aten = torch.ops.aten


def publish(task: Realisation, members: Sequence[fx.Node]) -> fx.Node:
    """The members one after the other: (total,)."""
    if len(members) == 1 and members[0].target is aten.cat.default and members[0].meta["val"].ndim == 1:
        return members[0]
    return task.call(aten.cat.default, [task.flat(member) for member in members])


def scratch(task: Realisation, published: fx.Node) -> fx.Node | None:
    """Memory for a part of an all_reduce, where to read a part from each rank costs less than to read everything."""
    val, ranks = task.operand.meta["val"], task.axis.size
    if ranks == 2 or most_bytes(task.node) <= ranks * CONSTANT_BYTES:
        return None
    op, longest = shared_memory_collectives.scratch.default, -(-val.numel() // ranks)
    return task.call(op, published, longest, reduction_of(task.node), group_of(task.node))


def read_by_peers(start: fx.Node) -> list[fx.Node]:
    """The tensors of a collective through shared memory that other ranks read where they lie: operand and scratch."""
    return [each for each in start.args if isinstance(each, fx.Node)]


def reduce_in_place(start: fx.Node) -> None:
    """Let each rank reduce its part of an all_reduce in the operand, which nothing else may read from then on."""
    operand, unused, *rest = start.args
    start.args = (operand, operand, *rest)
    if isinstance(unused, fx.Node):
        start.graph.erase_node(unused)


def reduces_in_place(start: fx.Node) -> bool:
    """Whether ``reduce_in_place`` was called for a collective through shared memory."""
    return kind_of(start) is Kind.ALL_REDUCE and start.args[0] is start.args[1]


def read_by_all(start: fx.Node, shared: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> int:
    """The position at which all ranks are known to have read what ``start`` publishes; ``shared``: all of its like.

    A rank publishes what it sends next in this group after it has read this; so a rank that has collected that from
    all others knows. Without such a collective, the barrier that begins the next call shows it.
    """
    end = len(position)
    read = max((position[wait] for wait in waits_of(start)), default=end)
    later = (each for each in shared if position[each] > read and group_of(each) == group_of(start))
    following = next(later, None)
    waits = waits_of(following) if following is not None else ()
    return min((position[wait] for wait in waits), default=end)
