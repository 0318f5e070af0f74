"""Dumps: a numbered, runnable text file for every stage of every program, and rank 0's report."""

from __future__ import annotations

import ast
import errno
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from spmd import dump as dump_file
from tests.harness.cases import MLP
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow

CASE = MLP(sizes=(15, 17, 4), rows=6, optimizer="AdamW")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(rank: int, world: int, **options: Any) -> spmd.CompiledStep:
    step = spmd.compile(**options)(train_step)
    objects = CASE.build()
    for k in range(3):
        step(*objects, *CASE.part(rank, k))
    return step


def train_and_dump(rank: int, world: int, folder: Path) -> None:
    train(rank, world, dump=folder / f"rank-{rank}")


def check(folder: Path) -> None:
    """One program, every stage in order, every file Python."""
    (program,) = (path for path in folder.iterdir() if path.is_dir())
    names = sorted(path.name for path in program.iterdir())
    numbers = [int(name[:2]) for name in names if name.endswith(".py")]
    assert names[:2] == ["00_capture.py", "01_partition.py"] and names[-5] == "99_lowered.py"
    assert names[-4:] == ["assignment.txt", "nodes.json", "report.json", "timeline.json"]
    assert spmd.Assignment.read((program / "assignment.txt").read_text()).choices
    assert numbers == [*range(len(numbers) - 1), 99] and len(numbers) > 3
    assert all(isinstance(json.loads((program / name).read_text()), dict) for name in names[-3:])
    for path in program.glob("*.py"):
        compile(path.read_text(), path.name, "exec")


def test_rank_zero_alone_writes_every_stage(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, train_and_dump, tmp_path)
    check(tmp_path / "rank-0" / "train_step")
    assert not (tmp_path / "rank-1").exists()


@pytest.mark.usefixtures("alone")
def test_the_environment_variable_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_DUMP", str(tmp_path))
    train(0, 1)
    check(tmp_path / "train_step")


@pytest.mark.usefixtures("alone")
def test_programs_can_be_dumped_afterwards(tmp_path: Path) -> None:
    train(0, 1).dump(tmp_path)
    assert list(tmp_path.rglob("program-0/00_capture.py"))
    assert list(tmp_path.rglob("program-0/99_lowered.py"))


@pytest.mark.usefixtures("alone")
def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPMD_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    train(0, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alone")
def test_a_dump_speaks_the_user_s_words(tmp_path: Path) -> None:
    train(0, 1, dump=tmp_path)
    text = (tmp_path / "train_step" / "program-0" / "00_capture.py").read_text()
    for word in ("model.0.weight", "optimizer.exp_avg[model.0.weight]", "loss = F.mse_loss(model(x), y)", "f64"):
        assert word in text
    assert ast.parse(text).body


def test_a_dump_names_mesh_axes(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, train_and_dump, tmp_path)
    assert "dp" in (tmp_path / "rank-0" / "train_step" / "program-0" / "01_partition.py").read_text()


def double(x: Tensor) -> Tensor:
    return 2 * x


def programs_in(folder: Path) -> dict[str, int]:
    """How many programs each step's folder has."""
    return {each.name: len(list(each.glob("program-*/99_lowered.py"))) for each in folder.iterdir()}


@pytest.mark.usefixtures("alone")
def test_steps_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    steps = [spmd.compile(dump=tmp_path)(double) for _ in range(2)]
    for size in (2, 3):
        for step in steps:
            step(torch.ones(size))
    spmd.compile(dump=tmp_path)(double)(torch.ones(2))
    assert programs_in(tmp_path) == {"double": 2, "double-2": 2, "double-3": 1}
    steps[1].dump(tmp_path)
    assert programs_in(tmp_path) == {"double": 2, "double-2": 2, "double-3": 1}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("running", [True, False])
def test_a_running_job_keeps_its_files(tmp_path: Path, running: bool) -> None:
    """Pytest is a child of a process that runs; no process has the other number."""
    theirs = tmp_path / "double" / "program-0"
    theirs.mkdir(parents=True)
    (theirs / "00_capture.py").write_text("theirs")
    owner = dump_file._job(os.getppid()) if running else dump_file._job(os.getpid()).replace(str(os.getpid()), "1" * 9)
    (tmp_path / "double" / ".job").write_text(owner)
    spmd.compile(dump=tmp_path)(double)(torch.ones(2))
    assert ((theirs / "00_capture.py").read_text() == "theirs") is running
    assert (tmp_path / "double-2").exists() is running


def train_with_a_bad_folder(rank: int, world: int, folder: Path) -> tuple[list[str], list[float]]:
    """A file stands where the folder should be."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = spmd.compile(dump=folder)(train_step)
        objects = CASE.build()
        losses = [step(*objects, *CASE.part(rank, k)).item() for k in range(3)]
    return [str(each.message) for each in caught if "dump" in str(each.message)], losses


def test_a_dump_that_cannot_be_written_warns_once_and_training_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (first, losses), (second, same) = ranks.run(2, train_with_a_bad_folder, tmp_path / "file")
    assert len(first) == 1 and "train_step is not complete" in first[0] and second == []
    assert losses == same


@pytest.mark.usefixtures("alone")
def test_a_disk_that_is_full_ends_the_dump_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if path.name.startswith("01"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    step = spmd.compile(dump=tmp_path)(double)
    with pytest.warns(UserWarning, match="No space left") as caught:
        for size in (2, 3):
            assert torch.equal(step(torch.ones(size)), torch.full((size,), 2.0))
    assert len(caught) == 1
    assert sorted(path.name for path in (tmp_path / "double" / "program-1").iterdir()) == ["00_capture.py"]
