"""Which nodes may be removed when nobody reads them, and merged with their equal.

FX has a rule of its own, but it counts every collective as impure. In a program a collective is a function of the
ranks' operands: where all ranks run the same graph, all of them remove or merge it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch import SYMBOLIC_FUNCTIONS, OpOverload
from ..runtime.collective_ops import NAMESPACE
from ..runtime.random import draw

_PURE_NAMESPACES = {"aten", "prims", "_c10d_functional", NAMESPACE}

# They write the running statistics although their schemas do not say so.
_UNDECLARED_WRITERS: set[Any] = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
}

_OPERATORS = """abs add and_ concat contains eq floordiv ge getitem gt index inv invert is_ is_not le lshift lt matmul
mod mul ne neg not_ or_ pos pow rshift sub truediv truth xor""".split()

# Python functions whose result depends on their arguments alone, and that do nothing else. Passes that put a function
# of their own into graphs add it here; a custom op goes here as its ``OpOverload``.
PURE_FUNCTIONS: set[Callable[..., Any]] = {
    *(getattr(operator, name) for name in _OPERATORS),
    *(function for function in vars(math).values() if callable(function)),
    *SYMBOLIC_FUNCTIONS,
    *(abs, bool, float, int, max, min, pow, round, sum),
    draw,
}


def is_pure(node: fx.Node) -> bool:
    """Whether ``node`` may be removed when nobody reads it, and merged with its equal."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False  # a method or module of the user's: nobody said what else it does
    if mutates(node):
        return False
    return node.target in PURE_FUNCTIONS or (isinstance(node.target, OpOverload) and _is_pure_op(node.target))


def is_random(node: fx.Node) -> bool:
    """Whether ``node`` draws from a generator."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def mutates(node: fx.Node) -> bool:
    """Whether ``node`` writes to one of its arguments."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.startswith("__")
    op = node.args[0] if node.target is draw else node.target
    if not isinstance(op, OpOverload):
        return False
    return op._schema.is_mutable or (op in _UNDECLARED_WRITERS and _in_training(node))


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that ``node`` writes to and that its schema declares, in the order of the schema."""
    found: list[fx.Node] = []
    if isinstance(node.target, OpOverload):
        for k, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                fx.map_arg(node.args[k] if k < len(node.args) else node.kwargs.get(argument.name), found.append)
    return found


def is_profiling(node: fx.Node) -> bool:
    """Whether ``node`` opens or closes a profiler range."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "profiler"


def _is_pure_op(op: OpOverload) -> bool:
    if op.namespace not in _PURE_NAMESPACES or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return len(op._schema.returns) > 0  # an op without a result is there for what else it does: an assertion


def _in_training(node: fx.Node) -> bool:
    """Whether a batch norm was given running statistics and told to update them."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("running_mean") is not None and bool(given.get("training"))
