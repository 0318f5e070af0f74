"""An op on this rank's parts: the nodes that compute it, and what its results are from then on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from passes.ir.program import Placements, is_sharded

from ..placements import local_shape, local_start, smallest_shape
from ..rules import Info, Local, LocalPart, OpCall, Option, iota_dim_of, localize_of
from ..rules.factories import makes_zeros
from .emit import Emitter
from .values import Value


@dataclass(frozen=True)
class OnParts:
    """One call of the global graph, computed as one option per mesh axis says."""

    emitter: Emitter
    node: fx.Node
    call: OpCall
    chosen: Sequence[Option]

    @cached_property
    def operands(self) -> list[Placements]:
        """Where each operand is taken."""
        return [tuple(option.operands[k] for option in self.chosen) for k in range(len(self.call.operands))]

    @cached_property
    def results(self) -> list[Any]:
        """The placement of each result; None for what is no tensor."""
        return [
            None if info is None else tuple(option.results[k] for option in self.chosen)
            for k, info in enumerate(self.call.results)
        ]

    @cached_property
    def from_zero(self) -> set[int]:
        """The positions of operands that must number this rank's own rows from 0."""
        return {k for option in self.chosen for k in option.from_zero}

    @cached_property
    def local(self) -> Local | None:
        """What a rank does in the place of the op, if one of the options along the axes says so."""
        return next((option.local for option in self.chosen if option.local is not None), None)

    def emit(self, args: Any, kwargs: Any) -> fx.Node:
        """The node of this rank that computes its part: the op on its parts, or what stands for it."""
        parts = [self._part(info, place) for info, place in zip(self.call.results, self.results, strict=True)]
        shapes = tuple(None if part is None else part.shape for part in parts)
        if self.local is not None:
            given = [self._part(info, place) for info, place in zip(self.call.operands, self.operands, strict=True)]
            new: fx.Node = self.local(self._run, self.call, args, given, parts)
        else:
            localize = localize_of(self.call.target)
            if localize is not None and any(is_sharded(place) for place in self.results if place is not None):
                args = localize(self.call, args, kwargs, shapes)
            new = self.emitter.op(self.node, args, kwargs, self.results)
        self.emitter.check(self.node, new, shapes)
        self._mark(new, *zip(self.call.results, self.results, strict=True))
        return new

    def values(self, new: fx.Node, batch: frozenset[int], weights: bool) -> Any:
        """What the results are now that ``new`` computes them: a ``Value``, or a tuple of them."""
        val = self.node.meta["val"]
        if isinstance(val, torch.Tensor):
            held = Value.of(self.node, val, self.results[0], new, batch, iota_dim_of(self.call), weights)
            if makes_zeros(self.call):
                held.forms |= dict.fromkeys(_as_sums(self.results[0]), new)
            return held
        items = [self._item(new, index) for index in range(len(val))]
        return tuple(
            Value.of(self.node, whole, place, item, batch, weights=weights) if isinstance(whole, torch.Tensor) else item
            for whole, place, item in zip(val, self.results, items, strict=True)
        )

    def _item(self, new: fx.Node, index: int) -> fx.Node:
        item = self.emitter.item(new, index)
        self._mark(item, (self.call.results[index], self.results[index]))
        return item

    def _mark(self, node: fx.Node, *held: tuple[Info | None, Any]) -> None:
        self.emitter.mark(node, *[(info.shape, place) for info, place in held if info is not None])

    def _run(self, target: Any, args: Any) -> fx.Node:
        node = self.emitter.call(target, args, {}, like=self.node)
        held = [
            *zip(self.call.operands, self.operands, strict=True),
            *zip(self.call.results, self.results, strict=True),
        ]
        if uneven := self.emitter.uneven(*[(info.shape, place) for info, place in held if info is not None]):
            node.meta["numbers"] = f"of {self.call.target} on {uneven}"  # such as how many rows this rank has
        return node

    def _part(self, info: Info | None, place: Placements) -> LocalPart | None:
        if info is None:
            return None
        of = (info.shape, place, self.emitter.mesh)
        return LocalPart(local_start(*of), local_shape(*of), smallest_shape(*of))


def _as_sums(placement: Placements) -> Iterator[Placements]:
    """``placement``, and all that has a sum in the place of some replicas: zeros are a sum of zeros."""
    return product(*([p, Partial("sum")] if isinstance(p, Replicate) else [p] for p in placement))
