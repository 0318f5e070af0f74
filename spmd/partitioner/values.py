"""What the partitioner knows of a global value, and how it reads the operands and results of a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from passes import Mesh
from passes.ir.program import Placements

from .._torch import tree_flatten
from ..rules import Info
from .redistribute import total_cost


@dataclass
class Value:
    """One global value: the nodes of this rank's graph that hold it, by placement.

    ``source`` is its node in the global graph; ``primary`` the placement it was computed in; ``batch`` the mesh axes
    over which ``primary`` splits it because some argument of the step is split there: its rows are those of the batch.
    ``iota_dim`` is the dim along which it is known to hold 0, 1, 2, ...; ``weights`` whether it is made of parameters
    alone.
    """

    source: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    primary: Placements
    forms: dict[Placements, fx.Node]
    batch: frozenset[int] = frozenset()
    iota_dim: int | None = None
    weights: bool = False

    @classmethod
    def of(
        cls,
        source: fx.Node,
        val: torch.Tensor,
        placement: Placements,
        node: fx.Node,
        batch: frozenset[int],
        iota_dim: int | None = None,
        weights: bool = False,
    ) -> Value:
        """A value that ``node`` holds in ``placement``; ``val`` is the global one."""
        node.meta["placement"] = placement
        split = frozenset(k for k, p in enumerate(placement) if isinstance(p, Shard))
        return cls(source, tuple(val.shape), val.dtype, placement, {placement: node}, batch & split, iota_dim, weights)

    def batch_in(self, placement: Placements) -> frozenset[int]:
        """The axes over which ``placement`` keeps the rows of the batch where they are."""
        return frozenset(k for k in self.batch if placement[k] == self.primary[k])

    @property
    def info(self) -> Info:
        """Global shape and dtype, and what it counts."""
        return Info(self.shape, self.dtype, self.iota_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return self.info.nbytes

    def bytes_before(self, form: Placements, axis: int, mesh: Mesh) -> float:
        """Bytes of what ``form`` leaves on a rank when the axis at ``axis`` splits nothing."""
        nbytes = float(self.nbytes)
        for k, placement in enumerate(form):
            if k != axis and isinstance(placement, Shard):
                nbytes /= mesh.axes[k].size
        return nbytes

    def move(self, placement: Placements, node: fx.Node) -> None:
        """From here on ``node`` holds it, in ``placement``, and nobody takes it from where it was."""
        self.primary, self.forms = placement, {placement: node}

    def nearest(self, placement: Placements, mesh: Mesh) -> Placements:
        """The form from which ``placement`` costs least."""
        return min(self.forms, key=lambda form: total_cost(form, placement, self.nbytes, mesh))


def leaves(node: fx.Node) -> list[Any]:
    """The arguments of a node, flat: nodes and plain values."""
    flat: list[Any] = tree_flatten((node.args, node.kwargs))[0]
    return flat


def results(val: Any) -> list[Any]:
    """What a node returns, as a list."""
    return list(val) if isinstance(val, (tuple, list)) else [val]


def infos(vals: Sequence[Any]) -> tuple[Info | None, ...]:
    """An ``Info`` for each tensor."""
    return tuple(Info(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in vals)
