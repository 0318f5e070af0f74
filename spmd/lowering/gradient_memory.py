"""Gradient memory: where steps put the gradients that they leave behind at each call, the same memory at every call.

A program computes gradients in planned memory while those of the call before are still there, which a call that fails
leaves as they are. Once state may be written and the parameters have let go of the old ones, the new ones are copied
over them. Memory that anybody else has a look at (a tensor, a view of it, an array, a capsule, another process) is
theirs from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import WatchedMemory, copy_each


class GradientMemory:
    """The memory of gradients, by parameter; the programs of a step share it."""

    def __init__(self) -> None:
        # By the id of a parameter, and laid out so: that of one that is gone may be taken over.
        self._kept: dict[int, tuple[Any, WatchedMemory]] = {}

    def filled(
        self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor], layouts: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The gradients of ``parameters``, copies of ``values``, which lie ``layouts``."""
        memory = list(map(self._of, parameters, values, layouts))
        copy_each(memory, values)
        return [each.detach() for each in memory]

    def _of(self, parameter: torch.Tensor, value: torch.Tensor, layout: Any) -> torch.Tensor:
        laid_out, memory = self._kept.get(id(parameter), (None, None))
        if memory is None or laid_out != layout or not memory.is_free:
            memory = WatchedMemory(torch.empty_like(value))
            self._kept[id(parameter)] = layout, memory
        return memory.tensor

    def release(self) -> None:
        """Let go of all memory; what parameters have stays theirs."""
        self._kept.clear()
