"""Gradient memory: where steps put the gradients that they leave behind at each call, the same memory at every call.

A program computes gradients in planned memory while those of the call before are still there, which a call that fails
leaves as they are. Once state may be written and the parameters have let go of the old ones, the new ones are copied
over them. Memory that anybody else has a look at (a tensor, a view of it, an array, a capsule, another process) is
theirs from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import copy_each, storage_use_count


@dataclass(frozen=True, eq=False)
class _Memory:
    """The memory of a gradient that lies ``layout``; nothing but this tensor refers to it while it is free."""

    layout: Any
    tensor: torch.Tensor
    bytes: int

    @property
    def is_free(self) -> bool:
        """Whether nobody else refers to the memory, here or in another process, or has freed it or made it longer."""
        is_sent = self.tensor.device.type == "cpu" and self.tensor.is_shared()
        is_whole = self.tensor.untyped_storage().nbytes() == self.bytes
        return storage_use_count(self.tensor) == 1 and is_whole and not is_sent


class GradientMemory:
    """The memory of gradients, by parameter; the programs of a step share it."""

    def __init__(self) -> None:
        self._kept: dict[int, _Memory] = {}  # by the id of a parameter: that of one that is gone may be taken over

    def filled(
        self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor], layouts: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The gradients of ``parameters``, copies of ``values``, which lie ``layouts``."""
        memory = list(map(self._of, parameters, values, layouts))
        copy_each(memory, values)
        return [each.detach() for each in memory]

    def _of(self, parameter: torch.Tensor, value: torch.Tensor, layout: Any) -> torch.Tensor:
        kept = self._kept.get(id(parameter))
        if kept is None or kept.layout != layout or not kept.is_free:
            tensor = torch.empty_like(value)
            kept = self._kept[id(parameter)] = _Memory(layout, tensor, tensor.untyped_storage().nbytes())
        return kept.tensor

    def release(self) -> None:
        """Let go of all memory; what parameters have stays theirs."""
        self._kept.clear()
