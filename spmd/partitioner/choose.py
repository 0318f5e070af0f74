"""Choose how to compute an op: of all options that are right, the one that costs least.

The rule of an op says what is right along one axis; axes are chosen one after the other, each on the shapes that the
axes before leave. Of options of equal cost the first in the rule's own order is taken, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isclose, prod
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from passes import Mesh, Phase
from passes.ir.program import Placements
from passes.ir.rates import Rate

from ..memo import memo_key
from ..rules import OpCall, Option, rule_of
from .narrow import narrowed
from .option_costs import OptionCosts
from .values import Value

Later = Callable[[Option, int, float], float]
"""``(option, axis, share of the result that the axes before leave) -> cost`` of what follows an op."""


@dataclass
class Chooser:
    """Chooses options for calls on one mesh; a rule is asked once for all calls of one memo key."""

    mesh: Mesh
    model_axes: frozenset[int] = frozenset()  # those over which no argument of the step is split
    _memo: dict[Any, list[Option]] = field(default_factory=dict)
    _chosen: dict[Any, list[Option]] = field(default_factory=dict)

    def cheapest(
        self,
        call: OpCall,
        operands: Sequence[Value],
        hint: Placements | None,
        phase: Phase | None,
        required: Placements | None = None,
        later: Later | None = None,
    ) -> list[Option]:
        """One option per axis, for a (first) result that should be in ``hint`` and must be in ``required``.

        ``later`` gives the cost of what follows the op, along an axis that splits the model.
        """
        if self.model_axes:
            return self._cheapest(call, operands, hint, phase, required, later)
        key = (*_key(call), tuple(tuple(value.nodes) for value in operands), hint, phase, required)
        if key not in self._chosen:
            self._chosen[key] = self._cheapest(call, operands, hint, phase, required, later)
        return self._chosen[key]

    def _cheapest(
        self,
        call: OpCall,
        operands: Sequence[Value],
        hint: Placements | None,
        phase: Phase | None,
        required: Placements | None,
        later: Later | None,
    ) -> list[Option]:
        chosen: list[Option] = []
        for index in range(len(self.mesh.axes)):
            options = self.options(call, operands, chosen, hint)
            if required is not None:
                options = [option for option in options if option.results[0] == required[index]]
            elif phase is Phase.UPDATE and _is_contraction(options):
                options = _on_matrices(call, options, operands, index)
            on_model = index in self.model_axes and phase in (Phase.FORWARD, Phase.BACKWARD)
            costs = [*map(OptionCosts(self.mesh, index, on_model, call, operands, hint, phase).of, options)]
            best, rate = _first_cheapest(costs), self.mesh.axes[index].rate
            if later is not None and index in self.model_axes and _is_open(options[best], costs[best], rate):
                share = self._share(chosen)
                costs = [cost + later(option, index, share) for option, cost in zip(options, costs, strict=True)]
            chosen.append(options[_first_cheapest(costs)])
        return chosen

    def _share(self, chosen: Sequence[Option]) -> float:
        """The share of the first result that the axes chosen for leave a rank."""
        split = (axis.size for axis, o in zip(self.mesh.axes, chosen, strict=False) if isinstance(o.results[0], Shard))
        return 1 / prod(split)

    def replicated(self, call: OpCall) -> list[Option]:
        """Everything replicated, along every axis."""
        return [_replicated(call) for _ in self.mesh.axes]

    def without_traffic(self, call: OpCall, operands: Sequence[Value], result: Placements) -> list[Option] | None:
        """One option per axis that gives exactly ``result`` and reads only what this rank has."""
        chosen: list[Option] = []
        for index in range(len(self.mesh.axes)):
            options = self.options(call, operands, chosen)
            fits = [o for o in options if o.results[0] == result[index] and _is_free(o, operands, index)]
            if not fits:
                return None
            chosen.append(min(fits, key=lambda o: sum(isinstance(p, Shard) for p in o.operands)))
        return chosen

    def options(
        self, call: OpCall, operands: Sequence[Value], chosen: Sequence[Option], hint: Placements | None = None
    ) -> list[Option]:
        """The options along the next axis that are right on all ranks."""
        first, *others = map(self._options, narrowed(call, operands, chosen, self.mesh, hint))
        return [option for option in first if all(option in other for other in others)] if others else first

    def along(self, call: OpCall, axis: int) -> list[Option]:
        """The options along one axis for a call on global shapes, whose operands have not been computed yet."""
        return self._options(replace(call, size=self.mesh.axes[axis].size))

    def _options(self, call: OpCall) -> list[Option]:
        """Everything replicated, and the options of the rule."""
        key = (*_key(call), call.size, call.interleaved, call.of_parts)
        if key not in self._memo:
            rule = rule_of(call.target)
            self._memo[key] = [_replicated(call), *(rule(call) if rule is not None else [])]
        return self._memo[key]


def _key(call: OpCall) -> tuple[Any, ...]:
    """The key of a call on one mesh."""
    return call.target, memo_key(call.args), memo_key(call.kwargs), call.results


def _first_cheapest(costs: Sequence[float]) -> int:
    """The index of the first of the least costs; costs that differ by rounding alone are equal."""
    least = min(costs)
    return next(k for k, each in enumerate(costs) if each == least or isclose(each, least))


def _is_open(option: Option, price: float, rate: Rate) -> bool:
    """Whether the cheapest option communicates, or leaves a sum that is still to be reduced."""
    return price >= rate.latency or isinstance(option.results[0], Partial)


def _is_contraction(options: Sequence[Option]) -> bool:
    """Whether an op multiplies and sums up: split along the dim it sums over, it gives each rank a summand."""
    return any(
        sum(isinstance(p, Shard) for p in option.operands) > 1 and any(isinstance(p, Partial) for p in option.results)
        for option in options
    )


def _on_matrices(call: OpCall, options: Sequence[Option], operands: Sequence[Value], axis: int) -> list[Option]:
    """The options for a product of state in an update: replicated, or by rows that this rank has.

    An optimizer that multiplies a matrix with itself does so again and again, often in half precision. It gets the
    matrix whole, once: summands would be reduced at every product, and rounded otherwise than the sum. A product that
    is larger than its factors may move them.
    """
    whole, *split = options
    rows = [o for o in split if not any(isinstance(p, Partial) for p in o.results)]
    grows = sum(r.nbytes for r in call.results if r is not None) > sum(x.nbytes for x in call.operands)
    return [whole, *(o for o in rows if grows or _is_free(o, operands, axis))]


def _replicated(call: OpCall) -> Option:
    return Option(
        tuple(Replicate() for _ in call.operands), tuple(None if r is None else Replicate() for r in call.results)
    )


def _is_free(option: Option, operands: Sequence[Value], axis: int) -> bool:
    """Whether this rank has every operand of ``option``, or can cut it from one that it has."""
    return all(
        any(source[axis] == placement or isinstance(source[axis], Replicate) for source in value.nodes)
        and not isinstance(placement, Partial)
        for value, placement in zip(operands, option.operands, strict=True)
    )
