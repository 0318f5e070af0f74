"""Rows that an op cuts from the batch (``x.chunk(4)``): gathered, cut, and shared out over the ranks again.

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
from .materialize import Forms
from .redistribute import Reason
from .values import Value

Rows = Mapping[int, int]
"""By mesh axis, the dim of the batch's rows that it splits."""


def rows_cut(call: OpCall, operands: Sequence[Value]) -> Rows:
    """The rows of the batch that a call cuts across the ranks; empty if it does not."""
    if not is_cut(call) or takes_all(call):
        return {}
    split = {
        k: p.dim
        for k, p in enumerate(operands[0].primary)
        if isinstance(p, Shard) and not cuts_between(call, getattr(p, "outer", 1))
    }
    return {k: dim for k, dim in split.items() if k in operands[0].batch and dim == dim_of(call)}


def with_all_rows(node: fx.Node, held: Value, rows: Rows, forms: Forms) -> Value:
    """The value that ``node`` cuts, whole along its rows."""
    place = tuple(Replicate() if k in rows else p for k, p in enumerate(held.primary))
    gathered = forms.want(held, place, Reason(Role.BATCH, f"to be cut by {reasons.op_name(node)}"))
    return replace(held, primary=place, forms={place: gathered})


def share_out_again(part: Any, rows: Rows, forms: Forms) -> None:
    """Split the rows of what was cut, so that nobody computes with all of them."""
    if not isinstance(part, Value):
        return
    place = tuple(Shard(rows[k]) if k in rows else p for k, p in enumerate(part.primary))
    part.move(place, forms.want(part, place, Reason(Role.BATCH, "after a cut")))
    part.batch |= frozenset(rows)
