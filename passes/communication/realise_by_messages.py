"""Collectives as fewer or simpler messages than the backend's own ops send (``message_collectives.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..analysis.collective_algorithms import Algorithm
from ..ir.collectives import WAIT, Kind, reduction_of
from ..runtime import collective_ops, message_collectives
from .realisation import Realisation

aten = torch.ops.aten

_ROWS: dict[str | None, Any] = {"sum": aten.sum.dim_IntList, "max": aten.amax.default, "min": aten.amin.default}
_PAIRS: dict[str | None, Any] = {
    "sum": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}
REDUCTIONS = frozenset(_ROWS)


def write(task: Realisation) -> set[fx.Node]:
    """Put the ops into the graph; returns the nodes to sink to their first readers."""
    if task.kind is Kind.ALL_GATHER:
        return task.finish(_gathered(task))
    reduces = task.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) and task.algorithm is Algorithm.EXCHANGE
    assert reduces, f"how to do an {task.kind} by {task.algorithm} is not written"
    reduced = _reduced(task)
    return {*reduced, *task.finish(reduced[-1])}


def _reduced(task: Realisation) -> list[fx.Node]:
    """The nodes after the start of an exchange, which reduce this rank's part; the last one completes it."""
    flat, ranks, reduction = task.flat(task.operand), task.axis.size, reduction_of(task.node)
    val = task.operand.meta["val"]
    size = collective_ops.part(val.numel(), ranks, task.axis.coordinate)
    if ranks == 2:
        started = task.start(f"swap + {reduction}", message_collectives.swap.default, flat, size)
        begin = collective_ops.bounds(val.numel(), ranks)[task.axis.coordinate]
        own = task.call(aten.slice.Tensor, flat, 0, begin, begin + size)
        other = task.call(WAIT, started)  # [size]
        total = task.call(_PAIRS[reduction], own, other)
        total.meta["completes"] = started.name
        return [own, other, total]
    started = task.start(f"exchange + {reduction}", message_collectives.exchange.default, flat, ranks, size)
    rows = task.call(WAIT, started)  # [ranks, size]
    total = task.call(_ROWS[reduction], rows, [0])  # [size]
    total.meta["completes"] = started.name
    if reduction == "sum":
        total.kwargs = {"dtype": val.dtype}  # else integers become int64
    return [rows, total]


def _gathered(task: Realisation) -> fx.Node:
    """The node that starts to gather the parts of all ranks."""
    total, flat = task.node.meta["val"].numel(), task.flat(task.operand)
    if task.algorithm is Algorithm.GATHER_BY_BROADCAST:
        op, by = message_collectives.gather_by_broadcast.default, "broadcast per part"
    else:
        assert task.algorithm is Algorithm.GATHER_BY_SENDING, f"how to gather by {task.algorithm} is not written"
        op, by = message_collectives.gather_by_sending.default, "send per pair"
    return task.start(by, op, flat, total, task.axis.size)
