"""Graphs that have numbers as inputs: compare one with the graph for their values, insert those that a trace fixed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..._torch import OpOverload

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def insert_fixed_numbers(graph: fx.Graph) -> None:
    """Pass ops the value of each int that conditions of the trace leave no other value, in the place of its node.

    A size of a view becomes one where torch compares it with another size: the result then has a known shape, and what
    reads the graph takes sizes for numbers. The conditions are guards of the program, so no call runs it on others.
    """
    fixed = {node: value for node in graph.nodes if (value := _fixed_value(node)) is not None}
    for user in dict.fromkeys(user for node in fixed for user in node.users):
        if isinstance(user.target, OpOverload):
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda node: fixed.get(node, node))


def _fixed_value(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    return val.node.maybe_as_int() if isinstance(val, torch.SymInt) else None


def computes_the_same(live: fx.Graph, constant: fx.Graph) -> bool:
    """Whether two graphs apply the same ops to the same tensors, if each symbol has the value that it was traced with.

    Arithmetic on numbers is compared where an op takes its result.
    """
    position: dict[fx.Node, int] = {}
    mine, theirs = _tensor_nodes(live), _tensor_nodes(constant)
    if len(mine) != len(theirs):
        return False
    for k, (node, other) in enumerate(zip(mine, theirs, strict=True)):
        position[node] = position[other] = k
        if node.op != other.op or (node.op != "placeholder" and not _same_target(node, other)):
            return False
        if not _equal((node.args, node.kwargs), (other.args, other.kwargs), position):
            return False
    ends, other_ends = live.output_node().args[0], constant.output_node().args[0]
    return [position[node] for node in _tensors(ends)] == [position[node] for node in _tensors(other_ends)]


def _same_target(node: fx.Node, other: fx.Node) -> bool:
    if node.op != "get_attr":
        return bool(node.target == other.target)
    value, same = node.meta.get("val"), other.meta.get("val")
    return getattr(value, "shape", None) == getattr(same, "shape", None) and _constant(node, other)


def _constant(node: fx.Node, other: fx.Node) -> bool:
    """Whether two constants are one, or equal."""
    one, same = (getattr(each.graph.owning_module, str(each.target), None) for each in (node, other))
    if isinstance(one, torch.Tensor) and isinstance(same, torch.Tensor):
        return one is same or torch.equal(one, same)
    return one is same


def _tensor_nodes(graph: fx.Graph) -> list[fx.Node]:
    """All nodes but the output and those that are numbers whose value is known."""
    return [node for node in graph.nodes if node.op != "output" and not _has_value(node)]


def _tensors(values: Any) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node) and not _has_value(value)]


def _has_value(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, (int, float)) or (isinstance(val, _SYMBOLIC) and val.node.has_hint())


def _value(node: Any) -> Any:
    val = node.meta["val"] if isinstance(node, fx.Node) else node
    return val.node.hint if isinstance(val, _SYMBOLIC) else val


def _equal(one: Any, other: Any, position: dict[fx.Node, int]) -> bool:
    """Whether two arguments are structurally equal: the same tensors, and numbers that differ by rounding alone."""
    if isinstance(one, fx.Node) and not _has_value(one):
        return isinstance(other, fx.Node) and position.get(one) == position.get(other, -1)
    if isinstance(one, (tuple, list)):
        same = isinstance(other, (tuple, list)) and len(one) == len(other)
        return same and all(_equal(a, b, position) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_equal(one[key], other[key], position) for key in one)
        )
    if isinstance(other, fx.Node) and not _has_value(other):
        return False
    one, other = _value(one), _value(other)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return type(one) is type(other) and (one == other or math.isclose(one, other, rel_tol=1e-12))
    return bool(one == other)
