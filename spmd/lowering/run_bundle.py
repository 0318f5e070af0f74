"""Run the programs of a bundle that belong to this rank: in order, with the values in channels from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from passes import OutputKind, Program
from passes.ir.bundle import Bundle, InFlight, numbered

from ..state.commit import Commit
from .arenas import Arenas
from .codegen import Bound, Compiles, is_taken
from .lower import Executable, lower

Given = Callable[[str, int], Sequence[Any]]  # the inputs of a program's k-th run that are not pending, in order
Seconds = Callable[[], dict[str, float]]  # of each node of a run, by its name


class BundleExecutable:
    """The lowered programs of the rank at ``coordinate``, and values in flight between programs and between calls."""

    def __init__(
        self, bundle: Bundle, coordinate: int, arenas: Arenas, commit: Commit, regions: Compiles | None = None
    ) -> None:
        self.bundle, self.coordinate = bundle, coordinate
        self.in_flight = InFlight(bundle)
        own = [role for role in bundle.programs if coordinate in bundle.coordinates(role)]
        self._programs = {role: _Lowered(bundle, role, arenas, commit, regions) for role in own}

    def order(self, call: str) -> tuple[str, ...]:
        """The programs that this rank runs in a call."""
        return self.bundle.order(call, self.coordinate)

    def run(self, call: str, given: Given) -> list[Any]:
        """One call; returns the results and the new state of its programs, in order."""
        order, results = self.order(call), list[Any]()
        for role, number in numbered(order):
            lowered, inputs = self._programs[role], given(role, number)
            handed_on = {channel: _own(inputs[k]) for channel, k in lowered.given}
            inputs = [*inputs, *lowered.as_inputs(self.in_flight.take(role, order))]
            returned = lowered.executable(inputs)
            results += [returned[k] for k in lowered.results]
            self.in_flight.put(role, handed_on | {channel: returned[k] for channel, k in lowered.pending})
        return results

    def timed(self, device_type: str, took: list[Seconds]) -> BundleExecutable:
        """The same programs, which also measure each node; each run adds what it took to ``took``."""
        found = copy(self)
        found._programs = {role: copy(each) for role, each in self._programs.items()}
        for role, each in found._programs.items():
            each.executable = _Timed(each.executable.timed(self.bundle.programs[role], device_type), took)
        return found

    def close(self) -> None:
        """Drop what is in flight, all references to state, and the generated code."""
        self.in_flight.clear()
        for each in self._programs.values():
            each.executable.close_code()


class Runnable(Protocol):
    """Runs a program."""

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run on this rank's inputs."""

    def timed(self, program: Program, device_type: str) -> Executable:
        """The same, which also measures each node."""

    def close_code(self) -> None:
        """Drop the generated code."""


@dataclass
class _Timed:
    """A program that adds what each run took to ``took``."""

    executable: Executable
    took: list[Seconds]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        returned = self.executable(inputs)
        assert isinstance(self.executable.function, Bound)
        self.took.append(self.executable.function.taken())
        return returned

    def timed(self, program: Program, device_type: str) -> Executable:
        return self.executable.timed(program, device_type)

    def close_code(self) -> None:
        self.executable.close_code()


class _Lowered:
    """One program, and the positions of what it takes and returns: pending inputs stand behind all others."""

    def __init__(self, bundle: Bundle, role: str, arenas: Arenas, commit: Commit, regions: Compiles | None) -> None:
        program = bundle.programs[role]
        if bundle.axis and not _writes_state(program):
            commit = Commit()  # to wait for all ranks here, of which some run others, would be to wait for ever
        self.executable: Runnable = lower(program, arenas, commit, regions)
        inputs = list(zip(program.placeholders, program.inputs, strict=True))
        pending = [(node, each) for node, each in inputs if each.role.is_of_channel]
        assert inputs[len(inputs) - len(pending) :] == pending, "pending inputs stand behind all others"
        self._taken = [(each.name, is_taken(node, each)) for node, each in pending]
        names = {each.name: k for k, each in enumerate(program.inputs)}
        written = [each for each in bundle.channels if role in each.writers]
        self.given = [(each.name, names[each.given]) for each in written if each.given]
        returned = [each for each in program.outputs if each.kind is not OutputKind.UPDATE]
        self.results = [k for k, each in enumerate(returned) if each.kind is not OutputKind.CHANNEL]
        self.pending = [(each.name, k) for k, each in enumerate(returned) if each.kind is OutputKind.CHANNEL]

    def as_inputs(self, taken: dict[str, Any]) -> list[Any]:
        """Turn values taken from channels into inputs: a tensor comes in a list, from which the program takes it."""
        return [[taken.pop(name)] if is_taken else taken.pop(name) for name, is_taken in self._taken]


def _writes_state(program: Program) -> bool:
    """Whether a program writes more than accumulators."""
    names = {each.name: each.role for declared in program.inputs for each in declared.inside}
    updated = {each.name for each in program.outputs if each.kind is OutputKind.UPDATE}
    updated |= {each.name for declared in program.inputs for each in declared.inside if each.in_place}
    return any(not names[name].is_carried for name in updated)


def _own(number: Any) -> Any:
    """The number as it is now, also where the user keeps it in a tensor."""
    return number.clone() if isinstance(number, torch.Tensor) else number
