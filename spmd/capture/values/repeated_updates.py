"""``RepeatedUpdates``: an optimizer's ops, traced for two parameters of one shape, and copied for all others.

torch's optimizers run the same ops for one parameter after another. To trace an op takes ten times as long as to copy
its node, and those of an optimizer are half of all that a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import increment_version

from passes.ir.origin import Origin

from ..._torch import (
    DisableTorchFunction,
    function_modes,
    get_proxy_mode,
    get_proxy_slot,
    innermost_dispatch_mode,
    set_proxy_of_tensor,
    single_tensor_functions,
    tree_flatten,
    version_of,
)
from ...interpreter.foreign_code import is_foreign_module
from ...memo import memo_key
from ..provenance import Recorder, added_since

Row = Sequence[Tensor]  # what belongs to one parameter: itself, its gradient, and state


@dataclass(frozen=True)
class _Update:
    """The traced ops that update one parameter.

    ``before`` and ``after`` are the nodes of its tensors (parameter, gradient, state), and ``writes`` is how often each
    was written. ``does`` is equal for updates that do the same, and None for one that must not be copied.
    """

    nodes: Sequence[fx.Node]
    before: Sequence[fx.Node]
    after: Sequence[fx.Node]
    writes: Sequence[int]
    does: Any


class RepeatedUpdates:
    """Copies updates, which get their origins from ``recorder``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @contextmanager
    def of(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Copy those of one of torch's optimizers for the length of the context."""
        found = [(variables, name, variables[name]) for variables, name in single_tensor_functions(optimizer)]
        for variables, name, function in found:
            variables[name] = self._copying(function)
        try:
            yield
        finally:
            for variables, name, function in found:
                variables[name] = function

    def _copying(self, function: Callable[..., None]) -> Callable[..., None]:
        def update(*lists: Any, **options: Any) -> None:
            if not self._is_unseen() or not _are_apart(lists, options):
                function(*lists, **options)
                return
            updates: dict[Any, _Update] = {}  # the last that was traced, by what the tensors of a parameter are like
            repeated = set[Any]()  # keys whose last two did the same
            for k, row in enumerate(zip(*filter(None, lists), strict=True)):
                with DisableTorchFunction():
                    key = _key_of(row)
                    if key in repeated:
                        self._copy(updates[key], row)
                        continue
                traced = self._traced(function, lists, options, k, row)
                if key in updates and traced.does is not None and traced.does == updates[key].does:
                    repeated.add(key)
                updates[key] = traced

        return update

    def _is_unseen(self) -> bool:
        """Whether no mode of the user's, who may count or change ops, sees them."""
        own = all(is_foreign_module(type(mode).__module__) for mode in function_modes())
        return own and innermost_dispatch_mode() is self._recorder

    def _traced(
        self, function: Callable[..., None], lists: Sequence[Any], options: Mapping[str, Any], k: int, row: Row
    ) -> _Update:
        """Trace the update of parameter ``k``."""
        recorder, own = self._recorder, [[each[k]] if each else each for each in lists]
        last, asked = recorder.last, recorder.asked
        with DisableTorchFunction():
            before, versions = [_node_of(x) for x in row], list(map(version_of, row))
        function(*own, **options)
        is_same = all(each[k] is part[0] for each, part in zip(lists, own, strict=True) if each)
        for each, part in zip(lists, own, strict=True):
            if each:
                each[k] = part[0]  # Adam puts a complex one there as a real one
        with DisableTorchFunction():
            nodes, after = added_since(last, before[0].graph), [_node_of(x) for x in row]
            writes = [version_of(x) - version for x, version in zip(row, versions, strict=True)]
            is_copied = is_same and recorder.asked == asked and all(map(_is_plain_op, nodes))
            does = _effect(nodes, before, after, writes) if is_copied else None
        return _Update(nodes, before, after, writes, does)

    def _copy(self, update: _Update, row: Row) -> None:
        """Do what ``update`` does to the tensors of another parameter."""
        mode = get_proxy_mode()
        assert mode is not None
        copies = self._recorder.copy(update.nodes, dict(zip(update.before, map(_node_of, row), strict=True)))
        for x, node, writes in zip(row, update.after, update.writes, strict=True):
            set_proxy_of_tensor(x, fx.Proxy(copies[node], mode.tracer), mode.tracer)
            increment_version([x] * writes)


def _are_apart(lists: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether a call updates parameters by lists of traced tensors alone, and autograd does not follow."""
    if torch.is_grad_enabled() or any(isinstance(leaf, Tensor) for leaf in tree_flatten(options)[0]):
        return False
    given = [each for each in lists if each is not None and each != []]
    if not given or not all(isinstance(each, list) and len(each) == len(given[0]) for each in given):
        return False
    return all(isinstance(x, Tensor) and _is_traced(x) for each in given for x in each)


def _slot(x: Tensor) -> Any:
    """What the tracer knows of a tensor; None if it knows none."""
    mode = get_proxy_mode()
    return None if mode is None else get_proxy_slot(x, mode.tracer, None)


def _is_traced(x: Tensor) -> bool:
    """Whether a tensor has a node, and a value that only the program knows."""
    slot = _slot(x)
    return slot is not None and slot.constant is None


def _node_of(x: Tensor) -> fx.Node:
    node: fx.Node = _slot(x).proxy.node
    return node


def _key_of(row: Row) -> Any:
    """Equal for parameters whose tensors no op can tell apart but by their values."""
    nodes = [_node_of(x) for x in row]
    flags = [(type(x), x.requires_grad, x.is_leaf) for x in row]
    return memo_key([*zip(row, flags, map(nodes.index, nodes), strict=True)])


def _is_plain_op(node: fx.Node) -> bool:
    """Whether a node is an op of the optimizer alone: no constant, no random draw, and no gradient."""
    origin: Origin | None = node.meta.get("origin")
    if node.op != "call_function" or origin is None:
        return False
    return origin.draw is None and origin.grad_of is None and origin.cotangent_of is None


def _effect(
    nodes: Sequence[fx.Node], before: Sequence[fx.Node], after: Sequence[fx.Node], writes: Sequence[int]
) -> Any:
    """What ops do to the tensors of a parameter, equal for equal ops. ``val`` counts: copies take it over."""
    at: dict[fx.Node, Any] = {node: (k,) for k, node in reversed([*enumerate(before)])}
    described = []
    for k, node in enumerate(nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: at.get(each, each))
        described.append((node.target, memo_key(args), memo_key(kwargs), memo_key(node.meta["val"])))
        at[node] = ("op", k)
    return described, [at[node] for node in after], list(writes)
