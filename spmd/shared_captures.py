"""Captures that several programs of a step share: those of calls that differ in sizes of their arguments alone.

The first call of a step is captured for its own sizes, unless ``dynamic`` names some. When a call comes with another
size, the step is captured once more, for any size of the dims that have changed; what that serves is not traced again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .answers.answer import begin_with
from .call.call import Call
from .call.dynamic_dims import (
    Dim,
    DynamicSize,
    Shapes,
    argument_shapes,
    changed_dims,
    equal_sizes,
    has_dim,
    have_same_dims,
    named_sizes,
    shapes_of,
    sizes_in,
)
from .capture import Captured
from .capture.sizes.any_size import AnySize
from .capture.sizes.size_symbols import LEAST, TracedSizes
from .guards.guards import Guards
from .interpreter.source_lines import warn_user

NONE = -1


@dataclass(frozen=True)
class SharedCapture:
    """The capture of the program of this ``number``, and the guards on all but sizes."""

    number: int
    capture: AnySize
    guards: Guards


class ServingCapture(NamedTuple):
    """The capture that serves a call on this rank, if there is one, and whether all ranks have it."""

    own: SharedCapture | None = None
    is_common: bool = True


@dataclass
class SharedCaptures:
    """The captures of one step that serve several sizes. ``dynamic``: what the user names, by argument and dim."""

    name: str
    dynamic: Mapping[str, Mapping[int, str]]
    _shared: list[SharedCapture] = field(default_factory=list)
    _changed: dict[Dim, None] = field(default_factory=dict)  # dims whose size differed from call to call
    _fixed: dict[Dim, str] = field(default_factory=dict)  # dims of which the step needs the size, with the line
    _named: set[Dim] = field(default_factory=set)  # dims that ``dynamic`` names
    _warned: set[Dim] = field(default_factory=set)

    @property
    def fixed(self) -> Mapping[Dim, str]:
        """The dims of which the step needs the size, as far as they were left open, each with the user's line."""
        return self._fixed

    def number_for(self, call: Call) -> int:
        """The number of the newest capture that serves a call, on this rank; ``NONE`` if there is none."""
        self._shared = [each for each in self._shared if not each.guards.dead]
        if call.initial.made_any:
            return NONE  # the trace may have seen that there was state
        serving = (each for each in reversed(self._shared) if each.capture.fits(call) and each.guards.admit(call.given))
        asked = (each for each in serving if begin_with(each.capture.captured.answers, call.answers))
        fitting = (each for each in asked if each.capture.captured.specs == call.watched)
        return next((each.number for each in fitting), NONE)

    def of_number(self, number: int) -> SharedCapture:
        """The capture of this number."""
        return next(each for each in self._shared if each.number == number)

    def open_sizes(self, call: Call, programs: Sequence[Captured]) -> TracedSizes:
        """The sizes that the capture of a call leaves open; ``programs``: those of its models so far."""
        now = shapes_of(call.inputs)
        before = [shapes for each in programs if have_same_dims(shapes := argument_shapes(each.program), now)]
        for shapes in before:
            self._changed |= dict.fromkeys(changed_dims(shapes, now))
        self._warn_of_fixed([*before, now])
        named = named_sizes(self.dynamic, call.inputs)
        self._named |= {dim for size in named for dim in size.dims}
        known = {dim for size in named for dim in size.dims} | self._fixed.keys()
        changed = [dim for dim in self._changed if dim not in known and has_dim(now, dim)]
        found = [*named, *equal_sizes(changed, [*before, now])]
        found = [size for size in found if sizes_in(now, [size]) >= (LEAST,) and not self._fixed.keys() & size.dims]
        return TracedSizes(tuple(found), sizes_in(now, found))

    def add(self, number: int, capture: AnySize, guards: Guards, call: Call) -> None:
        """Keep a capture, with the guards of the program that it was made for."""
        dims: dict[str, set[int]] = {}
        for argument, dim in (dim for size in capture.sizes for dim in size.dims):
            dims.setdefault(argument, set()).add(dim)
        own = guards.of_any_size(call.arguments, dims, capture.captured.guards)
        own.on_release = capture.captured.release
        self._shared.append(SharedCapture(number, capture, own))

    def note_fixed(self, fixed: Mapping[DynamicSize, str]) -> list[str]:
        """Note sizes that the step needs to know, each with its line; returns sentences for the report.

        Where the user named a size, a warning says so at once, else when one more program is compiled for it.
        """
        self._fixed |= {dim: line for size, line in fixed.items() for dim in size.dims}
        self._warn([dim for dim in self._fixed if dim in self._named])
        return [self._describe(size.dims) for size in fixed]

    def _warn_of_fixed(self, shapes: Sequence[Shapes]) -> None:
        def sizes(dim: Dim) -> set[int]:
            return {each[dim[0]][dim[1]] for each in shapes if has_dim(each, dim)}

        self._warn([dim for dim in self._fixed if len(sizes(dim)) > 2])

    def _warn(self, dims: Sequence[Dim]) -> None:
        """One warning for all dims that are fixed at one line."""
        new = [dim for dim in dims if dim not in self._warned]
        self._warned |= set(new)
        for line in dict.fromkeys(self._fixed[dim] for dim in new):
            warn_user(
                f"{self._describe([dim for dim in new if self._fixed[dim] == line])}. Pad to one of a few lengths "
                "(docs/first-hour.md, Shapes), and let max_programs= bound how many programs are kept"
            )

    def _describe(self, dims: Sequence[Dim]) -> str:
        """Why there is a program for each size of some dims, which are fixed at one line."""
        line = self._fixed[dims[0]]
        reason = f"it depends on the size at {line}" if line else "it cannot be captured for a size that is not known"
        listed = ", ".join(f"dim {dim} of {argument}" for argument, dim in dims)
        return f"{self.name} compiles a program for each size of {listed}: {reason}"
