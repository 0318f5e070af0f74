"""Memo keys of calls: a step repeats the same ops on the same shapes, by layer and by parameter.

Calls of one key share a rule's options (``partitioner/options.py``) and the shapes of their results (``Shapes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ._torch import OpOverload


@dataclass(frozen=True, eq=False)
class _Key:
    """The memo key of a tensor; equal keys are one object."""

    key: Any


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, _Key})


class Shapes:
    """The results of calls on fake tensors. They have no data and are never written to, so nodes may share them."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._memo: dict[Any, Any] = {}
        self._keys: dict[int, tuple[Any, _Key]] = {}  # of tensors, which they keep alive, by id
        self._interned: dict[Any, _Key] = {}
        self._traced: dict[int, list[fx.Node]] = {}  # by the id of their op, until a call of that has to be looked up

    def learn_later(self, node: fx.Node) -> None:
        """``learn``, once a call of the same op is looked up: most ops never are, and to make keys takes long."""
        self._traced.setdefault(id(node.target), []).append(node)

    def learn(self, node: fx.Node) -> None:
        """Record the traced result of ``node``: a rank that has its operands whole gets the same."""
        if isinstance(node.target, OpOverload) and "val" in node.meta:
            self._memo.setdefault(self._key(node.target, node.args, node.kwargs), node.meta["val"])

    def of(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``target`` on the values of nodes."""
        if not isinstance(target, OpOverload):
            args, kwargs = _vals(args, kwargs)
            return target(*args, **kwargs)
        for node in self._traced.pop(id(target), ()):
            self.learn(node)
        key = self._key(target, args, kwargs)
        if key not in self._memo:
            args, kwargs = _vals(args, kwargs)
            with self._mode, torch.no_grad():
                self._memo[key] = target(*args, **kwargs)
        return self._memo[key]

    def _key(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.node.map_arg((tuple(args), kwargs), lambda node: self._key_of(node.meta["val"]))
        return target, memo_key(args), memo_key(kwargs)

    def _key_of(self, val: Any) -> Any:
        """The key of a value; of a tensor of known sizes, which many nodes read, it is made once."""
        if not isinstance(val, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in val.shape):
            return _Key(memo_key(val)) if isinstance(val, torch.Tensor) else val
        if id(val) not in self._keys:
            key = memo_key(val)
            self._keys[id(val)] = val, self._interned.setdefault(key, _Key(key))
        return self._keys[id(val)][1]


def memo_key(value: Any) -> Any:
    """A hashable key, equal for arguments that no rule and no shape can tell apart.

    Numbers that are known at a call only have their type in common, except where they may be the length of a dim.
    """
    if type(value) in _PLAIN:  # most are; to ask for a tensor takes longer
        return type(value), value  # 1, 1.0 and True are equal
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
    return object() if isinstance(value, torch.SymInt) else (type(value), value)


def _vals(args: Any, kwargs: Any) -> Any:
    return fx.node.map_arg((tuple(args), kwargs), lambda node: node.meta["val"])
