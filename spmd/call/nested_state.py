"""Optimizer state in containers: ``state[p]["factors"] = [left, right]`` holds two tensors, each by its path.

State under a text is a dict of entries, or by itself what an entry is (``optimizer.state["last"] = gradient``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .._torch import tree_map

Path = tuple[Any, ...]  # indices and keys from an entry on


def is_nested(value: Any) -> bool:
    """Whether a value of optimizer state may hold others."""
    return isinstance(value, (list, tuple, dict))


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves of nested containers, each with its path; any other value by itself."""
    if not is_nested(value):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves_of(item, (*path, key))


def item_at(value: Any, path: Path) -> Any:
    """The item at a path; None if there is none."""
    for key in path:
        try:
            value = value[key]
        except (LookupError, TypeError):
            return None
    return value


def with_item(value: Any, path: Path, item: Any) -> Any:
    """``value`` with another item at a path: lists and dicts are written to, tuples are made anew."""
    if not path:
        return item
    key, *rest = path
    inner = with_item(value[key], tuple(rest), item)
    if not isinstance(value, tuple):
        value[key] = inner
        return value
    items = [*value[:key], inner, *value[key + 1 :]]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def with_fakes(value: Any, fakes: dict[int, torch.Tensor]) -> Any:
    """A value of state, in containers of its own, with fakes (by the id of the live tensor) in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return fakes.get(id(value), value)
    return tree_map(lambda leaf: fakes.get(id(leaf), leaf), value) if is_nested(value) else value


def tensors_in(entries: Any) -> Iterator[torch.Tensor]:
    """The tensors in all entries of a parameter, or of a text."""
    yield from (leaf for _, leaf in leaves_of(entries) if isinstance(leaf, torch.Tensor))


def flattened(entries: Iterable[Any]) -> Iterator[Any]:
    """All values of the state of parameters, and under texts, for guards: of containers the kind and the keys, too.

    A number in a container is compared; one that is an entry of its own is read anew at each call.
    """
    for entry in entries:
        if not isinstance(entry, dict):
            yield from _flattened(entry)
            continue
        yield tuple(entry)
        for value in entry.values():
            yield from _flattened(value) if is_nested(value) else (value,)


def _flattened(value: Any) -> Iterator[Any]:
    if is_nested(value):
        yield (type(value).__name__, *(value if isinstance(value, dict) else (len(value),)))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _flattened(item)
    else:
        yield value if isinstance(value, torch.Tensor) else (value,)
