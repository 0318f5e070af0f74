"""``spmd.Auto``: the style that it takes, its line, its refusal, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import passes
import spmd
from passes import Pass, PassError, Program, RankFailedError
from passes.analysis.collective_algorithms import BUILT_IN
from passes.communication.bucket_sizes import MAX_BYTES
from passes.schedule.rates import BUILT_IN_CPU
from spmd.modes import adapt
from spmd.modes.adapt import corrected, ratios_of
from tests.harness.cases import NARROW
from tests.harness.fake import fake_world
from tests.harness.oracle import Case, all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow

COMPILES = {"stays": 1, "goes back": 2, "does not compile": 0}  # of calls that take another schedule


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def after_steps(mode: spmd.Auto, rows: int = 4, steps: int = 2) -> Any:
    """The step after two calls of rank 0 of four, so that its program has Adam's state."""
    with fake_world(4):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        optimizer = torch.optim.Adam(model.parameters())
        step = spmd.compile(train_step, parallel_mode=mode)
        for _ in range(steps):
            step(model, optimizer, torch.ones(rows, 256))
    return step


def note_of(step: Any) -> str:
    """The line of the last program."""
    return next(note for note in step.program.notes if note.startswith("spmd.Auto takes"))


@cache
def unlimited() -> tuple[spmd.Auto, Any]:
    """The mode without a budget, and its step."""
    mode = spmd.Auto()
    return mode, after_steps(mode)


def test_the_fastest_style_is_taken_and_kept() -> None:
    mode, step = unlimited()
    styles = ("replicate", "shard_optimizer", "fully_shard")
    figures = {style: float(note_of(step).split(f"{style} ")[1].split()[0]) for style in styles}
    assert mode.style == min(figures, key=figures.__getitem__)
    assert "the fastest by estimate" in note_of(step)


def test_a_budget_rules_styles_out() -> None:
    free, step = unlimited()
    note = note_of(step)
    sizes = {s: float(note.split(f"{s} ")[1].split(" and ")[1].split(" MB")[0]) for s in ("replicate", "fully_shard")}
    assert sizes["fully_shard"] < sizes["replicate"]
    assert free.style == "replicate"
    tight = spmd.Auto(memory=int((sizes["fully_shard"] + 0.5) * 1e6))
    assert "the fastest by estimate of those that fit" in note_of(after_steps(tight))
    assert tight.style == "fully_shard"


def test_what_fits_nowhere_is_refused_with_the_least_memory() -> None:
    with pytest.raises(spmd.MemoryBudgetError, match=r"with which \w+ runs, got 1.00 KB") as refused:
        after_steps(spmd.Auto(memory="1KB"))
    after_steps(spmd.Auto(memory=str(refused.value).partition("at least ")[2].partition(" per rank")[0]), steps=1)


def test_a_table_decides() -> None:
    """Where collectives cost a second each, the style with the fewest of them is taken."""
    links = tuple(
        replace(link, curves={k: tuple(replace(p, seconds=p.seconds + 1) for p in c) for k, c in link.curves.items()})
        for link in BUILT_IN.links
    )
    mode = spmd.Auto(table=passes.Table("slow", links, BUILT_IN.compute))
    after_steps(mode, steps=1)
    assert mode.style == "replicate"


class Estimating(spmd.Auto):
    """Notes what this rank estimates."""

    styles: tuple[str, ...] = ()

    def _made(self, style: str, program: Program) -> Any:
        self.styles += (style,)
        return super()._made(style, program)


def differs(rank: int, world: int, case: Case, left: str) -> tuple[list[str], str, tuple[str, ...]]:
    """``left``: the style that a call which was interrupted has left to the first rank alone."""
    mode = Estimating()
    mode.style = left if rank == 0 else ""
    _, got = compiled_run(rank, case, 5, parallel_mode=mode)
    return all_unequal(plain_run(case, world, 5), got, rank, world), mode.note, mode.styles


@pytest.mark.parametrize("left", ["", "shard_optimizer"])
def test_numbers_are_those_of_one_process_and_ranks_agree_on_what_each_estimated_a_part_of(
    ranks: Ranks, left: str
) -> None:
    (lines, note, styles), (other_lines, other_note, other_styles) = ranks.run(2, differs, NARROW, left)
    assert lines == other_lines == []
    assert note == other_note
    assert (styles, other_styles) == (("replicate", "fully_shard"), ("shard_optimizer",))


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match='or text such as "600MB"'):
        spmd.Auto(memory="much")


def test_ranks_add_up_what_they_measured_and_correct_the_table() -> None:
    mine, other = {"matmul": (1.0, 3.0), "memory": (1.0, 100.0)}, {"matmul": (1.0, 1.0), "communication": (0.0, 1.0)}
    ratios = ratios_of([mine, other])
    assert ratios == {"matmul": 2.0, "memory": 8.0}  # by no more than 8; nothing is known of communication
    assert ratios_of([other, mine]) == ratios
    program = unlimited()[1].program
    table = corrected(program, BUILT_IN, ratios | {"communication": 3.0})
    assert table.compute["matmul float32"] == BUILT_IN_CPU["matmul float32"] / 2
    (one, *_), (was, *_) = (next(iter(each.links[0].curves.values())) for each in (table, BUILT_IN))
    assert (one.bytes, one.seconds, one.cpu) == (was.bytes, 3 * was.seconds, 3 * was.cpu)


def losses(rank: int, mode: spmd.Auto) -> tuple[Any, list[float]]:
    """The step, and what its calls return, on rows of this rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step, draw = spmd.compile(train_step, parallel_mode=mode), torch.Generator().manual_seed(rank)
    rows = [torch.randn(4, 256, generator=draw, dtype=torch.float64) for _ in range(21)]
    return step, [float(step(model, optimizer, each)) for each in rows]


@dataclass(frozen=True)
class Refused(Pass):
    """A pass that does not run."""

    numerics = "exact"

    def rewrite(self, program: Program) -> int:
        raise PassError("expected another program")


Adapted = tuple[list[float], list[str], set[int]]


def adapts_in_each_way(rank: int, world: int) -> tuple[list[float], list[Adapted]]:
    """Losses without ``adapt``, and what comes out with it."""
    return losses(rank, spmd.Auto())[1], [adapts(rank, kind) for kind in COMPILES]


def adapts(rank: int, kind: str) -> Adapted:
    """Losses where other buckets are estimated better; the reasons, and the note; the sizes."""
    estimated = iter([1.0, 0.99, 0.5, 0.99, 0.99] if rank == 0 else [1.0, 0.5, 0.6, 0.99, 0.99])
    seconds = iter([1.0, 2.0 if kind == "goes back" else 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapt, "_seconds", lambda *_: next(estimated))
        patch.setattr(adapt.Adapting, "took", property(lambda _: next(seconds)))
        if kind == "does not compile" and rank == 0:
            found = adapt.alternatives
            patch.setattr(adapt, "alternatives", lambda *args: [(*each, Refused()) for each in found(*args)])
        mode = spmd.Auto(adapt=True)
        given = mode.custom_passes
        step, adapted = losses(rank, mode)
    reasons = [each.reason for each in step.recompiles().programs]
    sizes = {each.max_bytes for each in step._dispatch.programs.last.pipeline if hasattr(each, "max_bytes")}
    assert mode.custom_passes is given  # the user's mode, which other steps may share
    return adapted, [*reasons, step.program.notes[-1]], sizes


def test_another_schedule_takes_over_on_all_ranks_and_leaves_all_bits(ranks: Ranks) -> None:
    """It stays, goes back, or does not compile: it compiles twice at most; what one rank cannot compile, none runs."""
    found = ranks.run(2, adapts_in_each_way)
    for plain, in_each_way in found:
        for kind, (adapted, (*reasons, note), sizes) in zip(COMPILES, in_each_way, strict=True):
            assert adapted == plain
            assert [each.startswith("calls were measured") for each in reasons].count(True) == COMPILES[kind]
            assert sizes == ({MAX_BYTES // 25} if kind == "stays" else {MAX_BYTES})
            assert "another schedule is estimated to save 40%" in note
            assert ("back to the schedule before" in note) is (kind == "goes back")
            assert ("does not compile, and the one before stays" in note) is (kind == "does not compile")
    (_, one), (_, other) = found
    assert [reasons[:-1] for _, reasons, _ in one] == [reasons[:-1] for _, reasons, _ in other]


def called(adapting: adapt.Adapting, *identities: int) -> list[bool]:
    """Calls of these programs; whether each was due to decide before it ran."""
    due = []
    for identity in identities:
        due.append(adapting.is_due(identity))
        adapting.begin(identity, "cpu")
        adapting.end()
    return due


def test_a_change_is_judged_by_calls_of_its_own_program() -> None:
    """Those of another batch size say nothing of it, and come between them."""
    adapting = adapt.Adapting(BUILT_IN, (), before=1.0, changed=1)
    calls = adapt.SETTLES + adapt.TIMED
    assert not any(called(adapting, *[2, 1] * calls))
    assert not adapting.is_due(2) and adapting.is_due(1)
    assert adapting.took < 1.0


def test_programs_that_alternate_are_each_measured_and_not_for_ever() -> None:
    adapting = adapt.Adapting(BUILT_IN, ())
    calls = adapt.SETTLES + adapt.TIMED + adapt.PROFILED
    assert not any(called(adapting, *[2, 1] * (calls - 1), 2))
    assert adapting.is_due(2) and not adapting.is_due(1)
    adapting.restart()  # a call failed
    assert not adapting.is_due(2)
    called(adapting, *range(adapt.MOST))
    assert adapting.is_due(1)
    assert adapting.decide(*compiled(), None, lambda text: [text]) is None
    assert adapting.is_done and "no program ran often enough" in adapting.note
    called(adapting, *range(adapt.MOST))
    assert adapting.calls == adapt.MOST  # nothing is timed any more


def test_a_change_that_too_few_calls_ran_is_taken_back() -> None:
    adapting = adapt.Adapting(BUILT_IN, given := passes.default(), before=1.0, changed=1)
    called(adapting, 1, *[2] * adapt.MOST)
    assert adapting.is_due(1) and not adapting.is_due(2)
    adapting.is_due(1)
    assert adapting.decide(*compiled(), None, lambda text: [text]) is given
    assert "too few calls ran it: back" in adapting.note


def compiled() -> tuple[Any, Any]:
    program = unlimited()[1].program
    return program, program


def adapts_alone(rank: int, world: int) -> None:
    """Train with ``adapt`` on rank 0 only."""
    with pytest.raises(spmd.RankMismatchError, match=r"spmd.Auto\(adapt=True\)"):
        losses(rank, spmd.Auto(adapt=rank == 0))


def test_all_ranks_adapt_or_none(ranks: Ranks) -> None:
    ranks.run(2, adapts_alone)


def test_what_cannot_be_measured_is_not_adapted() -> None:
    with pytest.raises(ValueError, match="expected no micro_batches with adapt=True"):
        spmd.Auto(adapt=True, micro_batches=2)
    with pytest.raises(ValueError, match=r"expected no passes= with spmd.Auto\(adapt=True\)"):
        spmd.compile(train_step, parallel_mode=spmd.Auto(adapt=True), passes=())


def fails_at_the_end(rank: int, world: int) -> tuple[list[int], int]:
    """In which calls a rank raises where the first one does at the end of a call; how many it has counted then."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, raised = spmd.compile(train_step, parallel_mode=spmd.Auto(adapt=True)), []
    for k in range(5 + rank):  # the second one's call that fails is one more
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and k == 2:
                patch.setattr(step.runner.profile, "end", None)  # which is then not callable
            try:
                step(model, optimizer, torch.ones(2, 2))
            except (TypeError, RankFailedError):
                raised.append(k)
                step.recover()
    assert step.runner.adapting is not None
    return raised, step.runner.adapting.calls


def test_ranks_count_the_same_after_a_call_that_failed_on_one_when_others_had_ended_it(ranks: Ranks) -> None:
    assert ranks.run(2, fails_at_the_end) == [([2], 2), ([3], 2)]
