"""Find the fastest Python function that computes a node's op.

``torch.ops.aten.mm.default(a, b)`` matches its arguments against a schema in general, which costs a microsecond or two
more than the function that torch's bindings have for it, ``torch.mm(a, b)``. For small models that is much of a step.
A binding chooses among the overloads of an op by its arguments. Calling it once without computing anything shows
whether it reaches the very overload of the node, with the very arguments.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.ir.schemas import schema

from .._torch import OpOverload, TorchDispatchMode, nn_bindings

_HOMES: tuple[Any, ...] = (torch, nn_bindings, torch.Tensor)
_BINDINGS = (types.BuiltinFunctionType, types.MethodDescriptorType)

_found: dict[Hashable, Callable[..., Any]] = {}


def direct(node: fx.Node) -> Callable[..., Any]:
    """The binding that performs the same op with the same arguments, else the node's own target."""
    op = node.target
    assert callable(op)
    if not isinstance(op, OpOverload) or op.namespace != "aten" or not _has_tensor(node):
        return op  # a factory also asks torch's modes for its device
    key = (op, *map(_kind, node.args), *((name, _kind(value)) for name, value in node.kwargs.items()))
    if key not in _found:
        _found[key] = next((each for each in _candidates(op) if _performs(each, op, node)), op)
    return _found[key]


def _candidates(op: OpOverload) -> Iterator[Callable[..., Any]]:
    name = schema(op).name
    for home in _HOMES:
        function = getattr(home, name, None)
        if isinstance(function, _BINDINGS):
            yield function


def _performs(function: Callable[..., Any], op: OpOverload, node: fx.Node) -> bool:
    """Whether calling ``function`` with the node's arguments performs the node's op with them."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _example)
    seen = _Seen(node.meta.get("val"))
    try:
        with torch.no_grad(), seen:
            function(*args, **kwargs)
    except Exception:
        return False  # a binding with other arguments, or with a result of another kind
    if len(seen.calls) != 1:
        return False
    called, its_args, its_kwargs = seen.calls[0]
    return called is op and _same(_named(op, its_args, its_kwargs), _named(op, args, kwargs))


class _Seen(TorchDispatchMode):
    """Notes which ops are called, and lets none of them run: each gives ``result``."""

    def __init__(self, result: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result = result
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return self.result


def _named(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults too."""
    arguments = schema(op).arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    return {argument.name: given.get(argument.name, argument.default) for argument in arguments}


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are one to an op: the same tensors, equal values of one type."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _has_tensor(node: fx.Node) -> bool:
    return any(isinstance(each.meta.get("val"), torch.Tensor) for each in node.all_input_nodes)


def _example(node: fx.Node) -> Any:
    """An example of an argument: tensors have no data, and a number that a call brings is an arbitrary one."""
    val = node.meta.get("val")
    if isinstance(val, (torch.SymFloat, float)):
        return 0.5
    return 3 if isinstance(val, torch.SymInt) else val


def _kind(value: Any) -> Any:
    """Arguments of one kind lead a binding to the same overload."""
    if isinstance(value, fx.Node):
        val = _example(value)
        return ("tensor", val.ndim == 0, val.dtype) if isinstance(val, torch.Tensor) else type(val)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_kind, value))
    return type(value)
