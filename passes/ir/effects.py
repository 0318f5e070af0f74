"""Which nodes may be removed when nobody reads them, and merged with their equal.

FX has a rule of its own, but it counts every collective as impure. In a program a collective is a function of the
ranks' operands: where all ranks run the same graph, all of them remove or merge it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload
from ..runtime.random import draw
from .collectives import is_message, is_wait
from .ops import PURE_FUNCTIONS, Trait, draws, has, traits
from .region import Region
from .schemas import argument, nodes_in, schema

_TORCHS = ("aten", "prims")  # namespaces of ops that every backend knows


def is_pure(node: fx.Node) -> bool:
    """Whether ``node`` may be removed when nobody reads it, and merged with its equal."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False  # a method or module of the user's may do anything else
    if mutates(node):
        return False
    if is_wait(node) and _is_started_elsewhere(node.args[0]):
        return False  # a message that nobody reads arrives, too
    return has(node.target, Trait.PURE) or node.target in PURE_FUNCTIONS


def _is_started_elsewhere(started: Any) -> bool:
    """Whether a message is waited for, or the empty result of a send that another program has started."""
    if not isinstance(started, fx.Node) or is_message(started):
        return isinstance(started, fx.Node)
    val = started.meta.get("val")
    return started.op == "placeholder" and isinstance(val, torch.Tensor) and not val.numel()


def is_functional(node: fx.Node) -> bool:
    """Whether ``node`` is a functional op of torch's own, without numbers drawn: a region may hold it."""
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target.namespace not in _TORCHS:
        return False
    return bool(schema(node.target).results) and not mutates(node) and not draws(node.target, node.args, node.kwargs)


def is_random(node: fx.Node) -> bool:
    """Whether ``node`` draws from a generator."""
    return has(node.target, Trait.RANDOM)


def mutates(node: fx.Node) -> bool:
    """Whether ``node`` writes to one of its arguments."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.startswith("__")
    known = traits(node.args[0] if node.target is draw else node.target)
    return Trait.MUTABLE in known or (Trait.WRITES_STATISTICS in known and _in_training(node))


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that ``node`` writes to and that its schema declares, in the order of the schema."""
    if not isinstance(node.target, (OpOverload, Region)):
        return []
    return nodes_in([argument(node, each.name) for each in schema(node.target).arguments if each.written])


def is_profiling(node: fx.Node) -> bool:
    """Whether ``node`` opens or closes a profiler range."""
    return has(node.target, Trait.PROFILING)


def _in_training(node: fx.Node) -> bool:
    """Whether a batch norm updates running statistics that it was given."""
    return argument(node, "running_mean") is not None and bool(argument(node, "training"))
