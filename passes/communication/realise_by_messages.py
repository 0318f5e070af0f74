"""Collectives as fewer or simpler messages than the backend's own ops send (``message_collectives.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..analysis.costs import Algorithm
from ..ir.collectives import WAIT, Kind, reduction_of
from ..runtime import collective_ops, message_collectives
from .realisation import Chosen

aten = torch.ops.aten

_ROWS: dict[str | None, Any] = {"sum": aten.sum.dim_IntList, "max": aten.amax.default, "min": aten.amin.default}
_PAIRS: dict[str | None, Any] = {
    "sum": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}
REDUCTIONS = frozenset(_ROWS)


def write(chosen: Chosen) -> set[fx.Node]:
    """Put the ops into the graph; returns the nodes that shall stand right before their first reader."""
    if chosen.kind is Kind.ALL_GATHER:
        return chosen.finish(_gathered(chosen))
    reduced = _reduced(chosen)
    return {*reduced, *chosen.finish(reduced[-1])}


def _reduced(chosen: Chosen) -> list[fx.Node]:
    """Exchange, and what reduces this rank's part; without the node that starts it."""
    flat, ranks, reduction = chosen.flat(chosen.operand), chosen.axis.size, reduction_of(chosen.node)
    val = chosen.operand.meta["val"]
    size = collective_ops.part(val.numel(), ranks, chosen.axis.coordinate)
    if ranks == 2:
        started = chosen.start(f"swap + {reduction}", message_collectives.swap.default, flat, size)
        begin = collective_ops.bounds(val.numel(), ranks)[chosen.axis.coordinate]
        own = chosen.call(aten.slice.Tensor, flat, 0, begin, begin + size)
        other = chosen.call(WAIT, started)  # [size]
        return [own, other, chosen.call(_PAIRS[reduction], own, other)]
    by = f"exchange + {reduction}"
    rows = chosen.call(WAIT, chosen.start(by, message_collectives.exchange.default, flat, ranks, size))  # [ranks, size]
    total = chosen.call(_ROWS[reduction], rows, [0])  # [size]
    if reduction == "sum":
        total.kwargs = {"dtype": val.dtype}  # else integers become int64
    return [rows, total]


def _gathered(chosen: Chosen) -> fx.Node:
    """The start of a gather of every rank's part."""
    total, flat = chosen.node.meta["val"].numel(), chosen.flat(chosen.operand)
    if chosen.algorithm is Algorithm.BROADCAST:
        op, by = message_collectives.gather_by_broadcast.default, "broadcast per part"
    else:
        op, by = message_collectives.gather_by_sending.default, "send per pair"
    return chosen.start(by, op, flat, total, chosen.axis.size)
