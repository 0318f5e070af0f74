"""Sums over micro-batches of values of several stages: each rank adds up its own, and the sums are added once a call.

The gradient of a tied weight is such a sum; as it was captured, a stage would send its part for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes import Program
from passes.ir.edit import add_input, insert_before

from .place_nodes import Placed, source_of

aten = torch.ops.aten


def add_apart(local: Program, placed: Placed) -> bool:
    """Divide the accumulators of sums of values of several ranks; returns whether there was one."""
    apart = {grown: found for grown in placed.grown if len(found := _terms_by_rank(grown, placed)) > 1}
    for grown, groups in apart.items():
        _divide(local, grown, placed.grown[grown], groups)
    return bool(apart)


def add_at_once(placed: Placed) -> None:
    """Let each sum grow as soon as its next term is there, so that a backward keeps one gradient, not all."""
    for grown in placed.grown:
        term = grown.args[1] if grown.target is aten.add.Tensor else None
        if isinstance(term, fx.Node) and term.op == "call_function":
            term.append(grown)


def _terms_by_rank(grown: fx.Node, placed: Placed) -> list[list[fx.Node]]:
    """The terms of the sum that grows, by the rank that computes them; one of no stage goes with the first."""
    groups: dict[int, list[fx.Node]] = {}
    for term in _terms(grown.args[1], grown, placed) if grown.target is aten.add.Tensor else ():
        source = source_of(term)
        rank = placed.stages[source] % placed.ranks if source in placed.stages else next(iter(groups), 0)
        groups.setdefault(rank, []).append(term)
    return list(groups.values())


def _terms(node: Any, grown: fx.Node, placed: Placed) -> list[fx.Node]:
    """The terms of a sum of the type of ``grown``, without what only ends autograd."""
    while node.target is aten.detach.default and len(node.users) == 1:
        node = node.args[0]
    is_sum = node.target is aten.add.Tensor and not node.kwargs and len(node.users) == 1
    if not is_sum or any(_type(each, placed) != _type(grown, placed) for each in node.args):
        return [node]
    return [term for each in node.args for term in _terms(each, grown, placed)]


def _type(node: Any, placed: Placed) -> Any:
    shape = placed.agreed.shape(node)
    return None if shape is None else (shape, node.meta["val"].dtype)


def _divide(local: Program, grown: fx.Node, accumulator: fx.Node, groups: Sequence[Sequence[fx.Node]]) -> None:
    """Let ``accumulator`` have the first terms, and new ones those of each other rank."""
    pairs = list(zip(local.output_values(), local.outputs, strict=True))
    declared = dict(zip(local.placeholders, local.inputs, strict=True))[accumulator]
    own = next(output for value, output in pairs if value is grown and output.name == declared.name)
    whole, behind, val = grown.args[1], grown.next, grown.meta["val"]
    grown.update_arg(1, _sum(groups[0], grown))
    totals, ends = [grown], []
    for terms in groups[1:]:
        name = f"{declared.name}.apart.{len(local.inputs)}"  # it may have been divided before
        held = add_input(local, replace(declared, name=name), accumulator.meta["val"])
        other = insert_before(behind, aten.add.Tensor, held, _sum(terms, grown), like=terms[-1], val=val)
        totals.append(insert_before(behind, aten.add.Tensor, totals[-1], other, like=grown, val=val))
        ends.append((other, replace(own, name=name)))
    total = totals[-1]
    total.meta |= {key: grown.meta[key] for key in ("grad_of", "captured", "placement") if key in grown.meta}
    for key in ("grad_of", "captured"):
        grown.meta.pop(key, None)
    grown.replace_all_uses_with(total, delete_user_cb=lambda user: user not in totals and user.op != "output")
    _erase_unread(whole)
    values = [value if value is not grown or output is own else total for value, output in pairs]
    local.set_outputs(
        [*values, *(value for value, _ in ends)], [*(each for _, each in pairs), *(each for _, each in ends)]
    )


def _sum(terms: Sequence[fx.Node], grown: fx.Node) -> fx.Node:
    """Their sum, which ``grown`` reads."""
    found = terms[0]
    for each in terms[1:]:
        found = insert_before(grown, aten.add.Tensor, found, each, like=each, val=grown.meta["val"])
    return found


def _erase_unread(node: Any) -> None:
    """Erase a sum that nothing reads any more, and those in it."""
    if not node.users:
        operands = node.all_input_nodes
        node.graph.erase_node(node)
        for each in operands:
            _erase_unread(each)
