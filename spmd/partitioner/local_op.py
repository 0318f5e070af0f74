"""One op on this rank's parts: their placements and shapes, and the values of its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from passes import Axis, Mesh
from passes.ir.program import Placements

from ..placements import OwnRows
from ..rules import Info, LocalPart, OpCall, Option, iota_dim_of, parts_of, positions_of
from ..rules.factories import makes_zeros
from .assignment import Choice
from .redistribution_steps import Traffic
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
    def body(self) -> tuple[Axis, Option] | None:
        """The axis and the option that has ops of its own for a rank to compute instead of the op itself."""
        pairs = zip(self.mesh.axes, self.choice.options, strict=True)
        found = [(axis, option) for axis, option in pairs if option.local is not None]
        # What computes on a rank's own rows does so over all axes; that of experts, the last, knows their weights, too.
        return next((pair for pair in reversed(found) if _has_own_rows(pair[1])), found[0] if found else None)

    @property
    def sends(self) -> list[Traffic]:
        """The collectives of the ops of its own."""
        sends = None if self.body is None else self.body[1].sends
        if self.body is None or sends is None:
            return []
        axis = self.body[0]
        sent = sends(replace(self.call, size=axis.size), self.operand_parts, self.result_parts)
        return [Traffic(each.kind, axis.name, each.nbytes) for each in sent]

    def values(self, held: Sequence[Any], batch: frozenset[int], is_weight: bool) -> Any:
        """The results that ``held`` computes, one a result: a ``Value``, or a tuple of them."""
        val = self.node.meta["val"]
        if isinstance(val, torch.Tensor):
            (placement,) = self.gives
            value = Value.of(self.node, val, placement, held[0], batch, iota_dim_of(self.call), is_weight)
            value.positions = positions_of(self.call)
            if makes_zeros(self.call):
                value.nodes |= dict.fromkeys(_as_sums(placement), held[0])
            return value
        return tuple(
            Value.of(self.node, whole, placement, item, batch, is_weight=is_weight)
            if isinstance(whole, torch.Tensor)
            else item
            for whole, placement, item in zip(val, self.gives, held, strict=True)
        )

    @cached_property
    def operand_parts(self) -> list[LocalPart | None]:
        """This rank's part of each operand."""
        return parts_of(self.call.operands, self.reads, self.mesh)

    @cached_property
    def result_parts(self) -> list[LocalPart | None]:
        """This rank's part of each result, None for anything but a tensor."""
        return parts_of(self.call.results, self.gives, self.mesh)

    @property
    def placed_operands(self) -> list[Placed]:
        """The global shape and placement of each operand."""
        return _placed(self.call.operands, self.reads)

    @property
    def placed_results(self) -> list[Placed]:
        """The global shape and placement of each result."""
        return _placed(self.call.results, self.gives)


def _has_own_rows(option: Option) -> bool:
    return any(isinstance(p, OwnRows) for p in (*option.operands, *option.results))


Placed = tuple[tuple[int, ...], Placements]
"""The global shape of a tensor, and its placement."""


def _placed(infos: Sequence[Info | None], placements: Sequence[Any]) -> list[Placed]:
    return [(info.shape, p) for info, p in zip(infos, placements, strict=True) if info is not None]


def _as_sums(placement: Any) -> Iterator[Placements]:
    """``placement``, and all that has a sum instead of some replicas: zeros are a sum of zeros."""
    return product(*([p, Partial("sum")] if isinstance(p, Replicate) else [p] for p in placement))
