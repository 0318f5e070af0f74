"""Parameters that runs of a call gather, and gradients that they reduce: once in it, or in each run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes import Program
from passes.ir.micro_batches import ACCUMULATOR
from spmd.lowering.arenas import Arenas
from tests.harness.fake import fake_world


def regress(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled(width: int, memory: int | None = None, passes: Any = None, **options: Any) -> Any:
    """The step on the first of two ranks, after one call of four micro-batches."""
    layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)]
    model = nn.Sequential(*layers)
    with fake_world(2):
        mode = spmd.DataParallel("fully_shard", micro_batches=4, **options)
        step = spmd.compile(regress, parallel_mode=mode, memory=memory, passes=passes)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(8, 6), torch.zeros(8, 4))
    return step


@pytest.mark.parametrize(
    ("options", "gathers"),
    [
        ({"gather_parameters": "once", "reshard_after_forward": True}, 1),
        ({"gather_parameters": "each", "reshard_after_forward": False}, 4),
        ({"gather_parameters": "each", "reshard_after_forward": True}, 8),
    ],
)
def test_gathers_of_a_step(options: dict[str, Any], gathers: int) -> None:
    """Of all layers together, in four micro-batches, for forward and perhaps again for backward."""
    report = compiled(64, **options).report()
    assert report.count("all_gather") == gathers
    assert report.memory["cpu"].roles["gathered"] > 0
    assert ("gathered once and kept in" in " ".join(report.notes)) == (gathers == 1)


@pytest.mark.parametrize("how", ["once", None])
def test_runs_that_nothing_splits_gather_each_time_and_no_note_says_otherwise(how: str | None) -> None:
    report = compiled(16, passes=(), gather_parameters=how).report()
    notes = " ".join(report.notes)
    assert report.count("all_gather") > 4 and "once in a step is better" not in notes
    assert ("each micro-batch gathers parameters" in notes) == (how == "once")


def test_reductions_of_a_step() -> None:
    """Where each micro-batch reduces, a rank adds up its half of all gradients, instead of whole ones."""
    steps = [compiled(64, reduce_gradients=how, gather_parameters="each") for how in ("once", "each")]
    reports = [step.report() for step in steps]
    assert [report.count("reduce_scatter") for report in reports] == [1, 4]
    once, each = (accumulated(step.program) for step in steps)
    assert once == 2 * each > 0
    peaks = [report.memory["cpu"].peak for report in reports]
    assert peaks[0] - peaks[1] > 0.9 * each


def accumulated(program: Program) -> int:
    """Bytes of the accumulators of gradients."""
    pairs = zip(program.inputs, program.placeholders, strict=True)
    return sum(node.meta["val"].nbytes for each, node in pairs if each.role is ACCUMULATOR and each.shape)


def test_a_step_decides_by_time_and_memory() -> None:
    """Small layers wait for gathers more than they compute; what does not fit a budget gathers in each micro-batch."""
    step = compiled(512)
    (note,) = (each for each in step.report().notes if "by a first estimate" in each)
    assert note.startswith("to gather parameters once in a step is better ") and step.program.gathers_once
    found = re.search(r"memory: ([\d.]+) MB planned", " ".join(compiled(512, memory=10**9).report().notes))
    assert found is not None
    step = compiled(512, memory=int(float(found[1]) * 1e6) - 500_000)
    assert not step.program.gathers_once
    assert any("parameters are gathered in each micro-batch (" in each for each in step.report().notes)


def test_programs_of_a_step_share_what_runs_hand_on() -> None:
    """A program for evaluation, or for other batches, gathers into the memory of the first one."""
    arenas = Arenas()
    first = arenas.handed_on({1: torch.zeros(3), 2: torch.zeros(3), 3: torch.zeros(2)})
    other = arenas.handed_on({5: torch.zeros(3), 6: torch.zeros(3, dtype=torch.float64), 7: torch.zeros(3)})
    assert first[1] is not first[2] and other[5] is first[1] and other[7] is first[2]
