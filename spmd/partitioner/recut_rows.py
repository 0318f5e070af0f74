"""Rows that an op cuts from the batch (``x.chunk(4)``): gathered, cut, and split over the ranks again.

Which rows meet in a part is the step's own choice, and can decide its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import Role

from ..rules import OpCall
from ..rules.cat_split import cuts_between, dim_of, is_cut, takes_all
from . import reasons
from .materialize import Materializer
from .redistribute import Reason
from .values import Value

Rows = Mapping[int, int]
"""By mesh axis, the dim of the batch's rows that it splits."""


def cut_rows(call: OpCall, operands: Sequence[Value]) -> Rows:
    """The rows of the batch that a call cuts across the ranks; empty if it does not."""
    if not is_cut(call) or takes_all(call):
        return {}
    split = {
        k: p.dim
        for k, p in enumerate(operands[0].primary)
        if isinstance(p, Shard) and not cuts_between(call, getattr(p, "outer", 1))
    }
    return {k: dim for k, dim in split.items() if k in operands[0].batch and dim == dim_of(call)}


def gather_rows(node: fx.Node, value: Value, rows: Rows, materializer: Materializer) -> Value:
    """The value that ``node`` cuts, replicated along its rows."""
    placement = tuple(Replicate() if k in rows else p for k, p in enumerate(value.primary))
    reason = Reason(Role.BATCH, f"to be cut by {reasons.op_name(node)}", reader=node)
    gathered = materializer.materialize(value, placement, reason)
    return replace(value, primary=placement, nodes={placement: gathered})


def split_rows_again(result: Any, rows: Rows, materializer: Materializer) -> None:
    """Split the rows of a result of the cut, so that each rank computes with a part of them."""
    if not isinstance(result, Value):
        return
    placement = tuple(Shard(rows[k]) if k in rows else p for k, p in enumerate(result.primary))
    result.move(placement, materializer.materialize(result, placement, Reason(Role.BATCH, "after a cut")))
    result.batch |= frozenset(rows)
