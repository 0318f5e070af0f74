"""What a loop does between its second call and its third by means of ``spmd``, and the same in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import spmd

from .dimensions import DIMENSIONS, Row, is_possible
from .simulating import simulated
from .training import WIDTH, Training

Batch = tuple[Any, ...]
FAILED = ("failed call", "failed on one rank", "raised and recovered")


@dataclass
class Plain:
    """In plain torch, on a process that holds the whole batch."""

    saved: dict[str, Any] = field(default_factory=dict)

    def other_step(self, step: Any) -> Any:
        """The step that trains what a checkpoint is made of."""
        return step

    def save(self, training: Training) -> None:
        """Keep the state of a training."""
        self.saved = {name: copy.deepcopy(each.state_dict()) for name, each in training.saved().items()}

    def load(self, training: Training) -> None:
        """Give a training the state that was kept."""
        for name, each in training.saved().items():
            each.load_state_dict(self.saved[name])

    def look(self, step: Any) -> None:
        """There is no program to look at."""

    def fail(self, step: Any, training: Training, given: Batch) -> None:
        """A call that fails changes nothing, as if it were not there."""


@dataclass
class Compiled:
    """By ``spmd``. ``compile_with``: makes the step of a row; ``found``: what went other than it should.

    ``traces``: one for each trace of this rank. Those of a call that fails are taken away: no cache has them.
    """

    values: Mapping[str, str]
    rank: int
    count: int
    folder: Path  # of checkpoints, which all ranks see
    compile_with: Callable[[Mapping[str, str]], Any]
    traces: list[str]
    found: list[str] = field(default_factory=list)

    def other_step(self, step: Any) -> Any:
        """The same step in another layout."""
        return self.compile_with(in_another_style(self.values))

    def save(self, training: Training) -> None:
        """Write a checkpoint."""
        spmd.save(self.folder, **training.saved())

    def load(self, training: Training) -> None:
        """Read it."""
        spmd.load(self.folder, **training.saved())

    def look(self, step: Any) -> None:
        """Look at the simulation of the program that ran."""
        self.found += simulated(step.report())

    def fail(self, step: Any, training: Training, given: Batch) -> None:
        """Let a call fail on all ranks, one of which has a reason to."""
        what, (x, y), before = self.values["between"], given, len(self.traces)
        is_wrong = what == "failed call" or (what == "failed on one rank" and self.rank == self.count - 1)
        x = x.new_ones(*x.shape[:-1], WIDTH + 1) if is_wrong else x
        raising = training.model.get_submodule("blocks.1").register_forward_hook(_raise) if what == FAILED[2] else None
        try:
            step(*training.arguments(), x, y)
            self.found.append("expected the call to fail, and it did not")
        except Exception as error:  # any may come; the next calls say whether that did harm
            if raising is not None and "raised by the hook" not in str(error):
                self.found.append(f"expected the error of the hook, got {error!r}")
        if raising is not None:
            raising.remove()
            step.recover()
        del self.traces[before:]


def _raise(*_: Any) -> None:
    raise ValueError("raised by the hook")


def in_another_style(values: Mapping[str, str]) -> Row:
    """The plainest row that trains the same on the same mesh in another style."""
    kept = ("mesh", "micro_batches", "schedule", "transport", "cache", "model", "op", "loss", "optimizer")
    kept += ("clears", "rows")
    row = {name: values[name] if name in kept else each[0] for name, each in DIMENSIONS.items()}
    rows = [row | {"style": style} for style in ("fully_shard", "replicate", "default") if style != values["style"]]
    return next(filter(is_possible, rows))
