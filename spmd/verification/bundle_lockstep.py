"""Run a bundle on all ranks in one process: those of one program in lockstep, and the others meanwhile by themselves.

Each rank keeps its state from call to call. What a call leaves in channels is there for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes import OutputKind, Program
from passes.ir.bundle import Bundle, InFlight, numbered

from .._torch import DisableAutocast
from .lockstep import Crossing, LockstepError, Pending, Steps, Watch, steps_of
from .values import Values, by_name

WatchOf = Callable[[str, Sequence[int]], Watch]


@dataclass
class BundleRank:
    """One rank: its bundle, its coordinate along the axis, its state by name, and what it has in channels."""

    bundle: Bundle
    coordinate: int
    state: Values
    in_flight: InFlight = field(init=False)

    def __post_init__(self) -> None:
        self.in_flight = InFlight(self.bundle)

    def inputs(self, role: str, order: Sequence[str], given: Values, run: int = 0) -> list[Any]:
        """The inputs of the ``run``-th run of a program: from channels, of this call, or state."""
        values = self.state | given | self.in_flight.take(role, order)
        declared = self.bundle.programs[role].inputs
        return self.bundle.inputs_of(declared, [_of_input(each, values) for each in declared], run)

    def keep(self, role: str, inputs: Sequence[Any], returned: Sequence[Any]) -> Values:
        """Put what a program has computed where it belongs; returns its results."""
        program, results, cut = self.bundle.programs[role], Values(), self.bundle.cut
        after = by_name(program, inputs)
        pending = {each.name: after[each.given] for each in self.bundle.channels if each.given in after}
        for output, value in zip(program.outputs, returned, strict=True):
            if output.kind is OutputKind.UPDATE and output.name in cut:
                after[output.name].copy_(value)  # where all rows lie
            elif output.kind is OutputKind.UPDATE:
                after[output.name] = value.detach().clone()
            elif output.kind is OutputKind.CHANNEL:
                pending[output.name] = value
            else:
                results[output.name] = value
        self.state |= {name: value for name, value in after.items() if name in self.state.keys() - cut}
        self.in_flight.put(role, pending)
        return results


def _of_input(declared: Any, values: Mapping[str, Any]) -> Any:
    if not declared.parts:
        return values[declared.name]
    parts = sorted(declared.parts, key=lambda part: part.offset)
    return torch.cat([values[part.input.name].reshape(-1) for part in parts])


class BundleRun:
    """All ranks of a bundle. ``ranks``: in the order of the mesh."""

    def __init__(self, ranks: Sequence[BundleRank]) -> None:
        self.ranks = ranks
        self._together: dict[int, list[int]] = {}  # the ranks that run the same programs, by coordinate
        for number, rank in enumerate(ranks):
            self._together.setdefault(rank.coordinate, []).append(number)
        self._pending: dict[int, list[Pending]] = {coordinate: [] for coordinate in self._together}

    def call(self, name: str, given: Sequence[Values], watch: WatchOf | None = None) -> list[Values]:
        """One call on what each rank is ``given`` besides state; returns the results of each.

        ``watch``: watches a program, by its role and the numbers of the ranks that run it.
        Raises ``LockstepError`` where ranks do not fit together, or wait for each other for ever.
        """
        crossing, results = Crossing(), [Values() for _ in self.ranks]
        going = {k: self._programs(k, name, given, crossing, results, watch) for k in self._together}
        blocked: dict[int, fx.Node] = {}
        with torch.no_grad(), DisableAutocast():
            while going:
                before = len(going), crossing.moves
                for k, steps in list(going.items()):
                    at = next(steps, None)
                    if at is None:
                        del going[k]
                    else:
                        blocked[k] = at
                if going and before == (len(going), crossing.moves):
                    raise LockstepError(_waiting(self.ranks[0].bundle, going, blocked), blocked[min(going)])
        crossing.check_received()
        return results

    def _programs(
        self,
        coordinate: int,
        call: str,
        given: Sequence[Values],
        crossing: Crossing,
        results: list[Values],
        watch: WatchOf | None,
    ) -> Iterator[fx.Node]:
        """Run what the ranks at a coordinate run in a call; yields the nodes at which they wait for others."""
        numbers = self._together[coordinate]
        ranks = [self.ranks[number] for number in numbers]
        order = ranks[0].bundle.order(call, coordinate)
        for role, run in numbered(order):
            programs: list[Program] = [rank.bundle.programs[role] for rank in ranks]
            inputs = [rank.inputs(role, order, given[k], run) for rank, k in zip(ranks, numbers, strict=True)]
            seen = None if watch is None else watch(role, numbers)
            steps: Steps = steps_of(programs, inputs, crossing, seen, self._pending[coordinate])
            returned = yield from steps
            for rank, k, own, outputs in zip(ranks, numbers, inputs, returned, strict=True):
                results[k] |= rank.keep(role, own, outputs)


def _waiting(bundle: Bundle, going: Mapping[int, Any], blocked: Mapping[int, fx.Node]) -> str:
    each = ", ".join(f"{bundle.axis}={k} at {blocked[k]} of {blocked[k].args[0]}" for k in going)
    return f"the ranks of {bundle.name} wait for each other for ever: {each}"
