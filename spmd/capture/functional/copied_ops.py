"""``CopiedOps``: the second trace of a graph whose writes are renamings; it copies each op that needs no change.

To trace an op takes ten times as long as to copy its node. What is decomposed is still traced, and made functional, op
by op; so is whatever is not known to be an op that returns new tensors, or views, and does nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes.ir.ops import Trait, aten, has
from passes.ir.schemas import name_of

from ..._torch import (
    OpOverload,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_of_tensor,
    tree_map,
)
from ...memo import Shapes
from .renamed_writes import RenamedWrites, functional_variant
from .second_trace import SecondTrace

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CHANGED = aten("is_nonzero lift lift_fresh lift_fresh_copy")  # by the tracer, or by torch's functionalization


class CopiedOps(SecondTrace):
    """The values of the interpreter are the new graph's nodes, lists of them for ops of several results, and numbers.

    ``decomposed``: the ops that the trace decomposes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        constants: Sequence[str],
        writes: RenamedWrites,
        shapes: Shapes,
        decomposed: Collection[Any],
    ) -> None:
        super().__init__(module, constants)
        self.writes, self.shapes, self.decomposed = writes, shapes, decomposed
        mode = get_proxy_mode()
        assert mode is not None
        self.tracer: Any = mode.tracer
        self.first, self.new = module.graph, self.tracer.graph

    def run_on(self, flat: Sequence[Any]) -> Any:
        """Go through the graph with these inputs and constants; returns what it returns."""
        inputs = zip(self.new.find_nodes(op="placeholder"), flat, strict=True)
        result = super().run_on([node if isinstance(x, torch.Tensor) else x for node, x in inputs])
        self._write_back()
        return tree_map(lambda x: fx.Proxy(x, self.tracer) if isinstance(x, fx.Node) else x, result)

    def _run(self, node: fx.Node) -> Any:
        if node.op != "call_function":
            return super()._run(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.target is getitem and not isinstance(args[0], fx.Node):
            return args[0][args[1]]
        if not isinstance(node.target, OpOverload):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if has(node.target, Trait.PROFILING):
            return self._node(node.target, args, kwargs, node.meta.get("val"))
        if node in self.writes.written:
            return self._write(node, args, kwargs)
        self.shapes.learn(node)
        if self._is_copied(node.target) and (node.all_input_nodes == [] or _has_tensors(args, kwargs)):
            return self._copy(node.target, args, kwargs)
        return self._trace(node.target, args, kwargs)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        """The arguments of a node."""
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), self._value)
        return args, kwargs

    def _value(self, node: fx.Node) -> Any:
        return self.env[self.writes.value_of(node)]

    def _is_copied(self, op: OpOverload) -> bool:
        if op.namespace != "aten" or op in self.decomposed or op in _CHANGED or has(op, Trait.COMPOSITE):
            return False
        return torch.Tag.data_dependent_output not in op.tags and not name_of(op).startswith("__")

    def _write(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The new value of what ``node`` writes to, for all that refer to it."""
        op: Any = node.target
        functional = functional_variant(op)
        assert functional is not None
        make = self._copy if self._is_copied(functional) else self._trace
        new = self.env[self.writes.value_of(node)] = make(functional, args, kwargs)
        return new

    def _copy(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(self._number_as_node, (args, kwargs))
        with disable_proxy_modes_tracing():
            val = self.shapes.of(op, args, kwargs)
        new = self._node(op, args, kwargs, val)
        if not isinstance(val, (tuple, list)):
            return new
        return [self._node(getitem, (new, k), {}, each) for k, each in enumerate(val)]

    def _node(self, target: Any, args: Any, kwargs: Any, val: Any) -> fx.Node:
        new = self.new.create_node("call_function", target, tuple(args), dict(kwargs), name_of(target))
        new.meta["val"] = val
        return new

    def _number_as_node(self, value: Any) -> Any:
        return get_proxy_slot(value, self.tracer).force().node if isinstance(value, _SYMBOLIC) else value

    def _trace(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an op on tensors of which the tracer knows the nodes; returns the nodes that it has made."""
        tensors: dict[fx.Node, torch.Tensor] = {}

        def tensor(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            if value not in tensors:
                with disable_proxy_modes_tracing():
                    tensors[value] = value.meta["val"].detach()
                set_proxy_of_tensor(tensors[value], fx.Proxy(value, self.tracer), self.tracer)
            return tensors[value]

        args, kwargs = tree_map(tensor, (args, kwargs))
        result = torch.func.functionalize(op, remove="mutations")(*args, **kwargs)
        return tree_map(self._node_of, result)

    def _node_of(self, value: Any) -> Any:
        return get_proxy_slot(value, self.tracer).proxy.node if isinstance(value, torch.Tensor) else value

    def _write_back(self) -> None:
        """End with a copy into each input that was written, as torch's way does."""
        written, inputs = set(self.writes.written.values()), self.new.find_nodes(op="placeholder")
        for old, new in zip(self.first.find_nodes(op="placeholder"), inputs, strict=False):
            if old in written:
                value = self.env[old]
                self._node(torch.ops.aten.copy_.default, (new, value), {}, value.meta["val"])


def _has_tensors(args: Any, kwargs: Any) -> bool:
    """Whether a call reads a node. The shape of what is made from symbolic numbers alone may depend on them."""
    found: list[fx.Node] = []
    fx.node.map_arg((args, kwargs), found.append)
    return bool(found)
