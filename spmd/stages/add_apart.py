"""Sums over micro-batches of values of several stages: each stage adds up its own, and the sums are added once a call.

The gradient of a tied weight is such a sum; as it was captured, a stage would send its part for each micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes import Program
from passes.analysis.aliases import is_view
from passes.ir.edit import insert_before

from ..micro_batches.accumulate import add_input
from .place_nodes import Placed

aten = torch.ops.aten


def add_apart(local: Program, placed: Placed) -> bool:
    """Divide the accumulators of sums of two values of other ranks; returns whether there was one."""
    apart = [each for each in placed.grown if _is_of_two_ranks(each, placed)]
    for grown in apart:
        _divide(local, grown, placed.grown[grown])
    return bool(apart)


def _is_of_two_ranks(grown: fx.Node, placed: Placed) -> bool:
    added = _added(grown)
    if added is None or added.target is not aten.add.Tensor or added.kwargs or len(added.users) > 1:
        return False
    sources = [_source(each) for each in added.all_input_nodes]
    stages = {placed.stages[each] % placed.ranks for each in sources if each in placed.stages}
    return len(stages) == 2 and all(_type(each) == _type(grown) for each in added.all_input_nodes)


def _added(grown: fx.Node) -> fx.Node | None:
    """What is added up, without what only ends autograd."""
    node: Any = grown.args[1] if grown.target is aten.add.Tensor else None
    while isinstance(node, fx.Node) and node.target is aten.detach.default and len(node.users) == 1:
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _source(node: fx.Node) -> fx.Node:
    """What a view is taken of, which may be on another stage."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _type(node: fx.Node) -> Any:
    return node.meta["val"].shape, node.meta["val"].dtype


def _divide(local: Program, grown: fx.Node, accumulator: fx.Node) -> None:
    """Let ``accumulator`` have the first of two terms, and a new one the second."""
    added: Any = _added(grown)
    last: Any = grown.args[1]
    first, second = added.args
    pairs = list(zip(local.output_values(), local.outputs, strict=True))
    declared = dict(zip(local.placeholders, local.inputs, strict=True))[accumulator]
    name = f"{declared.name}.apart.{len(local.inputs)}"  # it may have been divided before
    held = add_input(local, replace(declared, name=name), accumulator.meta["val"])
    grown.update_arg(1, first)
    other = insert_before(grown.next, aten.add.Tensor, held, second, like=second, val=grown.meta["val"])
    total = insert_before(other.next, aten.add.Tensor, grown, other, like=grown, val=grown.meta["val"])
    total.meta |= {key: grown.meta[key] for key in ("grad_of", "captured", "placement") if key in grown.meta}
    for key in ("grad_of", "captured"):
        grown.meta.pop(key, None)
    grown.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total and user.op != "output")
    while last is not first:  # what only ends autograd, and the sum
        gone, last = last, last.args[0]
        local.graph.erase_node(gone)
    own = next(output for value, output in pairs if value is grown and output.name == declared.name)
    values = [value if value is not grown or output is own else total for value, output in pairs]
    local.set_outputs([*values, other], [*(output for _, output in pairs), replace(own, name=name)])
