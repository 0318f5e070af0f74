"""One op on this rank's parts: their placements and shapes, and the values of its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from passes import Mesh
from passes.ir.program import Placements

from ..placements import local_shape, local_start, smallest_shape
from ..rules import Info, Local, LocalPart, OpCall, iota_dim_of
from ..rules.factories import makes_zeros
from .assignment import Choice
from .values import Value


@dataclass(frozen=True)
class LocalOp:
    """One call of the global graph, computed by the options chosen for it, one per mesh axis."""

    mesh: Mesh
    node: fx.Node
    call: OpCall
    choice: Choice

    @property
    def reads(self) -> tuple[Placements, ...]:
        """The placement in which each operand is read."""
        return self.choice.reads or ()

    @property
    def gives(self) -> tuple[Any, ...]:
        """The placement of each result; None for anything but a tensor."""
        return self.choice.gives or ()

    @cached_property
    def from_zero(self) -> set[int]:
        """The positions of operands that must number this rank's own rows from 0."""
        return {k for option in self.choice.options for k in option.from_zero}

    @cached_property
    def local(self) -> Local | None:
        """The ops that a rank computes instead of the op itself, if one of the options has some."""
        return next((option.local for option in self.choice.options if option.local is not None), None)

    def values(self, held: Sequence[Any], batch: frozenset[int], is_weight: bool) -> Any:
        """The results that ``held`` computes, one a result: a ``Value``, or a tuple of them."""
        val = self.node.meta["val"]
        if isinstance(val, torch.Tensor):
            (placement,) = self.gives
            value = Value.of(self.node, val, placement, held[0], batch, iota_dim_of(self.call), is_weight)
            if makes_zeros(self.call):
                value.nodes |= dict.fromkeys(_as_sums(placement), held[0])
            return value
        return tuple(
            Value.of(self.node, whole, placement, item, batch, is_weight=is_weight)
            if isinstance(whole, torch.Tensor)
            else item
            for whole, placement, item in zip(val, self.gives, held, strict=True)
        )

    def parts(self, infos: Sequence[Info | None], placements: Sequence[Placements | None]) -> list[LocalPart | None]:
        """This rank's part of each tensor, None for anything else."""
        return [self._part(info, placement) for info, placement in zip(infos, placements, strict=True)]

    def _part(self, info: Info | None, placement: Any) -> LocalPart | None:
        if info is None:
            return None
        placed = (info.shape, placement, self.mesh)
        return LocalPart(local_start(*placed), local_shape(*placed), smallest_shape(*placed))

    @property
    def placed_operands(self) -> list[Placed]:
        """The global shape and placement of each operand."""
        return _placed(self.call.operands, self.reads)

    @property
    def placed_results(self) -> list[Placed]:
        """The global shape and placement of each result."""
        return _placed(self.call.results, self.gives)


Placed = tuple[tuple[int, ...], Placements]
"""The global shape of a tensor, and its placement."""


def _placed(infos: Sequence[Info | None], placements: Sequence[Any]) -> list[Placed]:
    return [(info.shape, p) for info, p in zip(infos, placements, strict=True) if info is not None]


def _as_sums(placement: Any) -> Iterator[Placements]:
    """``placement``, and all that has a sum instead of some replicas: zeros are a sum of zeros."""
    return product(*([p, Partial("sum")] if isinstance(p, Replicate) else [p] for p in placement))
