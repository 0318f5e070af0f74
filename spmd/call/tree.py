"""Flatten nested arguments and results: torch's pytrees, extended by dataclasses and subclasses of dict and UserDict.

torch's pytrees treat objects of unknown classes as leaves. Here a ``Record`` replaces each object that holds values by
name; unflattening makes an object of the same class.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterable, Sequence
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
class _Structure:
    """Equal for records of the same structure."""

    cls: type
    items: tuple[Any, ...]  # keys of a subclass of dict or UserDict
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """An object of the user's that holds values by name."""

    structure: _Structure
    values: tuple[Any, ...]

    @classmethod
    def of(cls, held: Any) -> Record:
        """The record of ``held``, and of the objects in it."""
        items = items_of(held)
        attributes = {name: getattr(held, name) for name in attributes_of(held)}
        values = tuple(with_records(value) for value in (*items.values(), *attributes.values()))
        return cls(_Structure(type(held), tuple(items), tuple(attributes)), values)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of ``tree``, and the spec that unflattens them."""
    leaves, spec = tree_flatten(tree)
    return tree_flatten(with_records(tree)) if any(map(_is_record, leaves)) else (leaves, spec)


def flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """The leaves of ``tree``, each with its path, and the spec."""
    paths, spec = tree_flatten_with_path(tree)
    return tree_flatten_with_path(with_records(tree)) if any(_is_record(leaf) for _, leaf in paths) else (paths, spec)


def paths_of(spec: TreeSpec) -> list[str]:
    """The path of each leaf, in order; dicts with the same entries in another order have the same paths."""
    if spec.is_leaf():
        return [""]
    pairs = zip(_entries(spec), spec.children(), strict=True)
    return [f".{entry}{rest}" for entry, child in pairs for rest in paths_of(child)]


def _entries(spec: TreeSpec) -> Sequence[Any]:
    """The path entry of each child: the name of an attribute, a key or an index."""
    context = spec.context
    if isinstance(context, _Structure):
        return [*context.items, *context.attributes]
    if isinstance(context, type):  # torch's spec of a namedtuple has ``namedtuple`` itself, a function, for its type
        return getattr(context, "_fields", ())
    if issubclass(spec.type, defaultdict):
        context = context[1]  # after the factory
    is_dict = issubclass(spec.type, dict) and isinstance(context, list) and len(context) == spec.num_children
    return context if is_dict else range(spec.num_children)


def with_records(tree: Any) -> Any:
    """``tree`` with a ``Record`` instead of each object that holds values by name."""
    return tree_map(lambda leaf: Record.of(leaf) if _is_record(leaf) else leaf, tree)


def _is_record(leaf: Any) -> bool:
    if is_dataclass(leaf):
        return not isinstance(leaf, (type, nn.Module, torch.optim.Optimizer, torch.Tensor))
    return isinstance(leaf, (dict, UserDict))


def items_of(held: Any) -> dict[Any, Any]:
    """The items of a dict or UserDict; of another object none."""
    if isinstance(held, UserDict):
        return dict(vars(held)["data"])
    return dict(held) if isinstance(held, dict) else {}


def attributes_of(held: Any) -> Iterable[str]:
    """The names of the values that ``held`` has besides the items of a dict."""
    if isinstance(held, UserDict):
        return [name for name, value in vars(held).items() if name != "data" and not _is_opaque(value)]
    slots = [field.name for field in fields(held)] if is_dataclass(held) else []
    return dict.fromkeys([*(name for name in slots if hasattr(held, name)), *getattr(held, "__dict__", {})])


def _is_opaque(value: Any) -> bool:
    """Whether a value is an object without content, equal only to itself, or a list with one.

    A batch of a tokenizer notes such objects beside the tensors, other ones for each batch. The step does not see them,
    since a program would keep those that it was traced with.
    """
    if isinstance(value, (list, tuple)):
        return any(map(_is_opaque, value))
    has_content = value is None or _is_record(value) or isinstance(value, (torch.Tensor, torch.optim.Optimizer))
    if has_content or callable(value):
        return False
    return type(value).__eq__ is object.__eq__  # type: ignore[comparison-overlap]


def _flatten_record(record: Record) -> tuple[list[Any], _Structure]:
    return list(record.values), record.structure


def _flatten_record_with_keys(record: Record) -> tuple[list[tuple[Any, Any]], _Structure]:
    keys = [*map(MappingKey, record.structure.items), *map(GetAttrKey, record.structure.attributes)]
    return list(zip(keys, record.values, strict=True)), record.structure


def _unflatten_record(values: Iterable[Any], structure: _Structure) -> Any:
    """An object of the user's class, made without ``__init__``, which may take other arguments or do more."""
    remaining = iter(values)
    held: Any = structure.cls.__new__(structure.cls)  # type: ignore[call-overload]
    items = held
    if isinstance(held, UserDict):
        items = {}
        object.__setattr__(held, "data", items)
    write = OrderedDict.__setitem__ if isinstance(items, OrderedDict) else dict.__setitem__
    for key in structure.items:
        write(items, key, next(remaining))
    for name in structure.attributes:
        object.__setattr__(held, name, next(remaining))
    return held


register_pytree_node(Record, _flatten_record, _unflatten_record, flatten_with_keys_fn=_flatten_record_with_keys)
