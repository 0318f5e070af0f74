"""``spmd plan FILE:STEP`` and ``spmd.plan``: what they find, print, and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd.cli.commands import main

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


def test_layouts_are_ordered_and_the_same_each_time() -> None:
    found, again = plan(), plan()
    assert str(found) == str(again)
    seconds = [each.estimate.seconds for each in found.layouts]
    assert seconds == sorted(seconds)
    assert {each.layout.style for each in found.layouts} == {"replicate", "shard_optimizer", "fully_shard"}
    assert len(found.why()) == 3


def test_rows_and_hosts_decide_which_layouts_there_are() -> None:
    found = plan(rows=64, gpus=16, per_host=4)
    assert any(each.layout.shard == 4 for each in found.layouts)
    assert all(each.layout.rows * each.layout.micro_batches * 16 == 64 for each in found.layouts)
    with pytest.raises(ValueError, match="rows divide among 32 GPUs, got 16 rows"):
        plan(rows=16, gpus=32)


def test_a_model_that_fits_nowhere_is_described_by_how_much() -> None:
    found = plan(memory="10KB")
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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trains_blocks.py"
    path.write_text(FILE)
    return path


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


def test_json_has_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{file}:train_step", "--gpus", "8", "--json", "--top", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layouts"]) == 2
    first = found["layouts"][0]
    assert sum(first["seconds_by_cause"].values()) == pytest.approx(first["seconds"])
    assert first["tokens_per_second"] == pytest.approx(16 * TOKENS / first["seconds"])


def test_it_ends_with_one_where_nothing_fits_and_two_for_a_wrong_argument(file: Path) -> None:
    assert run(f"{file}:train_step", "--gpus", "8", "--memory", "10KB") == 1
    assert run(f"{file}:other", "--gpus", "8") == 2
    assert run(f"{file}:train_step", "--gpus", "7") == 2
