"""The cost of an option along one mesh axis: its operands are moved, and its result may be more than its hint asks for.

All costs are seconds, estimated by the rate of the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, AxisRole, Mesh, Phase
from passes.ir.ops import Trait, has
from passes.ir.program import Placements

from ..placements import ByGroup, OwnRows
from ..rules import OpCall, Option, parts_of
from ..rules.attention import is_attention
from .experts.whole_parts import is_one_cut
from .redistribution_steps import cost, cost_outside_runs
from .values import Value

# Users split the model's weights as they want them; a weight is moved only if nothing else is possible.
_ZEROS_LIKE = torch.ops.aten.zeros_like.default
_WEIGHT_STAYS = 1000.0


@dataclass(frozen=True)
class OptionCosts:
    """The costs of the options of one call along the mesh axis at ``index``.

    ``hint``: the placement that the (first) result should have; ``on_model``: whether the axis splits the model;
    ``experts``: the axes along which ranks have other experts.
    """

    mesh: Mesh
    index: int
    on_model: bool
    call: OpCall
    operands: Sequence[Value]
    hint: Placements | None
    phase: Phase | None
    experts: frozenset[int] = frozenset()

    @property
    def axis(self) -> Axis:
        """The mesh axis."""
        return self.mesh.axes[self.index]

    def of(self, option: Option) -> float:
        """The cost of ``option`` in this op alone; what follows is in ``lookahead.py``."""
        # A sum that came in is reduced before something whole is added to it; one that begins here takes the bias in.
        may_join = self.phase is Phase.BACKWARD or (
            self.on_model and any(isinstance(p, Shard) for p in option.operands)
        )
        placed = list(zip(self.operands, option.operands, strict=True))
        moves = [self._moved(value, p, may_join) for value, p in placed]
        total = sum(moves)
        if self.on_model:
            follows_hint = self.hint is not None and option.results[0] == self.hint[self.index]
            pairs = zip(placed, moves, strict=True)
            total += sum(self._surcharge(value, p, moved, follows_hint) for (value, p), moved in pairs)
        elif self.index in self.experts:
            pairs = zip(placed, moves, strict=True)
            total += sum(_WEIGHT_STAYS * moved for (value, _), moved in pairs if value.is_weight)
        elif self.experts and self._divides_experts(option):
            total += _WEIGHT_STAYS * self.axis.rate.latency
        return total + self._missed_hint(option) + self._own(option)

    def _moved(self, value: Value, placement: Placement, may_join: bool) -> float:
        """The cost of one operand. Zeros are made as a sum to which rows are added, which is reduced later."""
        if self.experts and _made_where_read(value, placement):
            return 0.0
        if not may_join and isinstance(placement, Partial) and is_made_as_sum(value):
            nbytes = value.bytes_before(value.primary, self.index, self.mesh)
            gathers = all(axis.of_ranks for axis in self.mesh.axes)  # micro-batches cannot
            as_sum = cost(placement, Replicate(), nbytes, self.axis) if gathers else 0.0
            return min(as_sum, move_cost(self._held(value), placement, self.index, self.mesh, may_join))
        return move_cost(self._held(value), placement, self.index, self.mesh, may_join)

    def _divides_experts(self, option: Option) -> bool:
        """Whether the dim of experts, which another axis splits, would be split along this one, too."""
        placed = [
            (value.primary, p) for value, p in zip(self.operands, option.operands, strict=True) if value.is_weight
        ]
        hint, result = self.hint, option.results[0]
        placed += [(hint, result)] if hint is not None and result not in (None, hint[self.index]) else []
        return any(isinstance(p, Shard) and p == whole[k] for whole, p in placed for k in self.experts - {self.index})

    def _held(self, value: Value) -> Value:
        """``value`` as it counts for a read: of a sequence that ranks split, no copy made for an op.

        One op that needs all rows, such as a shift of labels, is no reason for every rank to compute all rows of the
        next ops. Attention gathers for its backward, too.
        """
        split = AxisRole.SEQUENCE in self.axis.roles and isinstance(value.primary[self.index], Shard)
        if not split or is_attention(self.call):
            return value
        return replace(value, nodes={value.primary: value.nodes.get(value.primary)})

    def _own(self, option: Option) -> float:
        """The cost of what an option communicates by itself, on parts along this axis alone."""
        if option.sends is None:
            return 0.0
        mesh, call = Mesh((self.axis,)), replace(self.call, size=self.axis.size)
        operands = parts_of(call.operands, [(p,) for p in option.operands], mesh)
        results = parts_of(call.results, [(p,) for p in option.results], mesh)
        return sum(self.axis.rate.seconds(sent.nbytes) for sent in option.sends(call, operands, results))

    def _surcharge(self, value: Value, placement: Placement, moved: float, follows_hint: bool) -> float:
        """A further cost of a move over an axis of the model: weights stay, and an unhinted split is undone."""
        if moved < self.axis.rate.latency:
            return 0.0
        if value.is_weight:
            return _WEIGHT_STAYS * moved
        others = (x for x in self.operands if x is not value and not x.is_weight)
        other_split = any(isinstance(x.primary[self.index], Shard) for x in others)
        if follows_hint or other_split or not isinstance(placement, Shard):
            return 0.0
        nbytes = min(value.bytes_before(source, self.index, self.mesh) for source in value.nodes)
        return cost(placement, Replicate(), nbytes, self.axis)

    def _missed_hint(self, option: Option) -> float:
        """The cost of building more than this rank's part of a result that should be split."""
        result = option.results[0]
        info, goal = self.call.results[0], self.hint[self.index] if self.hint is not None else None
        if isinstance(goal, OwnRows) and info is not None and result is not None:
            return cost(result, goal, info.nbytes, self.axis)
        if not isinstance(goal, Shard) or info is None or result == goal:
            return self._pending_rows(option)
        if isinstance(result, Partial):  # the gradient of an expert is complete where the expert is
            return cost(result, goal, info.nbytes, self.axis) if self.index in self.experts else 0.0
        return info.nbytes * self.axis.rate.per_byte

    def _pending_rows(self, option: Option) -> float:
        """The cost of a sum that puts the rows of experts back, where they could go to their ranks instead."""
        info, result = self.call.results[0], option.results[0]
        own = [value.primary[self.index] for value in self.operands]
        can_go = any(isinstance(p, ByGroup) and p.room is not None for p in own)
        if self.index not in self.experts or not can_go or info is None or not isinstance(result, Partial):
            return 0.0
        return cost(result, Shard(0), info.nbytes, self.axis)


def is_made_as_sum(value: Value) -> bool:
    """Whether a value is zeros that each rank has whole: summed over ranks they are zeros, too."""
    return has(value.source.target, Trait.ZEROS) and all(p == Replicate() for p in value.primary)


def _made_where_read(value: Value, placement: Placement) -> bool:
    """Whether zeros are made anew in a placement, rather than moved (``materialize.py``)."""
    plain = all(type(p) in (Shard, Replicate) for p in value.primary)
    return plain and value.source.target is _ZEROS_LIKE and isinstance(placement, (Partial, Replicate))


def move_cost(value: Value, placement: Placement, index: int, mesh: Mesh, may_join: bool) -> float:
    """The least cost of having a value in ``placement`` along one axis; ``may_join``: a whole may become a sum."""
    axis, may_join = mesh.axes[index], may_join and value.dtype.is_floating_point
    if any(is_one_cut(source[index], placement, index, mesh) for source in value.nodes):
        return 0.0
    return min(
        _cost_from(source[index], step, value.bytes_before(source, index, mesh), axis, may_join)
        + cost_outside_runs(source, step, index, mesh)
        for source in value.nodes
        for step in [Replicate() if _goes_by_replicas(source[index], placement, value.shape, axis) else placement]
    )


def _goes_by_replicas(source: Placement, target: Placement, shape: Sequence[int], axis: Axis) -> bool:
    """Whether a split along another dim is made from the whole, since either does not cut into equal parts."""
    if type(source) is Replicate or not isinstance(source, Shard) or not isinstance(target, Shard):
        return False
    if source.dim == target.dim:
        return False
    return any(shape[p.dim] % axis.size for p in (source, target))


def _cost_from(source: Placement, target: Placement, nbytes: float, axis: Axis, may_join: bool) -> float:
    """The cost of a move. A small sum is not scattered: that saves no time, and its readers would have to gather it."""
    scatters = isinstance(source, Partial) and isinstance(target, Shard)
    gathered_later = axis.rate.per_byte * nbytes if scatters and axis.rate.is_small(nbytes) else 0.0
    return cost(source, target, nbytes, axis, may_join) + gathered_later
