"""The ranks of a mesh, and the axes along which one of them meets another: messages about a rank name both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Members:
    """``ranks``: of the mesh, in its order. ``axes``: name and size of each of its axes that has several ranks."""

    ranks: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]

    def axes_to(self, others: Iterable[int]) -> str:
        """The axes along which this rank and one of the ``others`` differ, as text: ``"dp and tp"``, or ``""``."""
        own, differ = self._coordinates(dist.get_rank()), set[int]()
        for other in others:
            differ |= {k for k, (a, b) in enumerate(zip(own, self._coordinates(other), strict=True)) if a != b}
        return " and ".join(self.axes[k][0] for k in sorted(differ))

    def _coordinates(self, rank: int) -> list[int]:
        number, found = self.ranks.index(rank), []
        for _, size in reversed(self.axes):
            number, coordinate = divmod(number, size)
            found.append(coordinate)
        return found[::-1]
