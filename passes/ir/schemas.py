"""The schemas of ops, in plain Python, and the values that a call passes for their arguments.

Read once for each op: torch builds its schema objects anew at every look.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload, schema_of
from .region import Island, Region


@dataclass(frozen=True)
class Argument:
    """One argument: ``type`` as torch writes it (``"Tensor"``, ``"List[Tensor]"``), ``default`` None if it has none.

    ``shared``: a result may lie in its memory. ``written``: the op writes to it. ``is_out``: it is there for a result.
    """

    name: str
    type: str
    default: Any
    kwarg_only: bool
    shared: bool
    written: bool
    is_out: bool


@dataclass(frozen=True)
class Schema:
    """An op's declaration: ``results`` has their types, ``shares`` says whether one lies in an argument's memory."""

    name: str  # "add"; the overload is "Tensor"
    overload: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    shares: bool
    is_mutable: bool

    @cached_property
    def names(self) -> list[str]:
        """The names of the arguments, in order."""
        return [argument.name for argument in self.arguments]

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each argument, by name."""
        return {name: position for position, name in enumerate(self.names)}

    @cached_property
    def shared(self) -> list[str]:
        """The names of the arguments in whose memory a result may lie, as ``Tensor(a)`` says."""
        return [argument.name for argument in self.arguments if argument.shared]

    @cached_property
    def written(self) -> list[int]:
        """The positions of the arguments that the op writes to."""
        return [k for k, argument in enumerate(self.arguments) if argument.written]

    @property
    def typed(self) -> list[tuple[str, str]]:
        """Names and types of the arguments that are no memory for a result."""
        return [(argument.name, argument.type) for argument in self.arguments if not argument.is_out]


_KNOWN: dict[int, tuple[OpOverload, Schema]] = {}  # by the id of the op, whose own hash is slow


def schema(op: Any) -> Schema:
    """The declaration of an op, or of a region."""
    known = _KNOWN.get(id(op))
    if known is not None:
        return known[1]
    if isinstance(op, Region):
        return _of_region(op)
    _KNOWN[id(op)] = op, _of_op(op)
    return _KNOWN[id(op)][1]


def _of_region(region: Region) -> Schema:
    """Tensors in, tensors out, and nothing else; but that an island may write results into memory that it is given."""
    outs = region.outs if isinstance(region, Island) else []
    arguments = tuple(
        Argument(each.name, "Tensor", None, False, each in outs, each in outs, each in outs)
        for each in region.placeholders
    )
    return Schema(region.name, "default", arguments, ("Tensor",) * len(region.results), bool(outs), bool(outs))


def _of_op(op: OpOverload) -> Schema:
    declared = schema_of(op)
    name, _, overload = op.name().partition("::")[2].partition(".")
    arguments = tuple(
        Argument(
            each.name,
            str(each.type),
            each.default_value,
            each.kwarg_only,
            each.alias_info is not None,
            each.alias_info is not None and each.alias_info.is_write,
            each.is_out,
        )
        for each in declared.arguments
    )
    results = tuple(str(each.type) for each in declared.returns)
    shares = any(each.alias_info is not None for each in declared.returns)
    return Schema(name, overload or "default", arguments, results, shares, declared.is_mutable)


def name_of(target: Any) -> str:
    """The name that tracing gives to a node that calls ``target``: ``cat``, not ``cat_default``; a method's own."""
    if isinstance(target, str):
        return target
    name: str = schema(target).name if isinstance(target, OpOverload) else target.__name__
    return name


def position_of(op: OpOverload | Region, name: str) -> int | None:
    """The position of the argument called ``name``; None if ``op`` has none."""
    return schema(op).positions.get(name)


def argument(node: fx.Node, name: str) -> Any:
    """The value that a node passes for argument ``name`` of its op; None if it passes none, or the op has none."""
    position = position_of(node.target, name)  # type: ignore[arg-type]
    if position is not None and position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name)


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in an argument, however deep in lists, each as often as it is there."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def is_tensor(value: Any) -> bool:
    """Whether an argument is a node whose value is a tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
