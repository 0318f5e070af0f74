"""Which way to compute an op: of all that are right, the one that costs least by the rates of the mesh axes.

The rule of an op says what is right along one axis; axes are chosen one after the other, each with the shapes that the
axes before have left. Where two ways cost the same, the first in the rule's own order is taken, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import isclose, prod
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Mesh, Phase
from passes.ir.program import Placements
from passes.ir.rates import Rate

from ..placements import Interleaved, all_shapes, chunk, first_of_each_length, local_shape, splits
from ..rules import Info, OpCall, Option, localize_of, rule_of
from .memo import likeness
from .redistribute import cost
from .values import Value

# Where the model is split, its weights are where the user wants them; only what cannot be done so moves them.
_STAYS = 1000.0


@dataclass
class Chooser:
    """Chooses options for calls on one mesh; calls that are alike ask their rule once."""

    mesh: Mesh
    model_axes: frozenset[int] = frozenset()  # those over which no argument of the step is split
    _asked: dict[Any, list[Option]] = field(default_factory=dict)

    def cheapest(
        self,
        call: OpCall,
        operands: Sequence[Value],
        wanted: Placements | None,
        phase: Phase | None,
        only: Placements | None = None,
        later: Callable[[Option, int, float], float] | None = None,
    ) -> list[Option]:
        """One option per axis. ``wanted`` is where the (first) result is wanted, ``only`` where it must be.

        ``later`` tells what an option costs after this op, along an axis that splits the model, given the share of the
        result that the axes before leave.
        """
        chosen: list[Option] = []
        for index in range(len(self.mesh.axes)):
            options = self.options(call, operands, chosen)
            if only is not None:
                options = [option for option in options if option.results[0] == only[index]]
            elif phase is Phase.UPDATE and _is_contraction(options):
                options = _on_matrices(call, options, operands, index)
            costs = [self._cost(o, call, operands, index, wanted, phase) for o in options]
            best, rate = _first_cheapest(costs), self.mesh.axes[index].rate
            if later is not None and index in self.model_axes and _is_open(options[best], costs[best], rate):
                share = self._share(chosen)
                costs = [cost + later(option, index, share) for option, cost in zip(options, costs, strict=True)]
            chosen.append(options[_first_cheapest(costs)])
        return chosen

    def _share(self, chosen: Sequence[Option]) -> float:
        """How much of the first result is left by the axes chosen for so far."""
        split = (axis.size for axis, o in zip(self.mesh.axes, chosen, strict=False) if isinstance(o.results[0], Shard))
        return 1 / prod(split)

    def whole(self, call: OpCall) -> list[Option]:
        """Everything whole, along every axis."""
        return [_whole(call) for _ in self.mesh.axes]

    def without_traffic(self, call: OpCall, operands: Sequence[Value], result: Placements) -> list[Option] | None:
        """One option per axis that gives exactly ``result`` and takes only what this rank has."""
        chosen: list[Option] = []
        for index in range(len(self.mesh.axes)):
            options = self.options(call, operands, chosen)
            fits = [o for o in options if o.results[0] == result[index] and _is_free(o, operands, index)]
            if not fits:
                return None
            chosen.append(min(fits, key=lambda o: sum(isinstance(p, Shard) for p in o.operands)))
        return chosen

    def options(self, call: OpCall, operands: Sequence[Value], chosen: Sequence[Option]) -> list[Option]:
        """What is right along the next axis: everything whole, and what the rule says."""
        axis = self.mesh.axes[len(chosen)]
        interleaved = tuple(_runs(held, tuple(o.operands[k] for o in chosen)) for k, held in enumerate(operands))
        calls = (replace(c, size=axis.size, interleaved=interleaved) for c in _narrowed(call, chosen, self.mesh))
        first, *others = map(self._ask, calls)
        return [option for option in first if all(option in other for other in others)] if others else first

    def _ask(self, call: OpCall) -> list[Option]:
        """Everything whole, and what the rule says."""
        given = likeness(call.args), likeness(call.kwargs), call.results
        key = (call.target, *given, call.size, call.interleaved)
        if key not in self._asked:
            rule = rule_of(call.target)
            self._asked[key] = [_whole(call), *(rule(call) if rule is not None else [])]
        return self._asked[key]

    def _cost(
        self,
        option: Option,
        call: OpCall,
        operands: Sequence[Value],
        axis: int,
        wanted: Placements | None,
        phase: Phase | None,
    ) -> float:
        on_model = axis in self.model_axes and phase in (Phase.FORWARD, Phase.BACKWARD)
        # A sum that came in is reduced before something whole is added to it; one that begins here takes the bias in.
        joins = phase is Phase.BACKWARD or (on_model and any(isinstance(p, Shard) for p in option.operands))
        moves = [
            (held, p, self.cost_to(held, axis, p, joins)) for held, p in zip(operands, option.operands, strict=True)
        ]
        total = sum(moved for _, _, moved in moves)
        if on_model:
            asked = wanted is not None and option.results[0] == wanted[axis]
            total += sum(self._on_model_axis(held, axis, p, moved, operands, asked) for held, p, moved in moves)
        result, info = option.results[0], call.results[0]
        if wanted is not None and isinstance(wanted[axis], Shard) and info is not None and result != wanted[axis]:
            # Known to be wanted split: everything else builds more than this rank's part.
            total += 0.0 if isinstance(result, Partial) else info.nbytes * self.mesh.axes[axis].rate.per_byte
        return total

    def _on_model_axis(
        self, held: Value, axis: int, placement: Placement, moved: float, operands: Sequence[Value], asked: bool
    ) -> float:
        """What a move costs besides, where the model is split: weights stay, and a split nobody asks for is undone."""
        if moved < self.mesh.axes[axis].rate.latency:
            return 0.0
        if held.weights:
            return _STAYS * moved
        others = any(isinstance(x.primary[axis], Shard) for x in operands if x is not held and not x.weights)
        if asked or others or not isinstance(placement, Shard):
            return 0.0
        nbytes = min(held.bytes_before(form, axis, self.mesh) for form in held.forms)
        return cost(placement, Replicate(), nbytes, self.mesh.axes[axis])

    def along(self, call: OpCall, axis: int) -> list[Option]:
        """What is right along one axis of a call whose operands are not there yet, on global shapes."""
        return self._ask(replace(call, size=self.mesh.axes[axis].size))

    def cost_to(self, held: Value, axis: int, placement: Placement, may_join: bool) -> float:
        """What it costs to have a value in ``placement`` along one axis; ``may_join``: a whole may become a sum."""
        along, may_join = self.mesh.axes[axis], may_join and held.dtype.is_floating_point
        return min(
            _cost_of_move(form[axis], placement, held.bytes_before(form, axis, self.mesh), along, may_join)
            for form in held.forms
        )


def _first_cheapest(costs: Sequence[float]) -> int:
    """The first of the least; what differs by rounding alone is equal."""
    least = min(costs)
    return next(k for k, each in enumerate(costs) if each == least or isclose(each, least))


def _is_open(option: Option, price: float, rate: Rate) -> bool:
    """Whether the cheapest option communicates, or leaves a sum that somebody has to add up."""
    return price >= rate.latency or isinstance(option.results[0], Partial)


def _cost_of_move(source: Placement, target: Placement, nbytes: float, axis: Axis, may_join: bool) -> float:
    """What a move costs. A small sum is not scattered: that saves no time, and its readers would have to gather it."""
    scatters = isinstance(source, Partial) and isinstance(target, Shard)
    gathered_later = axis.rate.per_byte * nbytes if scatters and axis.rate.is_small(nbytes) else 0.0
    return cost(source, target, nbytes, axis, may_join) + gathered_later


def _is_contraction(options: Sequence[Option]) -> bool:
    """Whether an op multiplies and sums up: split along what it sums over, it gives each rank a share of the sum."""
    return any(
        sum(isinstance(p, Shard) for p in option.operands) > 1 and any(isinstance(p, Partial) for p in option.results)
        for option in options
    )


def _on_matrices(call: OpCall, options: Sequence[Option], operands: Sequence[Value], axis: int) -> list[Option]:
    """What an update may do with a product of state: all of it at once, or rows that this rank has.

    An optimizer that multiplies a matrix with itself does so again and again, often in half precision. It gets the
    matrix whole, once: shares of sums would be reduced at every product, and rounded otherwise than the sum. A product
    that is larger than its factors may move them.
    """
    whole, *split = options
    rows = [o for o in split if not any(isinstance(p, Partial) for p in o.results)]
    grows = sum(r.nbytes for r in call.results if r is not None) > sum(x.nbytes for x in call.operands)
    return [whole, *(o for o in rows if grows or _is_free(o, operands, axis))]


def _whole(call: OpCall) -> Option:
    return Option(
        tuple(Replicate() for _ in call.operands), tuple(None if r is None else Replicate() for r in call.results)
    )


def _is_free(option: Option, operands: Sequence[Value], axis: int) -> bool:
    """Whether every operand can be had so without traffic."""
    return all(
        any(form[axis] == placement or isinstance(form[axis], Replicate) for form in held.forms)
        and not isinstance(placement, Partial)
        for held, placement in zip(operands, option.operands, strict=True)
    )


def _runs(held: Value, before: Placements) -> tuple[Interleaved, ...]:
    """How a value is there in runs of rows along the next axis, if the axes before leave it ``before``."""
    there = [form[len(before)] for form in held.forms if form[: len(before)] == before]
    return tuple(placement for placement in there if isinstance(placement, Interleaved))


def _narrowed(call: OpCall, chosen: Sequence[Option], mesh: Mesh) -> list[OpCall]:
    """The call with the shapes that the axes before have left, the first rank's first; each way in which ranks differ.

    All ranks must choose alike, and what is right for parts of one length may be wrong for others.
    """
    if not any(isinstance(p, Shard) for option in chosen for p in (*option.operands, *option.results)):
        return [call]
    return [_narrowed_on(call, chosen, rank) for rank in _unlike_ranks(call, chosen, mesh.axes[: len(chosen)])]


def _unlike_ranks(call: OpCall, chosen: Sequence[Option], axes: Sequence[Axis]) -> list[Mesh]:
    """The axes seen from ranks whose parts have all the lengths there are: from one rank, if all is split evenly."""
    coordinates: list[set[int]] = [{0} for _ in axes]
    placed = [(info, tuple(o.operands[n] for o in chosen)) for n, info in enumerate(call.operands)]
    placed += [
        (info, tuple(o.results[n] or Replicate() for o in chosen)) for n, info in enumerate(call.results) if info
    ]
    for info, place in placed:
        for k, entry in enumerate(place):
            if isinstance(entry, Shard):
                sizes = {shape[entry.dim] for shape in all_shapes(info.shape, place[:k], axes[:k])}
                # Of an empty part anything is right.
                coordinates[k].update(
                    n
                    for size in sizes
                    for n in first_of_each_length(size, axes[k].size)
                    if chunk(size, axes[k].size, n)[1]
                )
    ranks = product(*map(sorted, coordinates))
    return [Mesh(tuple(replace(axis, coordinate=n) for axis, n in zip(axes, rank, strict=True))) for rank in ranks]


def _narrowed_on(call: OpCall, chosen: Sequence[Option], before: Mesh) -> OpCall:
    def narrow(info: Info, placement: tuple[Any, ...], iota_dim: int | None = None) -> Info:
        return Info(local_shape(info.shape, placement, before), info.dtype, iota_dim)

    operands = [
        narrow(info, tuple(o.operands[k] for o in chosen), _still_counted(info, k, chosen))
        for k, info in enumerate(call.operands)
    ]
    results = tuple(
        None if info is None else narrow(info, tuple(o.results[k] for o in chosen))
        for k, info in enumerate(call.results)
    )
    remaining = iter(operands)
    args, kwargs = _map_infos((call.args, call.kwargs), lambda _: next(remaining))
    localize = localize_of(call.target)
    if localize is not None:
        args = localize(call, args, kwargs, tuple(None if info is None else info.shape for info in results))
    return replace(call, args=args, kwargs=kwargs, operands=tuple(operands), results=results)


def _still_counted(info: Info, position: int, chosen: Sequence[Option]) -> int | None:
    """The dim that an operand counts, if the axes before have left it counting from 0 on."""
    cut = (o for o in chosen if splits(o.operands[position], info.iota_dim or 0) and position not in o.from_zero)
    return info.iota_dim if next(cut, None) is None else None


def _map_infos(tree: Any, function: Any) -> Any:
    if isinstance(tree, Info):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map_infos(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_infos(item, function) for key, item in tree.items()}
    return tree
