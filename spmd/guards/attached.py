"""Attributes that the user has attached to parameters and buffers: nearly always none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..call.state import attached_to
from .equality import structurally_equal


@dataclass(frozen=True)
class Attached:
    """Attributes of tensors as they were; ``counts``: of all, torch's own too, which tell a new one at little cost."""

    counts: list[int]
    values: list[tuple[int, dict[str, Any]]]  # with the position of the tensor

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Attached:
        """The attributes now."""
        found = [(k, attributes) for k, tensor in enumerate(tensors) if (attributes := attached_to(tensor))]
        return cls(_counts(tensors), found)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all have the same attributes still."""
        if _counts(tensors) != self.counts:
            return False
        return all(structurally_equal(attached_to(tensors[k]), attributes) for k, attributes in self.values)


def _counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(len, map(vars, tensors)))
