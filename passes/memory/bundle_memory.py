"""The memory that a rank of a bundle needs for a call: its programs, one after the other, and values in channels.

State and the largest arena are there all the time. A value in a channel is there from the program that computes it to
the last one that reads it; it counts once, also where several channels have it, or views of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torch import fx

from ..ir.bundle import Bundle, InFlight
from ..ir.program import OutputKind
from ..ir.roles import Holds
from .peak_memory import PlannedMemory, planned_memory
from .pieces import Pieces
from .value_roles import holds

_Memory = frozenset[tuple[int, fx.Node, int]]  # of a value: the number of the program that allocated it, where, bytes
_NOTHING: _Memory = frozenset()
_EMPTY = PlannedMemory(0, {}, 0, 0, 0, 0, "", ())


@dataclass(frozen=True)
class RankMemory:
    """``planned``: the memory of a call on the device of its programs. ``during``: bytes in use in each, in order."""

    planned: PlannedMemory
    during: tuple[int, ...]


def bundle_memory(bundle: Bundle, call: str, coordinate: int) -> RankMemory:
    """The memory of the rank at a coordinate, in a call that finds its channels empty.

    Of programs whose memory is not planned yet it counts what their ops would allocate.
    """
    order = bundle.order(call, coordinate)
    programs = {role: _Sizes(bundle, role) for role in dict.fromkeys(order)}
    state = {name: each for program in programs.values() for name, each in program.state.items()}
    arena, in_flight = max(each.planned.arena for each in programs.values()), InFlight(bundle)
    fixed, during, held = arena + sum(size for _, size in state.values()), list[int](), list[int]()
    for number, role in enumerate(order):
        held.append(sum(size for *_, size in _NOTHING.union(*in_flight.held)))
        during.append(fixed + held[-1] + programs[role].planned.allocated)
        in_flight.put(role, programs[role].left(number, in_flight.take(role, order)))
    at = max(range(len(order)), key=during.__getitem__)
    found = programs[order[at]]
    roles = Counter(found.allocated)
    for kind, size in (*state.values(), (Holds.ACTIVATIONS, held[at])):
        roles[str(kind)] += size
    planned = replace(
        found.planned,
        peak=during[at],
        roles=dict(roles),
        unused=during[at] - roles.total(),
        arena=arena,
        arena_used=max(each.planned.arena_used for each in programs.values()),
        at=f"{found.planned.at}, in {order[at]}",
    )
    return RankMemory(planned, tuple(during))


class _Sizes:
    """The memory of one program. ``state``: what is there before a call, by name; ``allocated``: beside it, by kind."""

    def __init__(self, bundle: Bundle, role: str) -> None:
        self.program, cut = bundle.programs[role], bundle.cut
        self.pieces = Pieces(self.program.graph)
        self.sizes = {each.node: each.size for each in self.pieces.all}
        self.inputs = dict(zip(self.program.placeholders, self.program.inputs, strict=True))
        kinds, of_inputs = holds(self.program, self.pieces), Counter[str]()
        self.state: dict[str, tuple[Holds, int]] = {}
        for node, declared in self.inputs.items():
            size = self.sizes.get(node, 0)
            of_inputs[str(kinds[node])] += size
            if not declared.role.is_of_channel:
                self.state[declared.name] = kinds[node], size * cut.get(declared.name, 1)
        plans = planned_memory(self.program).values()
        self.planned = max(plans, key=lambda each: each.peak, default=_EMPTY)
        self.allocated = {kind: size - of_inputs[kind] for kind, size in self.planned.roles.items()}

    def left(self, number: int, taken: dict[str, _Memory]) -> dict[str, _Memory]:
        """The memory of what its run of this number leaves in channels. ``taken``: that of what it has taken."""
        found: dict[str, _Memory] = {}
        for value, output in zip(self.program.output_values(), self.program.outputs, strict=True):
            if output.kind is OutputKind.CHANNEL:
                pieces = self.pieces.found[value]
                given = [taken.get(self.inputs[each].name, _NOTHING) for each in pieces if each in self.inputs]
                own = {(number, each, self.sizes[each]) for each in pieces - self.inputs.keys() if each in self.sizes}
                found[output.name] = frozenset(own).union(*given)
        return found
