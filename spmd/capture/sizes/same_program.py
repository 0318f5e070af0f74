"""Compare a program that was made for given sizes with one that was captured for them."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import fx

from passes import Input, Output, Program

from ...python_state.effects.repeated import Effect, StateMemory
from ...python_state.effects.writes import Write
from ..captured import Captured, FromOutput
from .specialize import is_whole_slice

_KINDS: dict[type, type] = {torch.SymFloat: float, torch.SymInt: int, torch.SymBool: bool}
_KINDS |= {kind: kind for kind in (float, int, bool)}
_PLAIN = (FromOutput, StateMemory, bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def captured_the_same(one: Captured, other: Captured) -> bool:
    """Whether two captured programs compute the same from the same inputs, up to rounding of constant numbers."""
    return (
        [_described(each) for each in one.program.inputs] == [_described(each) for each in other.program.inputs]
        and [_described(each) for each in one.program.outputs] == [_described(each) for each in other.program.outputs]
        and one.cleared_gradients == other.cleared_gradients
        and one.cleared_first == other.cleared_first
        and one.answers == other.answers
        and _same_leaves(one.result_leaves, other.result_leaves)
        and [each.name for each in one.writes] == [each.name for each in other.writes]
        and all(map(_same_leaves, map(_leaves_of, one.writes), map(_leaves_of, other.writes)))
        and _same_constants(one.constants, other.constants)
        and _Comparison().same(one.program, other.program)
    )


def _described(declared: Input | Output) -> tuple[Any, ...]:
    kind = declared.kind if isinstance(declared, Output) else None
    return kind, declared.role, declared.name, tuple(declared.shape), declared.dtype, declared.of


def _same_leaves(one: list[Any], other: list[Any]) -> bool:
    """Whether results, or what is written to Python state, are the same outputs and equal plain values."""
    return len(one) == len(other) and all(a is b or _are_equal(a, b) for a, b in zip(one, other, strict=True))


def _leaves_of(write: Write | Effect) -> list[Any]:
    return write.leaves


def _are_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)


def _same_constants(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a is b or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)


class _Comparison:
    """Compares two graphs node by node. Arithmetic on numbers is compared where an op takes its result."""

    def __init__(self) -> None:
        self._position: dict[fx.Node, int] = {}
        self._equal: set[tuple[fx.Node, fx.Node]] = set()  # numbers that were compared

    def same(self, one: Program, other: Program) -> bool:
        mine, theirs = _ops(one.graph), _ops(other.graph)
        if len(mine) != len(theirs):
            return False
        for k, (node, same) in enumerate(zip(mine, theirs, strict=True)):
            if not self._same_node(node, same):
                return False
            self._position[node] = self._position[same] = k
        return self._same_values(one.output_values(), other.output_values())

    def _same_node(self, node: fx.Node, other: fx.Node) -> bool:
        if node.op == "placeholder" or other.op == "placeholder":
            return node.op == other.op  # their inputs are compared
        return (
            node.target == other.target
            and all(node.meta.get(key) == other.meta.get(key) for key in ("phase", "grad_of", "draw"))
            and ("recompute_of" in node.meta) == ("recompute_of" in other.meta)
            and _described_val(node) == _described_val(other)
            and self._same_values((node.args, node.kwargs), (other.args, other.kwargs))
        )

    def _same_values(self, one: Any, other: Any) -> bool:
        if isinstance(one, fx.Node):
            return isinstance(other, fx.Node) and self._same_operand(one, other)
        if isinstance(one, (tuple, list)):
            same = isinstance(other, (tuple, list)) and len(one) == len(other)
            return same and all(map(self._same_values, one, other))
        if isinstance(one, dict):
            same = isinstance(other, dict) and one.keys() == other.keys()
            return same and all(self._same_values(value, other[key]) for key, value in one.items())
        if isinstance(one, float) and isinstance(other, float):
            return one == other or math.isclose(one, other, rel_tol=1e-14) or (one != one and other != other)
        return type(one) is type(other) and bool(one == other)

    def _same_operand(self, one: fx.Node, other: fx.Node) -> bool:
        one, other = _sliced(one), _sliced(other)
        if one in self._position or other in self._position:
            return self._position.get(one) == self._position.get(other)
        if (one, other) not in self._equal and not self._same_node(one, other):
            return False
        self._equal.add((one, other))
        return True


def _ops(graph: fx.Graph) -> list[fx.Node]:
    """All nodes but the output, arithmetic on numbers, and slices of all there is."""
    return [node for node in graph.nodes if node.op == "placeholder" or not _is_left_out(node)]


def _is_left_out(node: fx.Node) -> bool:
    return node.op == "output" or _is_number(node) or _is_whole(node)


def _sliced(node: fx.Node) -> fx.Node:
    return _sliced(cast(fx.Node, node.args[0])) if _is_whole(node) else node


def _is_whole(node: fx.Node) -> bool:
    """Whether a node is its operand: what a slice of all there is becomes where torch knows sizes."""
    return is_whole_slice(node) or (node.target is torch.ops.aten.alias.default and "grad_of" not in node.meta)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _described_val(node: fx.Node) -> Any:
    """The shapes, strides and dtypes of a result; a dim of one element may have any stride.

    Programs of the cache have the value that a number had which each call reads, and no objects.
    """
    val = node.meta.get("val")
    tensors = val if isinstance(val, (tuple, list)) else [val]
    return [
        (tuple(each.shape), _strides(each), each.dtype, each.device)
        if isinstance(each, torch.Tensor)
        else _KINDS.get(type(each))
        for each in tensors
    ]


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
