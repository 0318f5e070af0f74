"""``CompilePhases``: the stages of one compilation, each shown, timed, and explained if it fails unexpectedly.

What ranks do at the stages of a pipeline says their ``Bundle`` (``passes/ir/bundle.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from passes import Pass, Program, Report, Table
from passes.measured import IslandTime
from passes.report import PassEffect
from passes.runner import OnStage

from .dump import stage_name
from .progress import Progress
from .unexpected_errors import unexpected_errors


@dataclass
class CompilePhases:
    """``name`` is that of the program, ``where`` the line of the step, ``reason`` why it is compiled.

    ``program``: what the last stage has made; ``passes``: what each pass did; ``islands``, and ``kernels``, their C++:
    what a compiler of kernels made. ``captured_on``: the rank that captured for all.
    """

    name: str
    where: str
    progress: Progress
    reason: str = ""
    program: Program | None = None
    passes: list[PassEffect] = field(default_factory=list)
    islands: tuple[IslandTime, ...] = ()
    kernels: str = ""
    captured_on: int | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage that is shown and timed."""
        with self.progress.stage(name), self.explained(name):
            yield

    def noting(self, program: Program, then: OnStage) -> OnStage:
        """For a run of passes over ``program``: notes what each pass did, and calls ``then``."""
        count = len(program.graph.nodes)

        def on_pass(number: int, each: Pass, after: Program, seconds: float) -> None:
            nonlocal count
            before, count, did = count, len(after.graph.nodes), after.history[-1].partition(": ")[2]
            self.passes.append(PassEffect(stage_name(number, type(each).__name__), did, before, count, seconds))
            then(number, each, after, seconds)

        return on_pass

    def reporting(self, program: Program, notes: Sequence[str], costs: Table) -> Callable[[], Report]:
        """A function that makes the report of a program, with the seconds of its stages so far, and all its notes."""
        seconds, done = dict(self.progress.seconds), list(self.passes)
        make = partial(Report.of, islands=self.islands, kernels=self.kernels, costs=costs, reason=self.reason)
        return partial(make, program, seconds, notes, passes=done)

    def explained(self, stage: str) -> AbstractContextManager[None]:
        """Explain an unexpected error in a stage."""
        return unexpected_errors(stage, self.name, self.where, self._before)

    def _before(self) -> Iterator[str]:
        """A line for each stage, and for each pass, that went well."""
        yield from (f"{stage}, {seconds:.1f} s" for stage, seconds in self.progress.seconds.items())
        yield from self.program.history if self.program is not None else ()
