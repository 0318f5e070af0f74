"""Weights of experts: what is computed from parameters whose dim 0 is the expert, of each expert by itself.

Such as a cast, a transposed matrix, or a weight with an adapter added (``up + a @ b``). Rules say so: with the experts
of its operands split over ranks, an op gives those of its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import Phase

from ..._torch import OpOverload
from ...rules import rule_of
from ..values import call_of, leaves


def weights_of(order: Iterable[fx.Node], experts: Mapping[fx.Node, str]) -> dict[fx.Node, frozenset[str]]:
    """By node that holds weights of experts: the parameters they come from; ``experts``: their names, by node."""
    found = {node: frozenset([name]) for node, name in experts.items()}
    for node in order:
        if isinstance(node.target, OpOverload) and node.meta.get("phase") in (Phase.FORWARD, Phase.BACKWARD):
            tensors = [leaf for leaf in leaves(node) if isinstance(leaf.meta.get("val"), torch.Tensor)]
            if any(each in found for each in tensors) and _is_by_expert(node, tensors, found):
                found[node] = frozenset[str]().union(*(found[each] for each in tensors if each in found))
    return found


def _is_by_expert(node: fx.Node, tensors: list[fx.Node], found: Mapping[fx.Node, frozenset[str]]) -> bool:
    """Whether a node gives weights of as many experts: its operands are weights, and numbers for all of them."""
    val, counts = node.meta.get("val"), {len(each.meta["val"]) for each in tensors if each in found}
    if not isinstance(val, torch.Tensor) or {*val.shape[:1]} != counts:
        return False
    if any(each.meta["val"].ndim for each in tensors if each not in found):
        return False
    rule, wanted = rule_of(node.target), tuple(Shard(0) if each in found else Replicate() for each in tensors)
    options = rule(call_of(node)) if rule is not None else []
    return any(o.operands == wanted and o.results == (Shard(0),) and o.local is None for o in options)
