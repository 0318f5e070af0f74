"""Looking ahead: what an op's result will cost those that use it, and what the op's backward will cost.

The cheapest way to one op can be dear for the next: a product that leaves every rank with a share of a sum moves
nothing, but a sum that is larger than its factors costs more to add up than to have moved them. So where a choice
communicates, or leaves a sum open, its cost counts what follows: users, a few ops deep, each taking its own cheapest
way; and, in forward, the gradients' way back, which mirrors the values' way there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from ..rules import Info, OpCall, Option
from .choose import Chooser
from .redistribute import cost
from .values import Value, infos, leaves, results

_DEPTH = 4  # ops, views not counted
_USERS = 6  # of one value that are looked at


@dataclass
class Ahead:
    """Costs to come along one axis: an estimate on global shapes, the same one on every rank.

    What follows is taken to be split over the other axes as the value at hand, of which they leave a ``share``.
    """

    mesh: Mesh
    chooser: Chooser
    values: Mapping[fx.Node, Any]  # of what the walk has visited
    differentiated: frozenset[int]  # the numbers of forward ops whose results have gradients
    _known: dict[Any, float] = field(default_factory=dict)

    def of(self, node: fx.Node, operands: Sequence[Value], option: Option, axis: int, share: float) -> float:
        """What ``option`` costs after it was taken for ``node``."""
        after = self._users(node, _Along(axis, self.mesh.axes[axis], share), option.results[0], _DEPTH)
        return after + self._backward(node, operands, option, axis)

    def _users(self, node: fx.Node, along: _Along, placement: Placement | None, depth: int) -> float:
        """What the users of ``node`` pay, given its first result in ``placement``: each new form is made once."""
        key = (node, along, placement, depth)
        if key not in self._known:
            ways = [self._cheapest(user, node, along, placement, depth) for user in list(node.users)[:_USERS]]
            moves = {goal: moved for goal, moved, _ in ways}
            self._known[key] = sum(moves.values()) + sum(after for _, _, after in ways)
        return self._known[key]

    def _cheapest(
        self, user: fx.Node, node: fx.Node, along: _Along, placement: Placement | None, depth: int
    ) -> tuple[Placement | None, float, float]:
        """For one user: where it wants ``node``, what that moves, and what is to pay besides and after."""
        nbytes = _nbytes(node)
        if user.target is getitem:
            first = user.args[1] == 0
            return placement, 0.0, self._users(user, along, placement, depth) if first else 0.0
        if not isinstance(user.target, OpOverload) or user in self.values or placement is None:
            return placement, 0.0, 0.0
        if user.target is CONSTRAIN:
            goal = constrained_to(user, (placement,) * len(self.mesh.axes))[along.index]
            return goal, along.move(placement, goal, nbytes), self._users(user, along, goal, depth)
        if depth == 0 or not any(infos(results(user.meta.get("val")))):
            # A sum that nobody has added up yet will be, at the least to parts.
            left = along.move(placement, Shard(0), nbytes) if isinstance(placement, Partial) else 0.0
            return Shard(0), left, 0.0
        ways = [
            (
                option.operands[at],
                along.move(placement, option.operands[at], nbytes),
                others + self._users(user, along, option.results[0], depth - (not has(user.target, Trait.VIEW))),
            )
            for option, at, others in self._options(user, node, along.index)
        ]
        return min(ways, key=lambda way: way[1] + way[2])

    def _options(self, user: fx.Node, node: fx.Node, axis: int) -> Iterator[tuple[Option, int, float]]:
        """The options of a user, the position of ``node`` among its operands, and what the other operands cost."""
        tensors = [leaf for leaf in leaves(user) if isinstance(leaf, fx.Node) and any(infos([leaf.meta.get("val")]))]
        call, held = _call(user), [self.values.get(leaf) for leaf in tensors]
        for option in self.chooser.along(call, axis):
            others = sum(
                self.chooser.cost_to(value, axis, placement, may_join=True)
                for value, placement in zip(held, option.operands, strict=True)
                if isinstance(value, Value)
            )
            yield option, tensors.index(node), others

    def _backward(self, node: fx.Node, operands: Sequence[Value], option: Option, axis: int) -> float:
        """An operand that is whole, where the result is split, has shares of its gradient: they are added up."""
        if node.meta.get("phase") is not Phase.FORWARD or not isinstance(option.results[0], Shard):
            return 0.0
        placed = zip(operands, option.operands, strict=True)
        whole = [held for held, place in placed if place == Replicate() and self._has_gradient(held)]
        return sum(
            cost(
                Partial(),
                held.primary[axis],
                held.bytes_before(held.primary, axis, self.mesh),
                self.mesh.axes[axis],
            )
            for held in whole
        )

    def _has_gradient(self, held: Value) -> bool:
        origin = held.source.meta.get("origin")
        return held.weights or (origin is not None and origin.number in self.differentiated)


@dataclass(frozen=True)
class _Along:
    """One mesh axis, and the share of a value that the other axes leave a rank."""

    index: int
    axis: Axis = field(compare=False)
    share: float

    def move(self, source: Placement, target: Placement, nbytes: float) -> float:
        """What it costs to move a value that has ``nbytes`` as a whole."""
        return cost(source, target, nbytes * self.share, self.axis, allow_split_sum=True)


def _call(node: fx.Node) -> OpCall:
    """The call of a node that the walk has not come to, on global shapes."""

    def info(operand: fx.Node) -> Any:
        val = operand.meta.get("val")
        return next(iter(infos([val])), None) or val

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), info)
    tensors = (leaf for leaf in leaves(node) if isinstance(leaf, fx.Node))
    operands = tuple(i for leaf in tensors for i in infos([leaf.meta.get("val")]) if i is not None)
    target: Any = node.target
    return OpCall(target, args, kwargs, operands, infos(results(node.meta["val"])), 1)


def _nbytes(node: fx.Node) -> float:
    first: Info | None = infos(results(node.meta.get("val")))[0]
    return float(first.nbytes) if first is not None else 0.0
