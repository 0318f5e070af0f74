"""The calls of a global program, which solving, counting and emitting share: names, options, decompositions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from passes.ir.meta import Relation, carried

from ..rules import OpCall
from .context import Context
from .options import Options
from .prepare.traced_ops import traced_ops
from .values import Value, infos, results


@dataclass
class Calls:
    """The calls of a program under a plan. Nothing here depends on an assignment."""

    context: Context
    _calls: dict[fx.Node, OpCall] = field(default_factory=dict)
    _decompositions: dict[fx.Node, fx.Graph] = field(default_factory=dict)
    _names: dict[fx.Node, str] = field(default_factory=dict)

    @cached_property
    def options(self) -> Options:
        """The options of every call."""
        return Options(self.context.mesh, self.context.plan.options.get("attention"))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes."""
        return tuple(axis.name for axis in self.context.mesh.axes)

    def name(self, node: fx.Node) -> str:
        """The name of a node in an assignment: its own, or ``softmax/sum`` in the decomposition of ``softmax``."""
        return self._names.get(node, node.name)

    def describe(self, node: fx.Node) -> str:
        """A node, its op and the user's line, for messages."""
        source = node.meta.get("source")
        return f"{self.name(node)} ({node.target}{f', {source}' if source else ''})"

    def call(self, node: fx.Node, operands: Sequence[Value], values: Mapping[fx.Node, Any]) -> OpCall:
        """The call of a node on global shapes, with an ``Info`` for each tensor."""
        if node not in self._calls:
            remaining = iter(operands)

            def info(operand: fx.Node) -> Any:
                return next(remaining).info if isinstance(values[operand], Value) else operand.meta["val"]

            args, kwargs = fx.node.map_arg((node.args, node.kwargs), info)
            target: Any = node.target
            own = tuple(value.info for value in operands)
            given, routes = infos(results(node.meta["val"])), self.context.routes
            order, of_weights = routes.own.get(node), routes.of_weights.get(node)
            self._calls[node] = OpCall(target, args, kwargs, own, given, 1, own_order=order, of_weights=of_weights)
        return self._calls[node]

    def decomposed(self, node: fx.Node, decomposition: Callable[..., Any]) -> fx.Graph:
        """The graph of ``decomposition`` on global values; its placeholders are the nodes among the args, in order."""
        if node not in self._decompositions:
            graph = self._decompositions[node] = traced_ops(decomposition, node.args)
            for inner in graph.nodes:
                inner.meta |= carried(node, Relation.SHARE)
                self._names[inner] = f"{self.name(node)}/{inner.name}"
        return self._decompositions[node]
