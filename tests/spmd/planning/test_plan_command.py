"""``spmd plan FILE:STEP`` and ``spmd.plan``: what they find, print, and refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import spmd
from passes.schedule.gpus import GPUS
from spmd.cli import plan_command
from spmd.cli.commands import main
from spmd.planning.capture import partitioned
from spmd.planning.estimate import estimate
from spmd.planning.fitted import CONSTANTS
from spmd.planning.layout import Layout
from spmd.planning.machine import Machine, Software
from spmd.planning.search import recomputed, search
from spmd.planning.step_work import CapturedStep
from spmd.verification.world import simulated_world

from .test_kernels import TOKENS, model, train_step

pytestmark = pytest.mark.slow

FILE = """
import torch, spmd
from tests.spmd.planning.test_kernels import model, train_step

def example_args():
    made = model(4)
    return made, torch.optim.Adam(made.parameters()), torch.zeros(16, 8, dtype=torch.long)
"""


def plan(step: Any = train_step, rows: int = 16, **options: Any) -> spmd.Plans:
    made = model(4)
    text = torch.zeros(rows, TOKENS, dtype=torch.long)
    return spmd.plan(step, made, torch.optim.Adam(made.parameters()), text, **{"gpus": 8, **options})


@cache
def captured() -> CapturedStep:
    made = model(4)
    text = torch.zeros(16, TOKENS, dtype=torch.long)
    return CapturedStep(train_step, (made, torch.optim.Adam(made.parameters()), text), {})


def searched(gpus: int = 8, memory: int | str | None = None, per_host: int = 8, rows: int = 16) -> spmd.Plans:
    return search(captured(), gpus, "H100", per_host, memory, rows, 100)


def test_layouts_are_ordered_and_the_same_each_time() -> None:
    found = plan(top=100)
    assert str(found) == str(searched())
    seconds = [each.estimate.seconds for each in found.layouts]
    assert seconds == sorted(seconds)
    assert {each.layout.style for each in found.layouts} == {"replicate", "shard_optimizer", "fully_shard"}
    assert len(found.why()) == 3


def test_rows_and_hosts_decide_which_layouts_there_are() -> None:
    found = searched(16, None, 4, rows=64)
    assert any(each.layout.shard == 4 for each in found.layouts)
    assert all(each.layout.rows * each.layout.micro_batches * 16 == 64 for each in found.layouts)
    with pytest.raises(ValueError, match="rows divide among 24 GPUs, got 16 rows"):
        searched(24)


def test_a_model_that_fits_nowhere_is_described_by_how_much() -> None:
    found = searched(memory="10KB")
    assert not found
    assert "no layout fits into 0.0 GB of a H100: the least is" in found.missing()
    assert found.to_dict()["missing"] == found.missing()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gpu": "T1000"}, "expected a GPU with published figures, one of V100, A100"),
        ({"gpus": 0}, "expected gpus to be a number, 1 or more, got 0"),
        ({"gpus": 12, "per_host": 8}, "expected gpus to fill hosts of 8, got 12"),
        ({"step": spmd.compile(parallel_mode=spmd.DTensorExpand())(train_step.function)}, "a step with DataParallel"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**options)


def test_a_function_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(TypeError, match="decorate it with"):
        spmd.plan(train_step.function, nn.Linear(2, 2), gpus=8)


@pytest.mark.parametrize("kind", ["context", "shard", "recompute", "stages"])
def test_modes_run_as_they_are_pasted(kind: str) -> None:
    found = searched(8, "100KB" if kind == "recompute" else None, 4)
    tests: dict[str, Callable[[Layout], bool]] = {
        "context": lambda each: each.context > 1,
        "shard": lambda each: each.shard == 4,
        "recompute": lambda each: each.recompute == "full",
        "stages": lambda each: each.stages > 1,  # with micro-batches, and with a divided optimizer
    }
    candidates = [*found.layouts, *found.front, *filter(None, [found.staged])]
    chosen = next(each for each in candidates if tests[kind](each.layout))
    text = found.python(chosen).replace('"cuda"', '"cpu"')
    made: dict[str, Any] = {"spmd": spmd, "init_device_mesh": init_device_mesh, "step": train_step.function}
    blocks = model(4)
    rows = 16 // (chosen.layout.data // chosen.layout.context)
    args = (blocks, torch.optim.Adam(blocks.parameters()), torch.zeros(rows, TOKENS, dtype=torch.long))
    with simulated_world(8, None, "cpu"):
        exec(text, made)
        program = partitioned(made["step"], lambda _: made["mode"], args, {}, {"dp": 8})
    assert math.prod(axis.size for axis in program.mesh.axes) == 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trains_blocks.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FILE holds is captured already."""
    monkeypatch.setattr(plan_command, "CapturedStep", lambda *_: captured())


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *argv])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_table_and_the_mode_are_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{file}:train_step", "--gpus", "8", "--gpu", "A100") == 0
    out = capsys.readouterr().out
    assert "8 A100, 8 a host, 16 rows a step" in out
    assert "mode = spmd.DataParallel(" in out


@pytest.mark.usefixtures("known")
def test_json_has_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{file}:train_step", "--gpus", "8", "--json", "--top", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layouts"]) == 2
    first = found["layouts"][0]
    assert sum(first["seconds_by_cause"].values()) == pytest.approx(first["seconds"])
    assert first["tokens_per_second"] == pytest.approx(16 * TOKENS / first["seconds"])


@pytest.mark.usefixtures("known")
def test_it_ends_with_one_where_nothing_fits_and_two_for_a_wrong_argument(file: Path) -> None:
    assert run(f"{file}:train_step", "--gpus", "8", "--memory", "10KB") == 1
    assert run(f"{file}:other", "--gpus", "8") == 2
    assert run(f"{file}:train_step", "--gpus", "7") == 2


@pytest.mark.usefixtures("known")
def test_machines_are_compared_in_a_table_and_on_a_page(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = file.with_name("plans.html")
    assert run(f"{file}:train_step", "--gpus", "4..16", "--gpu", "A100,H100", "--page", str(page)) == 0
    out = capsys.readouterr().out
    assert [line.split("│")[1].strip() for line in out.splitlines() if "│" in line] == [
        f"{gpus} {gpu}" for gpu in ("A100", "H100") for gpus in (4, 8, 16)
    ]
    text = page.read_text()
    assert text.count("<svg") == 6
    assert "mode = spmd.DataParallel(" in text
    assert plan_command._counts("4,16..64,6") == [4, 16, 32, 64, 6]
    for wrong in ("many", "64..8", "8..", "4,"):
        assert run(f"{file}:train_step", "--gpus", wrong) == 2
    capsys.readouterr()
    assert run(f"{file}:train_step", "--gpus", "8", "--page", str(file.with_name("none") / "plans.html")) == 2
    assert "expected a file that can be written" in capsys.readouterr().err


def test_no_more_blocks_are_recomputed_than_memory_asks_for() -> None:
    fastest, work = searched(1, rows=2).best, captured().of().work
    assert fastest is not None and fastest.layout.recompute == "none"
    machine = Machine(GPUS["H100"], "H100", 8, Software(), CONSTANTS)
    whole = [estimate(work, replace(fastest.layout, recompute=each), machine).peak for each in ("none", "full")]
    assert whole[1] < whole[0]
    memory = int(0.3 * whole[1] + 0.7 * whole[0])
    (found,) = recomputed(work, fastest.layout, machine, memory)
    assert found.estimate.peak <= memory
    assert found.layout.recomputed == 0.5  # of 4 blocks: one saves less than it should, and three more
