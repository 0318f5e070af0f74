"""Emit one rank's graph: each node with its fake value, its provenance and, for a collective, its purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes import Mesh, PartitionError, Program, Role
from passes.analysis.strides import Layouts
from passes.ir.meta import Relation, carried
from passes.ir.ops import Trait, draws, has
from passes.ir.program import Input, Placements, is_even, is_sharded
from passes.ir.schemas import name_of
from passes.runtime.random import draw

from ..memo import Shapes
from ..placements import local_runs, local_shape
from ..rules.base import parameters
from .experts.own_rows import OwnRowsOf
from .operand_layouts import Layout, lies, lies_like, operand_layouts
from .redistribute import Reason, Redistribution
from .values import Value, results

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_CONTIGUOUS = (aten.contiguous.default, aten.reshape.default)


class Emitter:
    """One rank's graph, node by node."""

    def __init__(self, program: Program) -> None:
        self.graph = fx.Graph()
        self.mesh: Mesh = program.mesh
        self.seed: fx.Node | None = None
        self.own = OwnRowsOf(self.mesh, self.call)
        self._unnumbered = 0
        self._shapes = Shapes(_fake_mode(program))
        self._layouts = Layouts()
        self._unsure: set[fx.Node] = set()  # their strides may differ from those of their fakes

    def placeholder(self, node: fx.Node, placement: Placements | None, prefix: str = "") -> fx.Node:
        """Emit the input that ``node`` is, with this rank's part of it; without a placement it is a number."""
        new, val = self.graph.placeholder(f"{prefix}{node.name}"), node.meta["val"]
        new.meta = {**carried(node, Relation.SHARE), "val": val}
        if placement is not None:
            new.meta |= {"val": _local(val, placement, self.mesh), "placement": placement}
            self.mark(new, (val.shape, placement))
        return new

    def mark(self, node: fx.Node, *values: tuple[Sequence[int], Placements]) -> None:
        """Mark whether ranks have unequal parts of the values, given by global shape and placement, in ``node``."""
        node.meta["uneven"] = self.uneven(*values)
        self._layouts.see(node)

    def mark_unequal(self, node: fx.Node, what: str) -> None:
        """Mark that ranks hold unequal numbers of elements in ``node``."""
        node.meta["uneven"] = what
        self._layouts.see(node)

    def uneven(self, *values: tuple[Sequence[int], Placements]) -> str:
        """Describe the values that ranks have unequal parts of; an empty text if there are none."""
        found = [(tuple(shape), placement) for shape, placement in values if not is_even(shape, placement, self.mesh)]
        return str(found) if found else ""

    def call(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        """Emit a call, with the provenance of ``like``; its value comes from running it on fake tensors."""
        return self._call(target, args, kwargs, like, self._shapes.of(target, args, kwargs))

    def _call(self, target: Any, args: Any, kwargs: Any, like: fx.Node, val: Any) -> fx.Node:
        new = self.graph.create_node("call_function", target, tuple(args), kwargs, name=_name(target, like))
        return self._with_provenance(new, like, val)

    def number(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> fx.Node:
        """Emit a call that gives no tensor, with the value that was traced."""
        target: Any = node.target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
        new = self.graph.create_node("call_function", target, tuple(args), kwargs, name=node.name)
        return self._with_provenance(new, node, node.meta.get("val"))

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Emit the access to one of several results."""
        return self.call(getitem, (node, index), {}, like=node)

    def op(self, node: fx.Node, args: Any, kwargs: Any, placements: Sequence[Placements | None]) -> fx.Node:
        """Emit the op of ``node`` on this rank's parts; its results have ``placements``."""
        target: Any = node.target
        is_whole = not any(p is not None and is_sharded(p) for p in placements)
        if is_whole:
            self._shapes.learn_later(node)
        args, kwargs = self.laid_out(node, args, kwargs)
        if draws(target, args, kwargs):
            return self._draw(node, target, args, kwargs, placements)
        if _joins_elements(node):
            args = (self._copy(args[0], node), *args[1:])
        if target in _VIEWS and (args[0] in self._unsure or not self._layouts.is_viewable(*args[:2])):
            target = aten.reshape.default  # the whole could be viewed so; some rank's part has other strides
        if is_whole and target is node.target and _are_traced((args, kwargs), (node.args, node.kwargs)):
            return self._call(target, args, kwargs, node, node.meta["val"])
        return self.call(target, args, kwargs, like=node)

    def laid_out(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The operands, those copied that the op reads in a layout that they may not have on some rank."""
        target: Any = node.target
        needed = operand_layouts(target)
        if not needed:
            return args, kwargs
        names = list(parameters(target))[: len(args)]
        operands: list[tuple[str, Any, Any]] = list(zip(names, args, node.args, strict=True))
        operands += [(name, operand, node.kwargs[name]) for name, operand in kwargs.items()]
        as_traced = all(
            self._is_known(x) and lies_like(x.meta["val"], traced.meta["val"])
            for name, x, traced in operands
            if needed.get(name) is Layout.TOGETHER and isinstance(x, fx.Node)
        )
        laid = [self._lying(x, traced, needed.get(name), node, as_traced) for name, x, traced in operands]
        return tuple(laid[: len(args)]), dict(zip(kwargs, laid[len(args) :], strict=True))

    def _is_known(self, operand: fx.Node) -> bool:
        """Whether an operand lies on every rank as its value says."""
        return operand not in self._unsure and self._layouts.is_known(operand)

    def _lying(self, operand: Any, traced: Any, layout: Layout | None, node: fx.Node, as_traced: bool) -> Any:
        if layout is None or not isinstance(operand, fx.Node):
            return operand
        if self._is_known(operand) and lies(operand.meta["val"], layout, traced.meta["val"], as_traced):
            return operand
        if layout is Layout.HEADS_IN_ROWS:
            return self._copy_transposed(operand, node, 1, 2)
        if layout is Layout.AS_TRACED and not traced.meta["val"].is_contiguous():
            return self._copy_transposed(operand, node, -1, -2)
        return self._copy(operand, node)

    def _copy_transposed(self, operand: fx.Node, node: fx.Node, *dims: int) -> fx.Node:
        """A copy of an operand that is contiguous once two of its dims are swapped."""
        turned = self._copy(self.call(aten.transpose.int, (operand, *dims), {}, like=node), node)
        return self.call(aten.transpose.int, (turned, *dims), {}, like=node)

    def _copy(self, operand: fx.Node, node: fx.Node) -> fx.Node:
        """A contiguous copy of an operand of ``node``."""
        copy = self.call(aten.clone.default, (operand,), {"memory_format": torch.contiguous_format}, like=node)
        copy.meta.pop("grad_of", None)
        return copy

    def check(self, node: fx.Node, new: fx.Node, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Raise ``PartitionError`` unless the local results have the shapes that their placements say."""
        for val, shape in zip(results(new.meta["val"]), shapes, strict=True):
            if shape is not None and tuple(val.shape) != shape:
                raise PartitionError(
                    f"the rule of {node.target} promises local results of shape {shape}, but the op gave "
                    f"{tuple(val.shape)} at {node.meta.get('source') or node.name}: mend the rule, or register "
                    "another with spmd.register_rule"
                )

    def redistributed(self, value: Value, placement: Placements, reason: Reason) -> fx.Node:
        """Emit the redistribution of ``value`` to ``placement``, from the nearest placement that it has."""
        source = value.nearest(placement, self.mesh)
        start = value.nodes[source]

        def emit(target: Any, args: Any, collective: Any = None, **kwargs: Any) -> fx.Node:
            new = self.call(target, args, kwargs, like=value.source)
            new.meta.pop("grad_of", None)
            if collective is not None:
                new.meta["collective"] = collective
            return new

        node = Redistribution(emit, self.mark, self.mesh, value.shape, reason, self.own).run(start, source, placement)
        if node is not start:
            node.meta["placement"] = placement
            if "grad_of" in start.meta:
                node.meta["grad_of"] = start.meta["grad_of"]
        return node

    def seed_input(self) -> list[Input]:
        """The description of the seed, if some op draws."""
        return [Input(Role.SEED, "seed")] if self.seed is not None else []

    def _draw(
        self, node: fx.Node, target: Any, args: Any, kwargs: Any, placements: Sequence[Placements | None]
    ) -> fx.Node:
        """Emit a random op: equal on replicas, different on every shard, a function of the call's seed."""
        if self.seed is None:
            last = self.graph.find_nodes(op="placeholder")[-1]
            with self.graph.inserting_after(last):
                self.seed = self.graph.placeholder("seed")
            self.seed.meta["val"] = 0
        whole, placement = next((v, p) for v, p in zip(results(node.meta["val"]), placements, strict=True) if p)
        part = local_runs(whole.shape, placement, self.mesh)
        arguments = (target, self.seed, self._number(node), part, *args)
        new = self.graph.create_node("call_function", draw, arguments, kwargs, name=node.name)
        return self._with_provenance(new, node, self._shapes.of(target, args, kwargs))

    def _number(self, node: fx.Node) -> int:
        """The number of a draw, as capture gave it; below zero in graphs that were not captured here."""
        self._unnumbered -= "draw" not in node.meta
        return int(node.meta.get("draw", self._unnumbered))

    def _with_provenance(self, new: fx.Node, like: fx.Node, val: Any) -> fx.Node:
        new.meta = {**carried(like, Relation.SHARE), "val": val}
        self._layouts.see(new)
        if _keeps_layout(new) and any(n in self._unsure or self._is_mixed(new, n) for n in new.all_input_nodes):
            self._unsure.add(new)
        return new

    def _is_mixed(self, node: fx.Node, operand: fx.Node) -> bool:
        """Whether kernel and fake may choose different strides: an elementwise op has an operand not contiguous."""
        target: Any = node.target
        tensor = isinstance(operand.meta.get("val"), torch.Tensor)
        computes = _is_elementwise(target) and not has(target, Trait.ALIAS)
        return computes and tensor and not self._layouts.is_contiguous(operand)


def _are_traced(operands: Any, traced: Any) -> bool:
    """Whether operands have the values with which the op was traced: then so has the result."""
    if isinstance(traced, fx.Node):
        return isinstance(operands, fx.Node) and operands.meta["val"] is traced.meta["val"]
    if isinstance(traced, (tuple, list)):
        pairs = zip(operands, traced, strict=False)
        return len(operands) == len(traced) and all(_are_traced(*pair) for pair in pairs)
    if isinstance(traced, Mapping):
        return operands.keys() == traced.keys() and all(_are_traced(operands[key], traced[key]) for key in traced)
    return operands is traced


def _name(target: Any, like: fx.Node) -> str:
    """The name in the global graph for the same op; the op's own name for a new node."""
    if target is like.target:
        return like.name
    return name_of(target)


def _local(val: torch.Tensor, placement: Placements, mesh: Mesh) -> torch.Tensor:
    """A fake of this rank's part of a fake."""
    if not is_sharded(placement):
        return val
    with val.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(local_shape(val.shape, placement, mesh), dtype=val.dtype, device=val.device)


def _fake_mode(program: Program) -> Any:
    for node in program.placeholders:
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            return val.fake_mode  # type: ignore[attr-defined]
    raise PartitionError(
        "expected a program with at least one tensor among its inputs, got none: there is nothing to do"
    )


def _keeps_layout(node: fx.Node) -> bool:
    """Whether an op's result takes its strides from the operands."""
    target: Any = node.target
    if target in _CONTIGUOUS or node.kwargs.get("memory_format") is torch.contiguous_format:
        return False
    return target is getitem or has(target, Trait.VIEW) or _is_elementwise(target)


def _joins_elements(node: fx.Node) -> bool:
    """Whether an op views elements as one, such as pairs as complex numbers: it cannot where a pass puts a parameter.

    There, in a bucket, a tensor begins at any element; a copy has memory of its own.
    """
    val, (source, *_) = node.meta["val"], node.args or (None,)
    if node.target not in (aten.view_as_complex.default, aten.view.dtype) or not isinstance(source, fx.Node):
        return False
    return bool(val.dtype.itemsize > source.meta["val"].dtype.itemsize)


def _is_elementwise(target: Any) -> bool:
    return has(target, Trait.POINTWISE) or target is aten.cat.default
