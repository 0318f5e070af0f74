"""The ops of a function on the values of some nodes: as a graph, or in the place of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from passes.ir.edit import insert_before
from passes.ir.meta import Relation

from ..._torch import make_fx


def traced_ops(function: Callable[..., Any], args: Sequence[Any]) -> fx.Graph:
    """The graph of ``function`` on global values; its placeholders are the nodes among ``args``, in order."""
    nodes = [arg for arg in args if isinstance(arg, fx.Node)]

    def call(*tensors: torch.Tensor) -> Any:
        remaining = iter(tensors)
        return function(*(next(remaining) if isinstance(arg, fx.Node) else arg for arg in args))

    with torch.no_grad():
        # Nodes may share a fake, by which a trace would take one for the other.
        vals = [node.meta["val"].detach() for node in nodes]
        return make_fx(call, tracing_mode="fake")(*vals).graph


def inlined(node: fx.Node, function: Callable[..., Any]) -> fx.Node:
    """The result of ``function``, of whose ops nodes are made in the place of ``node``."""
    traced = traced_ops(function, node.args)
    given = [arg for arg in node.args if isinstance(arg, fx.Node)]
    copies: dict[Any, fx.Node] = dict(zip(traced.find_nodes(op="placeholder"), given, strict=True))
    (result,) = traced.output_node().args
    for inner in (each for each in traced.nodes if each.op == "call_function"):
        args, kwargs = fx.map_arg((inner.args, inner.kwargs), copies.__getitem__)
        relation = Relation.REPLACEMENT if inner is result else Relation.STEP
        copies[inner] = insert_before(
            node, inner.target, *args, like=node, relation=relation, kwargs=kwargs, val=inner.meta["val"]
        )
    return copies[result]
