"""Memo keys of calls: a step repeats the same ops on the same shapes, by layer and by parameter.

Calls of one key share a rule's options (``partitioner/choose.py``) and the shapes of their results (``Shapes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ._torch import OpOverload


class Shapes:
    """The results of calls on fake tensors. They have no data and are never written to, so nodes may share them."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._memo: dict[Any, Any] = {}

    def learn(self, node: fx.Node) -> None:
        """Record the traced result of ``node``: a rank that has its operands whole gets the same."""
        if isinstance(node.target, OpOverload) and "val" in node.meta:
            self._memo.setdefault(_key(node.target, *_vals(node.args, node.kwargs)), node.meta["val"])

    def of(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``target`` on the values of nodes."""
        args, kwargs = _vals(args, kwargs)
        if not isinstance(target, OpOverload):
            return target(*args, **kwargs)
        key = _key(target, args, kwargs)
        if key not in self._memo:
            with self._mode, torch.no_grad():
                self._memo[key] = target(*args, **kwargs)
        return self._memo[key]


def memo_key(value: Any) -> Any:
    """A hashable key, equal for arguments that no rule and no shape can tell apart.

    Numbers that are known at a call only have their type in common, except where they may be the length of a dim.
    """
    if isinstance(value, torch.Tensor):
        flags = value.is_conj(), value.is_neg(), value.layout
        layout = memo_key(value.shape), memo_key(value.stride()), memo_key(value.storage_offset())
        return (*layout, value.dtype, value.device, flags)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(memo_key, value))
    if isinstance(value, Mapping):
        return tuple((key, memo_key(item)) for key, item in value.items())
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return type(value)
    return object() if isinstance(value, torch.SymInt) else (type(value), value)  # 1, 1.0 and True are equal


def _key(target: Any, args: Any, kwargs: Any) -> Any:
    return target, memo_key(args), memo_key(kwargs)


def _vals(args: Any, kwargs: Any) -> Any:
    return fx.node.map_arg((tuple(args), kwargs), lambda node: node.meta["val"])
