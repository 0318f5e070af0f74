"""One op on this rank's parts: the nodes that compute it, and the values of its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from passes.ir.program import Placements, is_sharded

from ..placements import local_shape, local_start, smallest_shape
from ..rules import Info, Local, LocalPart, OpCall, Option, iota_dim_of, localize_of
from ..rules.factories import makes_zeros
from .emit import Emitter
from .values import Value


@dataclass(frozen=True)
class LocalOp:
    """One call of the global graph, computed by the options chosen for it, one per mesh axis."""

    emitter: Emitter
    node: fx.Node
    call: OpCall
    chosen: Sequence[Option]

    @cached_property
    def operand_placements(self) -> list[Placements]:
        """The placement in which each operand is read."""
        return [tuple(option.operands[k] for option in self.chosen) for k in range(len(self.call.operands))]

    @cached_property
    def result_placements(self) -> list[Any]:
        """The placement of each result; None for anything but a tensor."""
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
        """The ops that a rank computes instead of the op itself, if one of the options has some."""
        return next((option.local for option in self.chosen if option.local is not None), None)

    def emit(self, args: Any, kwargs: Any) -> fx.Node:
        """Emit the node that computes this rank's parts of the results."""
        parts = self._parts(self.call.results, self.result_placements)
        shapes = tuple(None if part is None else part.shape for part in parts)
        if self.local is not None:
            operand_parts = self._parts(self.call.operands, self.operand_placements)
            new: fx.Node = self.local(self._run, self.call, args, operand_parts, parts)
        else:
            localize = localize_of(self.call.target)
            if localize is not None and any(p is not None and is_sharded(p) for p in self.result_placements):
                args = localize(self.call, args, kwargs, shapes)
            new = self.emitter.op(self.node, args, kwargs, self.result_placements)
        self.emitter.check(self.node, new, shapes)
        self.emitter.mark(new, *self._placed_results)
        return new

    def values(self, new: fx.Node, batch: frozenset[int], is_weight: bool) -> Any:
        """The results that ``new`` computes: a ``Value``, or a tuple of them."""
        val = self.node.meta["val"]
        if isinstance(val, torch.Tensor):
            (placement,) = self.result_placements
            value = Value.of(self.node, val, placement, new, batch, iota_dim_of(self.call), is_weight)
            if makes_zeros(self.call):
                value.nodes |= dict.fromkeys(_as_sums(placement), new)
            return value
        items = [self._item(new, index) for index in range(len(val))]
        return tuple(
            Value.of(self.node, whole, placement, item, batch, is_weight=is_weight)
            if isinstance(whole, torch.Tensor)
            else item
            for whole, placement, item in zip(val, self.result_placements, items, strict=True)
        )

    def _item(self, new: fx.Node, index: int) -> fx.Node:
        item = self.emitter.item(new, index)
        self.emitter.mark(item, *_placed([self.call.results[index]], [self.result_placements[index]]))
        return item

    @property
    def _placed_results(self) -> list[tuple[tuple[int, ...], Placements]]:
        return _placed(self.call.results, self.result_placements)

    def _run(self, target: Any, args: Any) -> fx.Node:
        """Emit one of the ops that are computed instead of the op itself."""
        node = self.emitter.call(target, args, {}, like=self.node)
        placed = [*_placed(self.call.operands, self.operand_placements), *self._placed_results]
        if uneven := self.emitter.uneven(*placed):
            node.meta["numbers"] = f"of {self.call.target} on {uneven}"  # such as how many rows this rank has
        else:
            node.meta["numbers"] = f"of parts of {_split_lengths(placed)}"
        return node

    def _parts(self, infos: Sequence[Info | None], placements: Sequence[Any]) -> list[LocalPart | None]:
        """This rank's part of each tensor, None for anything else."""
        return [self._part(info, placement) for info, placement in zip(infos, placements, strict=True)]

    def _part(self, info: Info | None, placement: Placements) -> LocalPart | None:
        if info is None:
            return None
        placed = (info.shape, placement, self.emitter.mesh)
        return LocalPart(local_start(*placed), local_shape(*placed), smallest_shape(*placed))


def _placed(infos: Sequence[Info | None], placements: Sequence[Any]) -> list[tuple[tuple[int, ...], Placements]]:
    """The global shape and placement of each tensor."""
    return [(info.shape, p) for info, p in zip(infos, placements, strict=True) if info is not None]


def _split_lengths(placed: Sequence[tuple[tuple[int, ...], Placements]]) -> list[tuple[int, int]]:
    """The lengths that are split, each with its axis: they say with which row each rank starts."""
    return sorted({(shape[p.dim], k) for shape, places in placed for k, p in enumerate(places) if isinstance(p, Shard)})


def _as_sums(placement: Placements) -> Iterator[Placements]:
    """``placement``, and all that has a sum instead of some replicas: zeros are a sum of zeros."""
    return product(*([p, Partial("sum")] if isinstance(p, Replicate) else [p] for p in placement))
