"""Lookahead: the cost of an op's result to its users, and of the op's backward.

The option that costs one op least can cost the next ops more: a product that leaves every rank with a summand moves
nothing, but a sum that is larger than its factors costs more to reduce than moving them would have. So where a choice
communicates, or leaves a sum pending, its cost includes what follows: the users, a few ops deep, each by its own
cheapest option; and, in forward, the gradients, whose moves mirror those of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Mesh, Phase
from passes.ir.ops import Trait, has

from .._torch import OpOverload
from ..capture.constraint import CONSTRAIN, constrained_to
from ..rules import Info, Option
from .option_costs import move_cost
from .options import Options
from .redistribution_steps import cost
from .values import Value, call_of, infos, leaves, results

_DEPTH = 4  # ops, views not counted
_USERS = 6  # of one value that are looked at
_MANY = 16  # operands, of which each cost is looked up once


@dataclass
class Lookahead:
    """Costs to come along one axis: an estimate on global shapes, the same one on every rank.

    The values that follow are taken to be split over the other axes as the value at hand, of which those leave a
    ``share``.
    """

    mesh: Mesh
    options: Options
    values: Mapping[fx.Node, Any]  # of the nodes visited so far
    differentiated: frozenset[int]  # the numbers of forward ops whose results have gradients
    _memo: dict[Any, float] = field(default_factory=dict)
    _reads: dict[tuple[fx.Node, int], _Reads] = field(default_factory=dict)

    def of(self, node: fx.Node, operands: Sequence[Value], option: Option, axis: int, share: float) -> float:
        """The cost of everything that follows if ``node`` is computed by ``option``."""
        after = self._users(node, _Along(axis, self.mesh.axes[axis], share), option.results[0], _DEPTH)
        return after + self._backward(node, operands, option, axis)

    def _users(self, node: fx.Node, along: _Along, placement: Placement | None, depth: int) -> float:
        """The cost of the users of ``node``, whose first result has ``placement``: it is moved once to each goal."""
        key = (node, along, placement, depth)
        if key not in self._memo:
            cheapest = [self._cheapest(user, node, along, placement, depth) for user in list(node.users)[:_USERS]]
            moves = {goal: moved for goal, moved, _ in cheapest}
            self._memo[key] = sum(moves.values()) + sum(after for _, _, after in cheapest)
        return self._memo[key]

    def _cheapest(
        self, user: fx.Node, node: fx.Node, along: _Along, placement: Placement | None, depth: int
    ) -> tuple[Placement | None, float, float]:
        """For one user: the placement in which it reads ``node``, the cost of that move, and all other costs."""
        nbytes = _nbytes(node)
        if user.target is getitem:
            first = user.args[1] == 0
            return placement, 0.0, self._users(user, along, placement, depth) if first else 0.0
        if not isinstance(user.target, OpOverload) or user in self.values or placement is None:
            return placement, 0.0, 0.0
        if user.target is CONSTRAIN:
            goal = constrained_to(user, (placement,) * len(self.mesh.axes), self.mesh)[along.index]
            return goal, along.move(placement, goal, nbytes), self._users(user, along, goal, depth)
        if depth == 0 or not any(infos(results(user.meta.get("val")))):
            # A sum that is still pending will be reduced, at the least to parts.
            left = along.move(placement, Shard(0), nbytes) if isinstance(placement, Partial) else 0.0
            return Shard(0), left, 0.0
        return min(self._by_option(user, node, along, placement, depth), key=lambda each: each[1] + each[2])

    def _by_option(
        self, user: fx.Node, node: fx.Node, along: _Along, placement: Placement, depth: int
    ) -> Iterator[tuple[Placement, float, float]]:
        """For each option of a user: the same as ``_cheapest``."""
        for option, position, others in self._options(user, node, along.index):
            goal = option.operands[position]
            after = self._users(user, along, option.results[0], depth - (not has(user.target, Trait.VIEW)))
            yield goal, along.move(placement, goal, _nbytes(node)), others + after

    def _options(self, user: fx.Node, node: fx.Node, axis: int) -> Iterator[tuple[Option, int, float]]:
        """The options of a user, the position of ``node`` among its operands, and the cost of the other operands."""
        if (user, axis) not in self._reads:
            self._reads[user, axis] = _Reads.of(user, self.options, axis)
        reads = self._reads[user, axis]
        others = reads.costs(self.values, lambda value, p: move_cost(value, p, axis, self.mesh, may_join=True))
        for option, cost_of_others in zip(reads.options, others, strict=True):
            yield option, reads.tensors.index(node), cost_of_others

    def _backward(self, node: fx.Node, operands: Sequence[Value], option: Option, axis: int) -> float:
        """The cost of reducing gradients: a replicated operand of a split result has summands of its gradient."""
        if node.meta.get("phase") is not Phase.FORWARD or not isinstance(option.results[0], Shard):
            return 0.0
        placed = zip(operands, option.operands, strict=True)
        replicated = [value for value, p in placed if p == Replicate() and self._has_gradient(value)]
        sizes = [(value.primary, value.bytes_before(value.primary, axis, self.mesh)) for value in replicated]
        return sum(cost(Partial(), primary[axis], nbytes, self.mesh.axes[axis]) for primary, nbytes in sizes)

    def _has_gradient(self, value: Value) -> bool:
        origin = value.source.meta.get("origin")
        return value.is_weight or (origin is not None and origin.number in self.differentiated)


@dataclass
class _Reads:
    """The operands of a user and its options along one axis, which each of its operands asks for.

    A concatenation of many parts has as many that ask: what the others cost is then added up once, as they come.
    """

    tensors: list[fx.Node]
    options: list[Option]
    _counted: int = 0  # of the tensors, in order
    _sums: list[float] = field(default_factory=list)  # of their costs, by option

    @classmethod
    def of(cls, user: fx.Node, options: Options, axis: int) -> _Reads:
        """The reads of a node that has not been visited."""
        tensors = [leaf for leaf in leaves(user) if any(infos([leaf.meta.get("val")]))]
        listed = options.along(call_of(user), axis)
        return cls(tensors, listed, 0, [0.0] * len(listed))

    def costs(self, values: Mapping[fx.Node, Any], cost_of: Callable[[Value, Placement], float]) -> list[float]:
        """For each option the cost of the operands that are there already."""
        if len(self.tensors) > _MANY:
            while self._counted < len(self.tensors) and self.tensors[self._counted] in values:
                self._sums = self._added(self._sums, self._counted, values, cost_of)
                self._counted += 1
            return self._sums
        sums = [0.0] * len(self.options)
        for k in range(len(self.tensors)):
            sums = self._added(sums, k, values, cost_of)
        return sums

    def _added(
        self, sums: list[float], k: int, values: Mapping[fx.Node, Any], cost_of: Callable[[Value, Placement], float]
    ) -> list[float]:
        value = values.get(self.tensors[k])
        if not isinstance(value, Value):
            return sums
        return [total + cost_of(value, option.operands[k]) for total, option in zip(sums, self.options, strict=True)]


@dataclass(frozen=True)
class _Along:
    """One mesh axis, and the share of a value that the other axes leave a rank."""

    index: int
    axis: Axis = field(compare=False)
    share: float

    def move(self, source: Placement, target: Placement, nbytes: float) -> float:
        """The cost of moving a value that has ``nbytes`` as a whole."""
        return cost(source, target, nbytes * self.share, self.axis, may_become_sum=True)


def _nbytes(node: fx.Node) -> float:
    first: Info | None = infos(results(node.meta.get("val")))[0]
    return float(first.nbytes) if first is not None else 0.0
