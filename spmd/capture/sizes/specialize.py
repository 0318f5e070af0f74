"""A program that was captured with symbols for sizes, made for given sizes: what a trace of these would have captured.

Values get shapes in numbers, arithmetic on sizes is done, and what it was done for takes the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from passes import Input, Program

from ..._torch import FakeTensor, tree_map
from .size_symbols import SizeSymbols

_NUMBERS = (int, float, bool)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def specialize(program: Program, symbols: SizeSymbols, sizes: Sequence[int], inputs: Sequence[Input]) -> Program:
    """``program`` for these sizes of its ``symbols``; ``inputs`` describe its placeholders then."""
    values = dict(zip(symbols.symbols, sizes, strict=True))
    graph = _Specializer(values).graph(program.graph)
    made = program.with_graph(graph, inputs, program.outputs)
    made.outputs = list(map(_with_shape, made.outputs, made.output_values()))
    return made


def is_whole_slice(node: fx.Node) -> bool:
    """Whether a node slices nothing off, as ``x[:, 0:]`` does, or is the gradient of that.

    Where torch knows sizes it leaves both out.
    """
    is_slice = node.target is torch.ops.aten.slice.Tensor and "grad_of" not in node.meta
    if not is_slice and node.target is not torch.ops.aten.slice_backward.default:
        return False
    val, whole = node.meta["val"], cast(fx.Node, node.args[0]).meta["val"]
    return bool(val.shape == whole.shape and val.stride() == whole.stride())


def _with_shape(declared: Any, value: Any) -> Any:
    val = value.meta["val"] if isinstance(value, fx.Node) else value
    return replace(declared, shape=tuple(val.shape)) if isinstance(val, torch.Tensor) else declared


@dataclass
class _Specializer:
    """Copies a graph; ``values``: the number for each symbol."""

    values: Mapping[Any, int]
    _known: dict[Any, int] = field(default_factory=dict)  # by expression
    _fakes: dict[Any, torch.Tensor] = field(default_factory=dict)  # by shape, strides, dtype and device
    _of: dict[fx.Node, Any] = field(default_factory=dict)  # by node: its copy, or its number

    def graph(self, old: fx.Graph) -> fx.Graph:
        """The copy."""
        new = fx.Graph()
        for node in old.nodes:
            if node.op == "output":
                new.output(fx.map_arg(node.args[0], self._of.__getitem__))
                continue
            number = self._number(node) if node.op == "call_function" else None
            self._of[node] = self._copy(new, node) if number is None else number
            if number is None and is_whole_slice(self._of[node]):
                whole = self._of[node]
                self._of[node] = whole.args[0]
                new.erase_node(whole)
        new.lint()
        return new

    def _copy(self, new: fx.Graph, node: fx.Node) -> fx.Node:
        copy = new.node_copy(node, self._of.__getitem__)
        if "val" in copy.meta:
            val = copy.meta["val"]
            if copy.target is getitem and isinstance(copy.args[0], fx.Node):
                copy.meta["val"] = copy.args[0].meta["val"][copy.args[1]]  # the same object: nothing is to compare
            else:
                copy.meta["val"] = self._value(val) if isinstance(val, torch.Tensor) else tree_map(self._value, val)
        return copy

    def _number(self, node: fx.Node) -> Any:
        """The result of arithmetic on sizes alone, as Python computes it; None for all else."""
        val = node.meta.get("val")
        if not isinstance(val, (*_SYMBOLIC, *_NUMBERS)):
            return None
        if isinstance(val, torch.SymInt) and self._follows_from_sizes(val):
            return self._size(val)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._of.__getitem__)
        if any(isinstance(each, fx.Node) for each in [*args, *kwargs.values()]):
            return None
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _follows_from_sizes(self, val: torch.SymInt) -> bool:
        return bool(val.node.expr.free_symbols <= self.values.keys())

    def _value(self, val: Any) -> Any:
        """The fake value with these sizes."""
        if isinstance(val, _SYMBOLIC):
            return self._renewed(val)
        if not isinstance(val, FakeTensor):
            return val
        if all(type(each) is int for each in (*val.shape, *val.stride())):
            return val
        key = (tuple(map(self._size, val.shape)), tuple(map(self._size, val.stride())), val.dtype, val.device)
        if key not in self._fakes:
            shape, strides, dtype, device = key
            with val.fake_mode:
                self._fakes[key] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return self._fakes[key]

    def _renewed(self, val: Any) -> Any:
        """A number of which a part is known now: the rest are numbers that each call reads."""
        node = val.node
        if not node.expr.free_symbols & self.values.keys():
            return val
        shapes, expression = node.shape_env, node.expr.xreplace(self.values)
        if isinstance(val, torch.SymInt):
            return shapes.create_symintnode(expression, hint=None)
        if isinstance(val, torch.SymFloat):
            return shapes.create_symfloatnode(expression, hint=None)
        return shapes.create_symboolnode(expression)

    def _size(self, size: Any) -> int:
        if type(size) is int:
            return size
        expression = size.node.expr
        known = self._known.get(expression)
        if known is None:
            known = self._known[expression] = int(expression.xreplace(self.values))
        return known
