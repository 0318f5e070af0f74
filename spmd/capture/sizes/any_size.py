"""``AnySize``: a step that was captured once, and serves every size of some dims of its arguments.

That code which sees a symbol does what it does with a number is not taken for granted: it may ask for its type, and
some of torch's own may have taken the size of the trace for a constant. So the program is made for other sizes, too,
and compared with one that was captured for these: an earlier program of the step, or one that is traced for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from passes import Input

from ...call.argument_logs import LogsFound
from ...call.call import Call
from ...call.dynamic_dims import DynamicSize, argument_shapes, shapes_of, sizes_in, with_sizes
from ...python_state.reads import Reads
from ..captured import Captured
from ..make_program import inputs_of
from .known_outputs import without_known_outputs
from .same_program import captured_the_same
from .size_symbols import LEAST, TracedSizes, without
from .specialize import specialize

_COMPARED = 3  # earlier programs, the newest first: if none of them compares, they are of another state

Capture = Callable[[TracedSizes], tuple[Captured, Reads]]


@dataclass(frozen=True)
class AnySize:
    """``captured`` has symbols in the place of ``sizes``; ``trace``: what the cache keeps of the trace, as data."""

    captured: Captured
    sizes: tuple[DynamicSize, ...]
    trace: dict[str, Any] = field(default_factory=dict, compare=False)

    def fits(self, call: Call) -> bool:
        """Whether the sizes and the state of a call are such that it may be served; guards check all else."""
        sizes = self._sizes_of(call)
        names = {slot.input.name for slot in call.slots}
        has_state = all(each.name in names for each in self.captured.program.inputs if each.role.is_state)
        return has_state and bool(sizes) and self.captured.guards.at(sizes) is not None

    def _sizes_of(self, call: Call) -> tuple[int, ...]:
        return sizes_in(shapes_of(call.inputs), self.sizes)

    def at(self, call: Call, name: str) -> Captured:
        """The captured program of a call, under this name."""
        call.count(self.captured.carried.counters)
        described = {each.name: each for each in inputs_of(call, self.captured.carried, self.captured.constants)}
        inputs = [described[each.name] for each in self.captured.program.inputs]
        made = self._made(self._sizes_of(call), inputs)
        made.program = replace(made.program, name=name, mesh=call.mesh, annotations=call.annotations)
        return made

    def at_sizes(self, sizes: Sequence[int]) -> Captured | None:
        """The captured program of the call that was traced, if its arguments had other sizes; None if it needs them."""
        if self.captured.guards.at(sizes) is None:
            return None
        return self._made(sizes, with_sizes(self.captured.program.inputs, self.sizes, sizes))

    def _made(self, sizes: Sequence[int], inputs: Sequence[Input]) -> Captured:
        guards = self.captured.guards.at(sizes)
        assert guards is not None, "the sizes were admitted"
        program = specialize(self.captured.program, self.captured.sizes, sizes, inputs)
        made = replace(self.captured, program=program, guards=guards, is_of_one_size=True)
        return without_known_outputs(replace(made, writes=list(made.writes)))


def capture_any_size(
    traced: Capture, sizes: TracedSizes, programs: Sequence[Captured]
) -> tuple[tuple[AnySize, Reads] | None, dict[DynamicSize, str]]:
    """(a step captured for any of ``sizes`` with what it reads, the sizes that it needs to know with the user's lines).

    ``traced`` captures it; ``programs`` are those of the step so far. None if it cannot be captured so, or does not
    compute for other sizes what it does there.
    """
    fixed: dict[DynamicSize, str] = {}
    while sizes.sizes:
        try:
            captured, reads = traced(sizes)
        except LogsFound:
            raise
        except Exception:
            # If it is the user's own error, the step raises it again.
            return None, fixed | dict.fromkeys(sizes.sizes, "")
        if not captured.fixed_sizes:
            found = AnySize(captured, sizes.sizes)
            if _is_right(found, traced, sizes, programs):
                return (found, reads), fixed
            return None, fixed | dict.fromkeys(sizes.sizes, "")
        fixed |= captured.fixed_sizes
        fewer = without(sizes, list(captured.fixed_sizes))
        assert len(fewer.sizes) < len(sizes.sizes), "a size that the step needs is one that was left open"
        sizes = fewer
    return None, fixed


def _is_right(found: AnySize, traced: Capture, sizes: TracedSizes, programs: Sequence[Captured]) -> bool:
    """Whether the program for other sizes is the one that is captured for these."""
    known = [(sizes_in(argument_shapes(each.program), found.sizes), each) for each in programs]
    earlier = [(values, each) for values, each in known if values and values != sizes.values][:_COMPARED]
    for values, each in earlier:
        made = found.at_sizes(values)
        if made is not None and captured_the_same(made, each):
            return True
    for values in [*(values for values, _ in earlier), *_others(sizes.values)]:
        made = found.at_sizes(values)
        witness = _witness(traced, replace(sizes, values=values, are_symbolic=False)) if made is not None else None
        if made is not None and witness is not None:
            return captured_the_same(made, witness)
    return False


def _witness(traced: Capture, sizes: TracedSizes) -> Captured | None:
    """The step captured for other sizes; None if they do not fit, as a sequence that is too long."""
    try:
        return traced(sizes)[0]
    except LogsFound:
        raise
    except Exception:
        return None


def _others(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Other sizes to capture a step for: those near by, multiples for steps that divide them, then smaller ones."""
    yield from (tuple(size + more for size in sizes) for more in (1, 2, 4, 8))
    yield from (tuple(size * times for size in sizes) for times in (2, 3))
    yield from (tuple(size - less for size in sizes) for less in (1, 2) if min(sizes) - less >= LEAST)
