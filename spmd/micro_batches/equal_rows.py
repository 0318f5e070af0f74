"""Compute what is equal in all rows for the rows of one part, instead of for all rows, to cut a part out of.

The first state of an LSTM is filled with zeros, and types of tokens are repeated, so that nothing says how to split
them: a rank would compute the first step of all its rows in each run, and take those of the part by its position.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes import Program
from passes.ir.edit import insert_before
from passes.ir.ops import Trait, has
from passes.ir.schemas import argument

from .row_sources import FILLS, TUPLES, along, equal_dims, index_dim, numbers_rows, sources

aten = torch.ops.aten


def compute_equal_rows_in_part(program: Program) -> None:
    """Replace slices of values that are equal along their dim; nodes that nothing reads any more are erased."""
    slices = program.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    equal = equal_dims(program.graph) if slices else {}
    found = [node for node in slices if along(node) in equal[node.all_input_nodes[0]] and node.meta["val"].numel()]
    for node in found:
        part = _Part(node).of(node.all_input_nodes[0], along(node), node.meta["val"].shape[along(node)])
        part.meta |= {key: node.meta[key] for key in ("placement", "captured", "grad_of") if key in node.meta}
        node.replace_all_uses_with(part)
    for node in reversed(program.graph.nodes if found else ()):
        if not node.users and has(node.target, Trait.PURE):
            program.graph.erase_node(node)


@dataclass
class _Part:
    """Writes what equal rows are computed from, for as many as are read."""

    before: fx.Node
    written: dict[tuple[fx.Node, int, int], fx.Node] = field(default_factory=dict)

    def of(self, value: fx.Node, dim: int, length: int) -> fx.Node:
        """The first positions along ``dim`` of a value that is equal along it, computed for these alone."""
        key = value, dim, length
        if key not in self.written:
            self.written[key] = self._written(value, dim, length)
        return self.written[key]

    def _written(self, value: fx.Node, dim: int, length: int) -> fx.Node:
        if has(value.target, *FILLS):
            return self._fill(value, dim, length)
        if value.target is aten.index.Tensor:
            return self._index(value, dim, length)
        of = sources(value, dim)
        assert of is not None, "its rows are equal"
        parts = {each: self.of(each, at, length) for each, at in of}
        cut = value.all_input_nodes[0] if value.target is operator.getitem else value
        if cut.target in (aten.slice.Tensor, *TUPLES):
            return self._cut(value, cut, parts[cut.all_input_nodes[0]], dim)
        args, kwargs = fx.map_arg((value.args, value.kwargs), lambda each: parts.get(each, each))
        if has(value.target, Trait.EXPANDS, Trait.RESHAPES):
            args = (args[0], _with(list(value.meta["val"].shape), dim, length))
        if value.target is aten.repeat.default and not of:
            args = (args[0], _with(list(argument(value, "repeats")), dim, length))
        return self._emit(value, value.target, *args, **kwargs)

    def _fill(self, value: fx.Node, dim: int, length: int) -> fx.Node:
        val = value.meta["val"].narrow(dim, 0, length).clone(memory_format=torch.contiguous_format)
        number = argument(value, "fill_value") if has(value.target, Trait.FULL) else int(has(value.target, Trait.ONES))
        options = {"dtype": val.dtype, "device": val.device}
        return insert_before(
            self.before, aten.full.default, list(val.shape), number, like=value, kwargs=options, val=val
        )

    def _cut(self, value: fx.Node, cut: fx.Node, part: fx.Node, dim: int) -> fx.Node:
        """A part of a cut: along its dim, all rows are equal, whichever they are."""
        if along(cut) == dim and cut.target is not aten.unbind.int:
            return part
        made = self._emit(cut, cut.target, part, *cut.args[1:], **cut.kwargs)
        return made if cut is value else self._emit(value, operator.getitem, made, value.args[1])

    def _index(self, value: fx.Node, dim: int, length: int) -> fx.Node:
        """A part of an indexed value: where an index numbers the equal rows, one of these is read as often."""
        source, indices, of = (
            value.all_input_nodes[0],
            list(argument(value, "indices")),
            dict(sources(value, dim) or ()),
        )
        sizes, at = source.meta["val"].shape, index_dim(value, dim)
        for d, index in enumerate(indices):
            if index is None or index.meta["val"].ndim < -at or index.meta["val"].shape[at] == 1:
                continue
            if numbers_rows(index, sizes[d]):
                source = self.of(source, d, 1)
                indices[d] = self._zeros(index, at, length)
            else:
                indices[d] = self.of(index, of[index], length)
        return self._emit(value, value.target, source, indices)

    def _zeros(self, index: fx.Node, at: int, length: int) -> fx.Node:
        val = index.meta["val"]
        shape = _with(list(val.shape), at, length)
        options = {"dtype": val.dtype, "device": val.device}
        return insert_before(
            self.before, aten.full.default, shape, 0, like=index, kwargs=options, val=val.new_zeros(shape)
        )

    def _emit(self, like: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        vals = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        return insert_before(self.before, op, *args, like=like, kwargs=kwargs, val=op(*vals[0], **vals[1]))


def _with(shape: list[int], dim: int, length: int) -> list[int]:
    shape[dim] = length
    return shape
