"""``spmd check FILE:STEP``: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spmd.cli.commands import main

FILE = """
import torch, spmd

print("the file prints")

def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

clean = spmd.compile(step)

@spmd.compile
def refused(model, optimizer, x):
    loss = step(model, optimizer, x)
    if int(loss) > 0:
        print(float(loss))
    return loss

def example_args():
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)

def raises():
    raise KeyError("no data")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(FILE)
    return path


def ends_with(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *words])
    return ended.value.code


def test_a_clean_step_ends_with_0(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with("train.py:clean", "--mode", "replicate", "--mode", "fully_shard", "--world", "4") == 0
    out = capsys.readouterr().out
    assert out.splitlines() == ["step, replicate, 4 ranks: compiles", "step, fully_shard, 4 ranks: compiles"]


def test_refusals_end_with_1_each_with_its_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with("train.py:refused", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    (mode,) = found["modes"]
    assert (found["step"], found["world"], found["compiles"], mode["mode"]) == ("refused", 2, False, "replicate")
    assert [(each["file"], each["line"]) for each in mode["refusals"]] == [("train.py", 18), ("train.py", 19)]
    assert [each["source"] for each in mode["refusals"]] == ["if int(loss) > 0:", "print(float(loss))"]
    assert ends_with("train.py:refused", "--mesh", "dp=2,tp=2") == 1
    assert "train.py:18: refused, CaptureError, the value of a tensor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py:step"], "there is no file none.py"),
        (["train.py"], "expected FILE:STEP, such as train.py:train_step, got 'train.py'"),
        (["train.py:train"], "train.py has no compiled step 'train'; it has clean, refused"),
        (["train.py:clean", "--args", "batch"], "train.py has no function 'batch'"),
        (["train.py:clean", "--mode", "sharded"], "argument --mode: invalid choice: 'sharded'"),
        (["train.py:clean", "--world", "0"], "expected world to be 1 rank or more, got 0"),
        (["train.py:clean", "--world", "3", "--mesh", "dp=2"], "the mesh has 2 ranks, but world=3"),
        (["train.py:clean", "--mesh", "dp"], "expected --mesh as axes with their sizes"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert ends_with(*words) == 2
    out, error = capsys.readouterr()
    assert message in error and not out and "Traceback" not in error


def test_an_error_of_the_file_is_shown_with_its_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with("train.py:clean", "--args", "raises") == 2
    assert 'raise KeyError("no data")' in capsys.readouterr().err


def test_the_documents_show_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    section = text[text.index("## Before a launch") :]
    (code,), (shown,) = (re.findall(rf"```{kind}\n(.*?)```", section, re.S) for kind in ("python", "text"))
    (tmp_path / "train.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "118")
    command, printed = shown.split("\n", 1)
    assert ends_with(*command.removeprefix("$ spmd check ").split()) == 1
    assert "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines()) == printed
