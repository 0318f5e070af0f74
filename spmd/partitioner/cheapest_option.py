"""Choose how to compute an op: of all options that are right, the one that costs least.

The rule of an op says what is right along one axis; axes are chosen one after the other, each on the shapes that the
axes before leave. Of options of equal cost the first in the rule's own order is taken, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isclose, prod
from typing import Any

from torch.distributed.tensor import Partial, Shard

from passes import Mesh, PartitionError, Phase
from passes.ir.ops import Trait, has
from passes.ir.program import Placements
from passes.ir.rates import Rate

from ..placements import OwnRows
from ..rules import OpCall, Option
from .assignment import Choice, shown
from .option_costs import OptionCosts, is_made_as_sum
from .options import Options, is_free, key_of
from .values import Value

Later = Callable[[Option, int, float], float]
"""``(option, axis, share of the result that the axes before leave) -> cost`` of what follows an op."""


@dataclass
class Chooser:
    """Chooses options for calls on one mesh."""

    options: Options
    model_axes: frozenset[int] = frozenset()  # those over which no argument of the step is split
    expert_axes: frozenset[int] = frozenset()
    _chosen: dict[Any, Choice] = field(default_factory=dict)

    def cheapest(
        self,
        call: OpCall,
        operands: Sequence[Value],
        hint: Placements | None,
        phase: Phase | None,
        required: Placements | None = None,
        later: Later | None = None,
        given: Choice | None = None,
    ) -> Choice:
        """One option per axis, for a (first) result that should be in ``hint`` and must be in ``required``.

        ``later`` gives the cost of what follows the op, along an axis that splits the model. ``given``: what is chosen
        already. Raises ``PartitionError`` if no option is so.
        """
        ask = _Ask(call, operands, hint, phase, required, later, given)
        if (self.model_axes and later is not None) or self.expert_axes or given is not None:
            return self._cheapest(ask)
        held = tuple((*value.nodes, value.batch, is_made_as_sum(value)) for value in operands)
        key = (*key_of(call), held, hint, phase, required)
        if key not in self._chosen:
            self._chosen[key] = self._cheapest(ask)
        return self._chosen[key]

    def _cheapest(self, ask: _Ask) -> Choice:
        chosen, of_axis = list[Option](), self.costs(ask.call, ask.operands, ask.hint, ask.phase)
        for index, axis in enumerate(self.options.mesh.axes):
            options = self._right(ask, chosen)
            costs = [*map(of_axis[index], options)]
            best = _first_cheapest(costs)
            if ask.later is not None and index in self.model_axes and _is_open(options[best], costs[best], axis.rate):
                share = self._share(chosen)
                costs = [cost + ask.later(option, index, share) for option, cost in zip(options, costs, strict=True)]
            chosen.append(options[_first_cheapest(costs)])
        return Choice.of(chosen, len(ask.operands))

    def costs(
        self, call: OpCall, operands: Sequence[Value], hint: Placements | None, phase: Phase | None
    ) -> list[Callable[[Option], float]]:
        """The seconds of an option in the op itself, for each axis."""
        model = self.model_axes if phase in (Phase.FORWARD, Phase.BACKWARD) else frozenset[int]()
        mesh = self.options.mesh
        axes = range(len(mesh.axes))
        experts = self.expert_axes if phase in (Phase.FORWARD, Phase.BACKWARD) else frozenset[int]()
        return [OptionCosts(mesh, index, index in model, call, operands, hint, phase, experts).of for index in axes]

    def _right(self, ask: _Ask, chosen: Sequence[Option]) -> list[Option]:
        """The options along the next axis, of those that are given or required."""
        index, given = len(chosen), ask.given
        held = ask.operands if given is None else _held_as_read(ask.operands, given)
        options = self.options.next_axis(ask.call, held, chosen, ask.hint)
        found = options
        if ask.required is not None:
            found = [option for option in found if option.results[0] == ask.required[index]]
        elif given is None and ask.phase is Phase.UPDATE and _is_contraction(found) and not ask.reads_batch(index):
            found = _on_matrices(ask.call, found, ask.operands, index)
        if given is None and ask.hint is not None and isinstance(ask.hint[index], OwnRows):
            found = [option for option in found if option.results[0] == ask.hint[index]] or found
        elif given is None and self.expert_axes:
            stays = [option for option in found if _keeps_batch(option, ask.operands, index)]
            moves = [option for option in found if option not in stays]
            found = [*stays, *([] if stays and has(ask.call.target, Trait.POINTWISE) else moves)]
        if given is not None:
            found = [option for option in found if _is_given(option, given, index)]
            if not found:
                raise PartitionError(_no_option(options, given, index, self.options.mesh, ask.required))
        return found

    def _share(self, chosen: Sequence[Option]) -> float:
        """The share of the first result that the axes chosen for leave a rank."""
        axes = zip(self.options.mesh.axes, chosen, strict=False)
        return 1 / prod(axis.size for axis, option in axes if isinstance(option.results[0], Shard))


@dataclass(frozen=True)
class _Ask:
    """The arguments of ``Chooser.cheapest``."""

    call: OpCall
    operands: Sequence[Value]
    hint: Placements | None
    phase: Phase | None
    required: Placements | None
    later: Later | None
    given: Choice | None

    def reads_batch(self, axis: int) -> bool:
        """Whether an operand has rows of the batch that this axis splits, such as gradients of each row."""
        return any(axis in value.batch for value in self.operands)


def _keeps_batch(option: Option, operands: Sequence[Value], axis: int) -> bool:
    """Whether rows of the batch stay, so that what comes back from experts is added to the rows of each rank.

    Of options of equal cost these come first: that rows were gathered for experts is no reason to compute all of them.
    """
    placed = zip(operands, option.operands, strict=True)
    return all(placement == value.primary[axis] for value, placement in placed if axis in value.batch)


def _is_given(option: Option, given: Choice, axis: int) -> bool:
    """Whether an option is the one that is given along an axis."""
    reads = given.reads is None or option.operands == tuple(placement[axis] for placement in given.reads)
    by = given.by is None or option.name == (given.by[axis] if given.by else "")
    return reads and by and (given.gives is None or option.results == tuple(p and p[axis] for p in given.gives))


def _held_as_read(operands: Sequence[Value], given: Choice) -> list[Value]:
    """The operands as if they were there already in the placements in which they are given to be read."""
    if given.reads is None:
        return list(operands)
    pairs = zip(operands, given.reads, strict=True)
    return [replace(value, nodes={**value.nodes, placement: None}) for value, placement in pairs]


def _no_option(options: Sequence[Option], given: Choice, index: int, mesh: Mesh, required: Placements | None) -> str:
    """The sentence for a choice that a rule does not list."""
    wanted = [
        f"{key} {shown(value, index)}" for key, value in (("reads", given.reads), ("gives", given.gives)) if value
    ]
    wanted += [f"by {given.by[index]!r}"] if given.by else []
    drawn = f" (and the numbers of a draw need {shown((required,), index)})" if required is not None else ""
    listed = "; ".join(f"reads {shown(o.operands)} gives {shown(o.results)}" for o in options)
    return f"along {mesh.axes[index].name} no option {' '.join(wanted)}{drawn}. The options are: {listed}"


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
    return [whole, *(o for o in rows if grows or is_free(o, operands, axis))]
