"""Traced values, in the graph of the trace that runs."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import FakeTensor, tree_flatten

_PLAIN: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def is_traced(value: Any) -> bool:
    """Whether the graph computes ``value``."""
    return isinstance(value, (torch.Tensor, torch.SymFloat, torch.SymInt))


def holds_fakes(value: Any) -> bool:
    """Whether there is a fake or a symbolic number anywhere in nested lists, tuples and dicts."""
    return any(isinstance(leaf, (FakeTensor, torch.SymFloat, torch.SymInt)) for leaf in tree_flatten(value)[0])


def holds_traced(value: Any) -> bool:
    """Whether there is a traced value anywhere in nested lists, tuples and dicts."""
    return any(is_traced(leaf) for leaf in tree_flatten(value)[0])


def known_number(value: Any) -> Any:
    """The value of a symbolic number, for which the step is compiled then; all else as it is."""
    plain = _PLAIN.get(type(value))
    return value if plain is None else plain(value)


def is_instance(value: Any, kinds: Any) -> bool:
    """``isinstance`` for the user's code: a number that the graph computes is one of Python's in each call."""
    plain = _PLAIN.get(type(value))
    return isinstance(value, kinds) or (plain is not None and issubclass(plain, kinds))
