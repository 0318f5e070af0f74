"""Known values: tensors whose values can be computed while tracing, from no input and no random draw."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from passes.analysis.reachability import ancestors
from passes.ir.effects import is_random
from passes.ir.ops import Trait, has
from passes.ir.schemas import schema

from ..._torch import OpOverload, disable_modes, get_proxy_mode, tree_flatten
from ..provenance import proxy_node
from ..state_branches import extract
from ..tensor_attributes import is_users

aten = torch.ops.aten
_LARGEST = 1 << 22  # elements of a value that is worth computing


def known_value(tensor: Tensor) -> Tensor | None:
    """The value of a traced tensor, or None if it is known only when the program runs."""
    mode = get_proxy_mode()
    node = proxy_node(tensor, mode.tracer) if mode is not None else None
    if mode is None or node is None or tensor.numel() > _LARGEST:
        return None
    needed = ancestors([node])
    if any(each.op == "placeholder" for each in needed):
        return None
    needed = _with_writes(needed)
    root: Any = mode.tracer.root  # type: ignore[union-attr]  # ``make_fx`` runs
    made = {each: getattr(root, str(each.target), None) for each in needed if each.op == "get_attr"}
    constants = [value for value in made.values() if isinstance(value, Tensor) and not is_users(value)]
    if len(constants) < len(made):
        return None
    if any(each.op != "call_function" or is_random(each) for each in needed - made.keys()):
        return None
    with disable_modes(), torch.no_grad():
        value: Tensor = extract(node, needed, list(made))(*(each.clone() for each in constants))
    return value


def _with_writes(needed: set[fx.Node]) -> set[fx.Node]:
    """These nodes, the ops that write into one of them, or into a view of one, and what those are computed from."""
    graph = next(iter(needed)).graph
    while True:
        views, found = set(needed), set[fx.Node]()
        for node in graph.nodes:
            if node in needed:
                continue
            is_op = isinstance(node.target, OpOverload)
            is_view = node.target is operator.getitem or (is_op and has(node.target, Trait.VIEW))
            if is_view and not views.isdisjoint(node.all_input_nodes[:1]):
                views.add(node)
            elif is_op and has(node.target, Trait.MUTABLE) and not views.isdisjoint(_written(node)):
                found |= ancestors([node])
        if found <= needed:
            return needed
        needed = needed | found


def _written(node: fx.Node) -> list[fx.Node]:
    """The nodes that an op writes into."""
    assert isinstance(node.target, OpOverload)
    described = schema(node.target)
    given = {**node.kwargs, **dict(zip(described.names, node.args, strict=False))}
    return [leaf for each in described.arguments if each.written for leaf in tree_flatten(given.get(each.name))[0]]


def known_numbers() -> dict[Any, Any]:
    """Decompositions of the ops that convert tensors to Python numbers or bools: known values become constants."""
    return {aten._local_scalar_dense.default: _number, aten.equal.default: _equal}


def _number(tensor: Tensor) -> Any:
    value = known_value(tensor)
    if value is None:
        return NotImplemented
    with disable_modes():
        return value.item()


def _equal(one: Tensor, other: Tensor) -> Any:
    """``quantile`` of torch 2.11 checks so that its number lies between 0 and 1."""
    values = known_value(one), known_value(other)
    if values[0] is None or values[1] is None:
        return NotImplemented
    with disable_modes():
        return torch.equal(values[0], values[1])


def is_range(tensor: Tensor, step: int) -> bool:
    """Whether the value of ``tensor`` is known to be 0, ``step``, 2 * ``step``, ..."""
    value = known_value(tensor)
    if value is None or value.ndim != 1:
        return False
    with disable_modes(), torch.no_grad():
        return bool((value == step * torch.arange(len(value), device=value.device)).all())
