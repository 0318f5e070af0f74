"""Global values and what holds them on this rank; operands and results of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import Mesh
from passes.ir.program import Placements

from ..placements import ByGroup, OwnRows
from ..rules import Info, OpCall
from .redistribution_steps import total_cost


@dataclass
class Value:
    """One global value, and what holds it by placement: nodes of this rank's graph, or a tally's ``Step``s.

    ``source`` is its node in the global graph; ``primary`` the placement it was computed in; ``batch`` the mesh axes
    over which ``primary`` splits it because some argument of the step is split there: its rows are those of the batch.
    ``iota_dim`` is the dim along which it is known to hold 0, 1, 2, ...; ``is_weight`` whether it is computed from
    parameters alone. ``group``: the rows of which it says whose they are. ``positions``, ``numbered``: see ``Info``.
    """

    source: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    primary: Placements
    nodes: dict[Placements, Any]
    batch: frozenset[int] = frozenset()
    iota_dim: int | None = None
    is_weight: bool = False
    group: ByGroup | None = None
    positions: Any = None
    numbered: int | None = None

    @classmethod
    def of(
        cls,
        source: fx.Node,
        val: torch.Tensor,
        placement: Placements,
        node: Any,
        batch: frozenset[int],
        iota_dim: int | None = None,
        is_weight: bool = False,
    ) -> Value:
        """A value that ``node`` holds in ``placement``; ``val`` is the global one."""
        split = frozenset(k for k, p in enumerate(placement) if isinstance(p, Shard))
        return cls(
            source, tuple(val.shape), val.dtype, placement, {placement: node}, batch & split, iota_dim, is_weight
        )

    def batch_in(self, placement: Placements) -> frozenset[int]:
        """The axes over which ``placement`` leaves the rows of the batch on their ranks."""
        return frozenset(k for k in self.batch if placement[k] == self.primary[k])

    @property
    def info(self) -> Info:
        """Global shape and dtype, and what is known of the elements."""
        return Info(self.shape, self.dtype, self.iota_dim, self.group, self.positions, self.numbered)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return self.info.nbytes

    def bytes_before(self, placement: Placements, axis: int, mesh: Mesh) -> float:
        """Bytes that ``placement`` leaves on a rank if it is replicated over the axis at ``axis``."""
        nbytes = float(self.nbytes)
        for k, entry in enumerate(placement):
            if k != axis and type(entry) is not Replicate and isinstance(entry, (Shard, OwnRows)):
                nbytes /= mesh.axes[k].size
        return nbytes

    def move(self, placement: Placements, node: Any) -> None:
        """Let ``node`` alone hold the value from here on, in ``placement``."""
        self.primary, self.nodes = placement, {placement: node}

    def nearest(self, placement: Placements, mesh: Mesh) -> Placements:
        """The placement among ``nodes`` from which ``placement`` costs least."""
        return min(self.nodes, key=lambda source: total_cost(source, placement, self.nbytes, mesh))


def leaves(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments of a node, in order, each as often as it is read."""
    flat: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), flat.append)
    return flat


def results(val: Any) -> list[Any]:
    """The results of a node, as a list."""
    return list(val) if isinstance(val, (tuple, list)) else [val]


def infos(vals: Sequence[Any]) -> tuple[Info | None, ...]:
    """An ``Info`` for each tensor, None for anything else."""
    return tuple(Info(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in vals)


def call_of(node: fx.Node, ranks: int = 1) -> OpCall:
    """The call of a node that has not been visited, on global shapes, along an axis of ``ranks``."""

    def info(operand: fx.Node) -> Any:
        val = operand.meta.get("val")
        return next(iter(infos([val])), None) or val

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), info)
    operands = tuple(i for leaf in leaves(node) for i in infos([leaf.meta.get("val")]) if i is not None)
    target: Any = node.target
    return OpCall(target, args, kwargs, operands, infos(results(node.meta["val"])), ranks)
