"""``spmd.Auto``: the style that it takes, its line, its refusal, and its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import passes
import spmd
from passes.analysis.collective_algorithms import BUILT_IN
from tests.harness.cases import MLP, NARROW
from tests.harness.fake import fake_world
from tests.harness.oracle import Case, all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow


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


def test_the_fastest_style_is_taken_and_kept() -> None:
    mode = spmd.Auto()
    step = after_steps(mode)
    styles = ("replicate", "shard_optimizer", "fully_shard")
    figures = {style: float(note_of(step).split(f"{style} ")[1].split()[0]) for style in styles}
    assert mode.style == min(figures, key=figures.__getitem__)
    assert "the fastest by estimate" in note_of(step)


def test_a_budget_rules_styles_out() -> None:
    free = spmd.Auto()
    note = note_of(after_steps(free))
    sizes = {s: float(note.split(f"{s} ")[1].split(" and ")[1].split(" MB")[0]) for s in ("replicate", "fully_shard")}
    assert sizes["fully_shard"] < sizes["replicate"]
    assert free.style == "replicate"
    tight = spmd.Auto(memory=int((sizes["fully_shard"] + 0.5) * 1e6))
    assert "the fastest by estimate of those that fit" in note_of(after_steps(tight))
    assert tight.style == "fully_shard"


def test_what_fits_nowhere_is_refused_with_the_least_memory() -> None:
    with pytest.raises(spmd.MemoryBudgetError, match=r"at least \d+.\d+ MB per rank, with which \w+ runs, got"):
        after_steps(spmd.Auto(memory="100KB"))


def test_a_table_decides() -> None:
    """Where collectives cost a second each, the style with the fewest of them is taken."""
    links = tuple(
        replace(link, curves={k: tuple(replace(p, seconds=p.seconds + 1) for p in c) for k, c in link.curves.items()})
        for link in BUILT_IN.links
    )
    mode = spmd.Auto(table=passes.Table("slow", links, BUILT_IN.compute))
    after_steps(mode, steps=1)
    assert mode.style == "replicate"


def differs(rank: int, world: int, case: Case, options: dict[str, Any]) -> tuple[list[str], str]:
    mode = spmd.Auto(**options)
    _, got = compiled_run(rank, case, 5, parallel_mode=mode)
    return all_unequal(plain_run(case, world, 5), got, rank, world), mode.style


@pytest.mark.parametrize("case", [NARROW, MLP(optimizer="AdamW")], ids=["uneven", "even"])
def test_numbers_are_those_of_one_process_and_ranks_agree(ranks: Ranks, case: Case) -> None:
    found = ranks.run(2, differs, case, {})
    assert [lines for lines, _ in found] == [[], []]
    assert len({style for _, style in found}) == 1


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match='or text such as "600MB"'):
        spmd.Auto(memory="much")
