"""Nested arguments and results: what torch takes apart, and besides that dataclasses and the user's kinds of dict.

torch's trees end at an object that they do not know. Here a ``Record`` stands in the place of one that holds values by
name, and putting the tree together again makes an object of the same class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from .._torch import (
    GetAttrKey,
    MappingKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
)


@dataclass(frozen=True)
class _Kind:
    """What two records must have in common to be of one structure."""

    cls: type
    items: tuple[Any, ...]  # keys, of a kind of dict
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """An object of the user's that holds values by name."""

    kind: _Kind
    values: tuple[Any, ...]

    @classmethod
    def of(cls, held: Any) -> Record:
        """Take ``held`` apart, and what it holds."""
        items = dict(held) if isinstance(held, dict) else {}
        attributes = {name: getattr(held, name) for name in _attributes(held)}
        values = tuple(opened(value) for value in (*items.values(), *attributes.values()))
        return cls(_Kind(type(held), tuple(items), tuple(attributes)), values)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of ``tree``, and what it takes to put it together again."""
    leaves, spec = tree_flatten(tree)
    return tree_flatten(opened(tree)) if any(map(_is_record, leaves)) else (leaves, spec)


def flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """The same, with the path of each leaf."""
    paths, spec = tree_flatten_with_path(tree)
    return tree_flatten_with_path(opened(tree)) if any(_is_record(leaf) for _, leaf in paths) else (paths, spec)


def opened(tree: Any) -> Any:
    """``tree`` with a ``Record`` in the place of each object that is one."""
    return tree_map(lambda leaf: Record.of(leaf) if _is_record(leaf) else leaf, tree)


def _is_record(leaf: Any) -> bool:
    if is_dataclass(leaf):
        return not isinstance(leaf, (type, nn.Module, torch.optim.Optimizer, torch.Tensor))
    return isinstance(leaf, dict)


def _attributes(held: Any) -> Iterable[str]:
    """The names of what ``held`` holds besides the items of a dict."""
    slots = [field.name for field in fields(held)] if is_dataclass(held) else []
    return dict.fromkeys([*(name for name in slots if hasattr(held, name)), *getattr(held, "__dict__", {})])


def _apart(record: Record) -> tuple[list[Any], _Kind]:
    return list(record.values), record.kind


def _apart_with_keys(record: Record) -> tuple[list[tuple[Any, Any]], _Kind]:
    keys = [*map(MappingKey, record.kind.items), *map(GetAttrKey, record.kind.attributes)]
    return list(zip(keys, record.values, strict=True)), record.kind


def _together(values: Iterable[Any], kind: _Kind) -> Any:
    """An object of the user's class, made without ``__init__``, which may want other arguments or do more."""
    remaining = iter(values)
    held: Any = kind.cls.__new__(kind.cls)  # type: ignore[call-overload]
    write = OrderedDict.__setitem__ if isinstance(held, OrderedDict) else dict.__setitem__
    for key in kind.items:
        write(held, key, next(remaining))
    for name in kind.attributes:
        object.__setattr__(held, name, next(remaining))
    return held


register_pytree_node(Record, _apart, _together, flatten_with_keys_fn=_apart_with_keys)
