"""``spmd verify FILE:STEP``: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmd.cli.commands import main

FILE = """
import torch, spmd
from torch.nn import functional as F
import passes

class LosesAnUpdate(passes.Pass):
    def rewrite(self, program):
        update = next(k for k, each in enumerate(program.outputs) if each.name == "model.weight")
        values = list(program.output_values())
        values[update] = program.placeholders[program.positions()["model.weight"]]
        program.output_node.args = (tuple(values),)
        return 1

def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

raises = spmd.compile(lambda model, optimizer, x: {}["no such key"])
refused = spmd.compile(lambda model, optimizer, x: float(model(x).detach().sum()) > 0 and model(x))
right, wrong = spmd.compile(step), spmd.compile(step, passes=(LosesAnUpdate(),))

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    @spmd.compile
    def train(self, x):
        return step(self.model, self.optimizer, x)

trainer = Trainer(*(made := torch.nn.Linear(4, 2), torch.optim.SGD(made.parameters(), lr=0.1)))

def rows():
    return torch.randn(8, 4)

def trainer_and_rows():
    return trainer, rows()

def example_args():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trains_a_line.py"
    path.write_text(FILE)
    return path


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["verify", *argv])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_right_step_ends_with_zero(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{file}:right", "--mesh", "dp=2", "--steps", "2") == 0
    assert "step agrees" in capsys.readouterr().out


@pytest.mark.parametrize("which, args", [("trainer.train", "rows"), ("Trainer.train", "trainer_and_rows")])
def test_a_method_is_verified(file: Path, which: str, args: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{file}:{which}", "--args", args, "--world", "2", "--steps", "2") == 0
    assert "train agrees" in capsys.readouterr().out


def test_a_wrong_step_ends_with_one_and_names_the_pass(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{file}:wrong", "--world", "2", "--steps", "1", "--json") == 1
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["agrees"]
    assert (verdict["stage"], verdict["what"]) == ("LosesAnUpdate", "model.weight")
    assert verdict["expected"] != verdict["actual"]


def test_a_step_is_certified(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{file}:right", "--world", "64", "--certify") == 0
    assert "is the global output under its placement" in capsys.readouterr().out
    assert run(f"{file}:wrong", "--world", "2", "--certify", "--json") == 1
    certificate = json.loads(capsys.readouterr().out)
    assert (certificate["outcome"], certificate["what"]) == ("wrong", "model.weight")


@pytest.mark.parametrize(
    "argv, says",
    [
        (["trains_a_line.py"], "FILE:STEP"),
        (["nowhere.py:step"], "trains_a_line.py"),
        (["trains_a_line.py:step"], "right, wrong"),
        (["trains_a_line.py:raises"], "no such key"),
        (["trains_a_line.py:refused"], "trains_a_line.py"),
        (["trains_a_line.py:right", "--args", "batch"], "example_args"),
        (["trains_a_line.py:right", "--mesh", "two"], "dp=2,tp=2"),
        (["trains_a_line.py:right", "--world", "17"], "16 ranks"),
    ],
)
def test_what_is_wrong_is_named(
    argv: list[str], says: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    assert run(*argv) == 2
    assert says in " ".join(capsys.readouterr().err.split())
