"""Tensors that a step keeps with their graph: what a compiled step writes instead has none.

Such a tensor can be looked at. A step that computes with it would lose the gradient that the plain step has there, so
that is refused.
"""

from __future__ import annotations

from typing import Any

import torch

_MARK = "_spmd_lost_graph"


def mark(value: Any) -> None:
    """Note that the plain step would have a graph here."""
    if isinstance(value, torch.Tensor):
        setattr(value, _MARK, True)


def has_lost_graph(value: Any) -> bool:
    """Whether a value is such a tensor."""
    return isinstance(value, torch.Tensor) and _MARK in vars(value)
