"""Keys of nodes by structure: what a node computes, from which inputs, and for which readers, in whatever order.

Graphs that differ in the order and the names of their nodes only have the same keys. Nodes of one graph with equal keys
are interchangeable, but for how they pair up with other such nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload
from ..ir.effects import is_pure, is_random
from ..ir.program import output_values
from ..ir.schemas import nodes_in
from .strides import have_one_layout

_COMMUTATIVE = {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}


def structural_keys(graph: fx.Graph, inputs: Mapping[fx.Node, str], outputs: Sequence[str]) -> dict[fx.Node, str]:
    """A key for each node but the output. ``inputs`` and ``outputs`` say what each of them is, whatever its position.

    Nodes with effects are numbered, since their order counts; random draws are not.
    """
    computed: dict[fx.Node, str] = {}
    effects = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            computed[node] = _digest(inputs[node])
        elif node.op != "output":
            effects += not _may_move(node)
            number = [] if _may_move(node) else [f"effect {effects}"]
            computed[node] = _digest(*_described(node, computed), *number)
    return _with_readers(graph, computed, outputs)


def is_commutative(node: fx.Node) -> bool:
    """Whether the two operands of ``node`` may be exchanged, for the same bits in the same layout."""
    if node.target not in _COMMUTATIVE or node.kwargs or len(node.args) != 2:
        return False
    return have_one_layout(*node.args)


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments of ``node``, in order, each as often as it is there."""
    return nodes_in((node.args, dict(node.kwargs)))


def _may_move(node: fx.Node) -> bool:
    return is_pure(node) or is_random(node)


def _described(node: fx.Node, computed: Mapping[fx.Node, str]) -> list[str]:
    """The op and its arguments, with types: to Python 1, 1.0 and True are equal, to an op they are not."""
    if is_commutative(node):
        return [_name(node.target), *sorted(computed[each] for each in operands(node))]
    named = sorted(node.kwargs.items(), key=lambda item: item[0])
    return [node.op, _name(node.target), text_of(node.args, computed), text_of(named, computed)]


def text_of(value: Any, computed: Mapping[fx.Node, str]) -> str:
    """An argument as text, with ``computed`` for its nodes; 1, 1.0 and True are three things."""
    if isinstance(value, fx.Node):
        return computed[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(text_of(each, computed) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {text_of(each, computed)}' for key, each in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{text_of((value.start, value.stop, value.step), computed)}"
    return repr(value)


def _name(target: Any) -> str:
    if isinstance(target, (str, OpOverload)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _with_readers(graph: fx.Graph, computed: Mapping[fx.Node, str], outputs: Sequence[str]) -> dict[fx.Node, str]:
    """Keys that also say who reads each node: nodes that compute the same differ by their readers."""
    uses: dict[fx.Node, list[str]] = {node: [] for node in computed}
    keys: dict[fx.Node, str] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            for value, name in zip(output_values(graph), outputs, strict=True):
                if isinstance(value, fx.Node):
                    uses[value].append(f"output {name}")
            continue
        keys[node] = _digest(computed[node], *sorted(uses[node]))
        for position, operand in enumerate(operands(node)):
            uses[operand].append(f"{keys[node]} {0 if is_commutative(node) else position}")
    return keys


def _digest(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=10).hexdigest()
