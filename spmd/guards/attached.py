"""Attributes that the user has attached to tensors: nearly always none."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..call.state import attached_to
from .equality import structurally_equal

Attributes = dict[str, Any]


@dataclass(frozen=True)
class Attached:
    """Attributes of parameters and buffers as they were, as far as code that ran names them."""

    names: frozenset[str]  # that occur in code that ran
    values: dict[int, Attributes]  # by the position of the tensor; see ``named_of``

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], names: frozenset[str]) -> Attached:
        """The attributes now."""
        found = {k: attributes for k, tensor in enumerate(tensors) if (attributes := named_of(tensor, names))}
        return cls(names, found)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all have the same attributes still."""
        if not self.values:  # in bulk: split parameters have an attribute of torch's each
            return self.names.isdisjoint(set().union(*map(vars, tensors)))
        none: Attributes = {}
        return all(are_same(self.values.get(k, none), tensor, self.names) for k, tensor in enumerate(tensors))


def named_of(tensor: torch.Tensor, names: frozenset[str]) -> Attributes:
    """The attributes of a tensor that ``names`` has; weak references to what allows them, which is not kept alive."""
    return {name: _weak(value) for name, value in attached_to(tensor).items() if name in names}


def are_same(before: Attributes, tensor: torch.Tensor, names: frozenset[str]) -> bool:
    """Whether the attributes of a tensor are those that ``named_of`` returned before."""
    if names.isdisjoint(vars(tensor)):
        return not before
    now = {name: value for name, value in attached_to(tensor).items() if name in names}
    return now.keys() == before.keys() and all(_is_same(before[name], value) for name, value in now.items())


def described(attributes: Attributes) -> str:
    """``"scale=0.1, owner"``: values are shown that print as nothing of the user's runs."""
    return ", ".join(f"{name}={value!r}" if type(value) in _PLAIN else name for name, value in attributes.items())


_PLAIN = (str, int, float, complex, bytes, type(None))


def _weak(value: Any) -> Any:
    if isinstance(value, (*_PLAIN, tuple, list, dict, set)):
        return value
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, weakref.ref):
        return before() is now
    return structurally_equal(before, now)
