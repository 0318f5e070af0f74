"""Train one model by a compiled step and compare it with the plain step: a job for the pool, and its findings.

The oracle is the plain step in one process on the whole batch, as everywhere; ``Finding`` has what the table shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn

import spmd
from passes import Program
from tests.harness.oracle import Case, Snapshot, all_unequal, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks

from .rows import whole_rows
from .zoo import ROWS, Entry

if TYPE_CHECKING:
    import pytest

Style = Literal["replicate", "fully_shard"]
Role = Literal["sequence", "experts"]
ROLES: dict[Role, dict[str, Any]] = {
    "sequence": {"axes": {"sequence": "dp"}},
    "experts": {"axes": {"batch": "dp", "experts": "dp"}},
}


@dataclass(frozen=True)
class Training(Case):
    """Train one architecture by SGD. With momentum that takes two programs, with and without state.

    Not by Adam: where a gradient is nearly zero, its quotients make much of a rounding in fp32.
    """

    entry: Entry
    momentum: float = 0.9
    rtol, atol = 1e-6, 1e-8  # many models compute their loss, norms or softmax in fp32, whatever their weights are

    def build(self) -> tuple[Any, ...]:
        """The model and its optimizer."""
        model = self.entry.build()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=self.momentum)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """One rank's batch."""
        return (self.entry.batch(random_generator(rank, step)),)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
        """Forward, backward, update; the loss is the model's own."""
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


@dataclass(frozen=True)
class SplitSequence(Training):
    """Training whose ranks pass the same whole batch, and take parts of its sequences."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """The batch."""
        return super().part(0, step)

    def whole(self, parts: list[Any]) -> Any:
        """The batch, once."""
        return parts[0]


def training_in(entry: Entry, style: Style | Role) -> Training:
    """The training that shows a style, or a role of the axis."""
    if style == "experts":  # the default of transformers
        return Training(replace(entry, config={**entry.config, "experts_implementation": "grouped_mm"}))
    return SplitSequence(entry) if style == "sequence" else Training(entry)


@dataclass(frozen=True)
class Finding:
    """The findings of one rank: a line per value that differs, or if calls compile; others, and figures."""

    unequal: list[str]
    whole: list[str]
    nodes: int
    collectives: dict[str, int]
    seconds: float
    worst: float


class Recorded(spmd.DataParallel):
    """Data parallelism that records each program before and after partition."""

    def __init__(self, style: Style | Role) -> None:
        super().__init__(**ROLES.get(style, {"parallel_style": style}))
        self.seen: list[tuple[Program, Program]] = []

    def partition(self, program: Program) -> Program:
        """Partition as usual, and record."""
        share = super().partition(program)
        self.seen.append((program, share.copy()))
        return share


def in_one_style(request: pytest.FixtureRequest, usual: Style) -> tuple[Style, ...]:
    """The styles that a model is trained in: ``usual``, or both if exhaustive."""
    both: tuple[Style, ...] = get_args(Style)
    return both if request.config.getoption("--exhaustive") else (usual,)


def assert_trains_in_place(ranks: Ranks, case: Case, style: Style, steps: int = 3) -> None:
    """Fail with a line for each number that differs on one of two ranks, and for each node with all rows of the batch.

    A rank's part of the batch has ``ROWS`` rows, and no other dim of the model a multiple of them.
    """
    for finding in ranks.run(2, examine, case, style, steps):
        assert not finding.unequal, "\n".join(finding.unequal[:20])
        assert not finding.whole, "\n".join(finding.whole)


def examine(rank: int, world: int, case: Case, style: Style | Role, steps: int) -> Finding:
    """Train in one process and on ``world`` ranks, and compare. A job for the pool."""
    mode = Recorded(style)
    with products_in_fp64() if style == "experts" else nullcontext():
        expected = plain_run(case, world, steps)
        compiled, got = compiled_run(rank, case, steps, parallel_mode=mode)
    program = compiled.program
    assert program is not None
    compares = isinstance(case, Training) and case.entry.compares
    return Finding(
        unequal=[
            *_not_finite(expected),
            *all_unequal(expected, got, rank, world, case.rtol, case.atol),
            *_compiled_anew(compiled, steps),
        ],
        whole=[] if style in ROLES else _whole_rows(mode, compares),
        nodes=len(program.graph.nodes),
        collectives=dict(Counter(str(node.meta["collective"].kind) for node in program.collectives())),
        seconds=sum(compiled.report().seconds.values()),
        worst=max((distance(want, have) for want, have in zip(expected, got, strict=True)), default=0.0),
    )


@contextmanager
def products_in_fp64() -> Iterator[None]:
    """Let the grouped products of transformers be those that take fp64."""
    import transformers.integrations.moe

    with patch.object(transformers.integrations.moe, "_can_use_grouped_mm", lambda *given: False):
        yield


def _whole_rows(mode: Recorded, compares: bool) -> list[str]:
    return list(dict.fromkeys(line for pair in mode.seen for line in whole_rows(*pair, ROWS, compares)))


def _compiled_anew(compiled: spmd.CompiledStep, steps: int) -> list[str]:
    """A line if more was compiled than the first call and, where it makes state, the second."""
    count = len(compiled.programs)
    return [f"{count} programs were compiled in {steps} calls"] if count > 2 else []


def _not_finite(expected: list[Snapshot]) -> list[str]:
    """A line for each number of the plain step that is not finite: such a model shows nothing."""
    return [
        f"step {k} in one process: {name} is not finite"
        for k, snapshot in enumerate(expected)
        for name, value in snapshot.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all()
    ]


def distance(expected: Snapshot, got: Snapshot) -> float:
    """The largest difference of any two numbers."""
    pairs = [(want, got.get(name)) for name, want in expected.items() if isinstance(want, Tensor)]
    return max(
        (float((want.double() - have.double()).abs().max()) for want, have in pairs if _comparable(want, have)),
        default=0.0,
    )


def _comparable(want: Tensor, have: Any) -> bool:
    return isinstance(have, Tensor) and want.shape == have.shape and want.numel() > 0
