"""A checkpoint is complete or not there: killed anywhere, on a full disk, with damaged files."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Shard

import spmd
from spmd.checkpoints import save as save_module
from spmd.checkpoints import storage
from tests.harness.pool import RankError, Ranks

from .runs import Run, unequal


def save(folder: Path, value: float, step: int | None = None, keep: int | None = None) -> None:
    spmd.save(folder, step=step, keep=keep, state={"tensor": torch.full((4,), value), "number": value})


def load(folder: Path) -> tuple[int | None, float]:
    got: dict[str, Any] = {}
    step = spmd.load(folder, state=got)
    assert got["tensor"].tolist() == [got["number"]] * 4
    return step, got["number"]


def test_the_newest_complete_step_is_loaded(tmp_path: Path) -> None:
    for step in (1, 12, 3):
        save(tmp_path, step, step)
    assert load(tmp_path) == (12, 12)
    assert load(tmp_path / "step-3") == (3, 3)
    (tmp_path / "step-12" / "checkpoint.json").unlink()
    (tmp_path / "step-20" / "data-0").mkdir(parents=True)
    assert load(tmp_path) == (3, 3)
    with pytest.raises(FileNotFoundError, match="there is no complete checkpoint"):
        load(tmp_path / "step-20")


def under_a_file(rank: int, world: int, folder: Path) -> list[str]:
    """The errors of what writes to a folder that cannot be made."""
    file, errors, model = folder / "file", [], torch.nn.Linear(2, 2)
    writes: list[Callable[[], Any]] = [
        lambda: spmd.save(file, model=model),
        lambda: spmd.save(file / "below", step=3, model=model),
        lambda: spmd.save(file, step=3, wait=False, model=model),
        lambda: spmd.export(file, model),
        lambda: spmd.compile(lambda x: x + 1).record(file),
    ]
    for write in writes:
        with pytest.raises(spmd.SpmdError, match=r"expected a .*folder .*: .*Not a directory") as refused:
            write()
        errors.append(str(refused.value).split(" ")[0])
    return errors


def test_a_folder_that_cannot_be_made_is_our_error(tmp_path: Path, ranks: Ranks, alone: None) -> None:
    """On one rank and on all of several."""
    (tmp_path / "file").touch()
    assert len(under_a_file(0, 1, tmp_path)) == 5
    assert len({*map(len, ranks.run(2, under_a_file, tmp_path))}) == 1


def test_keep_removes_what_is_older_and_incomplete(tmp_path: Path) -> None:
    (tmp_path / "step-1" / "data-0").mkdir(parents=True)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "notes.txt").touch()
    for step in (3, 4, 5):
        save(tmp_path, step, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4", "step-5"]
    save(tmp_path, 4.5, 4, keep=1)  # a run that went back: what is ahead of it stays
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4", "step-5"]


@pytest.mark.processes
@pytest.mark.parametrize("keep", [None, 1], ids=["over the one before", "the one before goes"])
def test_killed_at_any_moment_either_checkpoint_is_whole(keep: int | None, tmp_path: Path) -> None:
    """A child process saves over a checkpoint, or a newer one, and ends at its n-th operation on files."""
    steps = (1, 2, 3) if keep else (None, None, None)
    outcomes = []
    for moment in range(100):
        folder = tmp_path / str(moment)
        save(folder, 1, steps[0], keep)
        child = os.fork()
        if child == 0:
            _end_at(moment)
            save(folder, 2, steps[1], keep)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes.append(load(folder)[1])
        if status == 0:
            break
        assert status == 9
        save(folder, 3, steps[2], keep)  # what was left is no hindrance, and goes
        assert load(folder)[1] == 3 and len([*folder.iterdir()]) == (1 if keep else 2)
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2} and len(outcomes) > 6


def _end_at(moment: int) -> None:
    left = [moment]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return call(*args, **kwargs)

        return counts

    for owner, name in (
        (os, "replace"), (os, "fsync"), (Path, "mkdir"), (Path, "open"), (shutil, "rmtree"), (Path, "write_bytes"),
        (Path, "unlink"), (Path, "rmdir"), (os, "open"), (os, "write"), (os, "ftruncate"),
    ):  # fmt: skip
        setattr(owner, name, counted(getattr(owner, name)))


def test_a_load_that_fails_halfway_blocks_training_until_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    model = torch.nn.Linear(2, 3)
    step = spmd.compile(lambda model, x: model(x).sum())
    step(model, torch.ones(4, 2))
    spmd.save(tmp_path, model=model, state={"tensor": torch.ones(4)})
    with monkeypatch.context() as patched:
        patched.setattr(HuggingFaceStorageReader, "read_data", full)
        with pytest.raises(spmd.SpmdError, match="No space left"):
            spmd.load(tmp_path, state={})
        step(model, torch.ones(4, 2))  # which has nothing to do with it
        with pytest.raises(spmd.SpmdError, match="No space left"):
            spmd.load(tmp_path, model=model)
    with pytest.raises(spmd.SpmdError, match="partly updated"):
        step(model, torch.ones(4, 2))
    with pytest.raises(spmd.SpmdError, match="cannot be saved"):
        spmd.save(tmp_path, model=model)
    spmd.load(tmp_path, model=model)
    step(model, torch.ones(4, 2))
    spmd.save(tmp_path, model=model)


@pytest.mark.parametrize("name", ["checkpoint.json", "values.pt", "safetensors"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    (file,) = tmp_path.rglob(f"*{name}")
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    with pytest.raises(spmd.SpmdError, match=f"{file.name} .*damaged"):
        load(tmp_path)
    file.write_bytes(b"\xff" * len(content))
    with pytest.raises(spmd.SpmdError, match=f"{file.name} .*damaged"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["values.pt", "shard-00001-00001.safetensors"])
def test_a_file_of_another_save_is_named(name: str, tmp_path: Path) -> None:
    """Of the same length, with tensors of the same names."""
    save(tmp_path, 1, step=1)
    save(tmp_path, 2, step=2)
    (one,), (other,) = (tmp_path.glob(f"step-{step}/data-*/{name}") for step in (1, 2))
    assert one.stat().st_size == other.stat().st_size
    shutil.copy(one, other)
    with pytest.raises(spmd.SpmdError, match=rf"{other} is not the file that was saved there, but .*{one.parent.name}"):
        load(tmp_path)
    assert load(tmp_path / "step-1") == (1, 1)


def in_parts(rank: int, world: int, folder: Path) -> None:
    parts = DTensor.from_local(torch.full((2,), float(rank)), spmd.world(), [Shard(0)], run_check=False)
    spmd.save(folder, parts=parts)


def test_parts_that_have_changed_places_are_named(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, in_parts, tmp_path)
    got = torch.zeros(6)
    spmd.load(tmp_path, parts=got)
    assert got.tolist() == [0, 0, 1, 1, 2, 2]
    one, other, _ = sorted(tmp_path.glob("data-*/*.safetensors"))
    assert one.stat().st_size == other.stat().st_size
    shutil.copy(one, other)  # what is in no file would be left as it is
    with pytest.raises(spmd.SpmdError, match=f"{other} is not the file that was saved there, but .*{one.name}"):
        spmd.load(tmp_path, parts=got)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": ["a"]}', "{}"])
def test_a_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(spmd.SpmdError, match=r"model.safetensors.index.json is damaged, or no index"):
        spmd.load(tmp_path, model=torch.nn.Linear(2, 3))


def full(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def disk_full(rank: int, world: int, folder: Path) -> tuple[str, int | None, list[str]]:
    """What a save raises of which one rank cannot write; the step that loads after training on, and what is wrong."""
    run = Run("fully_shard")
    run.train(rank, 0, 1)
    expected = run.state()
    spmd.save(folder, step=1, **run.objects)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(storage, "save_file", full)
        with pytest.raises(spmd.SpmdError) as raised:
            spmd.save(folder, step=2, keep=1, **run.objects)
    run.train(rank, 1, 2)
    assert len(run.step.programs) == 1  # the connection is the same, and nothing was compiled
    step = spmd.load(folder, **run.objects)
    return str(raised.value), step, unequal(expected, run.state())


def test_a_rank_that_cannot_write_raises_on_all(ranks: Ranks, tmp_path: Path) -> None:
    message = f"saving {tmp_path}/step-2 failed: OSError: [Errno 28] No space left on device (on rank 1)"
    assert ranks.run(2, disk_full, tmp_path) == [(message, 1, [])] * 2
    assert not [*tmp_path.glob("step-2/data-*")]


def cannot_write(rank: int, world: int, folder: Path, which: int) -> tuple[str, float]:
    """What a save raises where the system stops the files of one rank after some bytes; and what loads after that."""
    state = {"tensor": torch.ones(4), "number": 1.0}
    spmd.save(folder, step=1, keep=1, state=state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == which:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(spmd.SpmdError) as raised:
            parts = DTensor.from_local(torch.ones(2000), spmd.world(), [Shard(0)], run_check=False)
            spmd.save(folder, step=2, keep=1, state=state | {"parts": parts, "text": "a" * 4000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(raised.value), load(folder)[1]


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_the_system_ends_halfway_fails_on_all(which: int, ranks: Ranks, tmp_path: Path) -> None:
    (message, loaded), other = ranks.run(2, cannot_write, tmp_path, which)
    assert other == (message, loaded) and loaded == 1
    assert message.startswith(f"saving {tmp_path}/step-2 failed: ") and message.endswith(f"(on rank {which})")
    assert "File too large" in message
    assert not [*tmp_path.glob("step-2/*")]


def lost_file(rank: int, world: int, folder: Path) -> tuple[list[str], list[str]]:
    """What a load raises of which one rank cannot read, and a step and a save after it; what then loads otherwise."""
    run = Run("replicate")
    run.train(rank, 0, 1)
    expected = run.state()
    spmd.save(folder, **run.objects)
    messages = []
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(HuggingFaceStorageReader, "read_data", full)
        with pytest.raises(spmd.SpmdError) as raised:
            spmd.load(folder, **run.objects)
        messages.append(str(raised.value))
    for call in (lambda: run.train(rank, 1, 2), lambda: spmd.save(folder, **run.objects)):
        with pytest.raises(spmd.SpmdError) as raised:
            call()
        messages.append(str(raised.value))
    spmd.load(folder, **run.objects)
    spmd.save(folder, **run.objects)
    return messages, unequal(expected, run.state())


def test_state_of_a_load_that_failed_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for (loading, training, saving), wrong in ranks.run(2, lost_file, tmp_path):
        assert loading == "rank 1 raised OSError: [Errno 28] No space left on device"
        assert "partly updated" in training and "partly updated" in saving
        assert wrong == []


def killed(rank: int, world: int, moment: str, folder: Path) -> None:
    spmd.save(folder, step=1, state={"tensor": torch.ones(4), "number": 1.0})

    def end(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and moment == "while it writes":
        storage.save_file = end
    if rank == 1 and moment == "at the end":
        save_module.write = lambda *args: end(storage.write(*args))  # type: ignore[attr-defined]
    spmd.save(folder, step=2, keep=1, state={"tensor": torch.ones(4) * 2, "number": 2.0, "more": torch.ones(9)})


@pytest.mark.parametrize("moment, newest", [("while it writes", 1), ("at the end", 2)])
def test_a_rank_that_dies_within_a_save_is_named(ranks: Ranks, moment: str, newest: int, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"exit code -9[^$]*RankFailedError: .*rank 1"):
        ranks.run(2, killed, moment, tmp_path)
    assert load(tmp_path) == (newest, newest)


def unlike(rank: int, world: int, folder: Path) -> list[str]:
    """What is raised where ranks differ: in values, tensors, names, what cannot be saved, and shapes at a load."""
    states: list[dict[str, Any]] = [
        {"data": {"place": rank}},
        {"data": torch.ones(3) * (1 + rank)},
        {"a" if rank else "b": 1},
        {"data": {"place": object if rank else 0}},
    ]
    messages = []
    for state in states:
        with pytest.raises((ValueError, TypeError)) as raised:
            spmd.save(folder, **state)
        messages.append(str(raised.value))
    spmd.save(folder, data=torch.ones(3))
    with pytest.raises(ValueError) as raised:
        spmd.load(folder, data=torch.ones(3 + rank))
    return [*messages, str(raised.value)]


def test_ranks_that_differ_all_raise_the_same(ranks: Ranks, tmp_path: Path) -> None:
    one, other = ranks.run(2, unlike, tmp_path)
    assert one == other
    assert "rank 0 has data.place = 0, and rank 1 has data.place = 1" in one[0]
    assert "rank 0 has data = torch.float32[3]" in one[1]
    assert "rank 0 has b = 1, and rank 1 has a = 1" in one[2]
    assert one[3].startswith("data.place cannot be saved") and one[3].endswith("(on rank 1)")
    assert "data: shape [3] in the checkpoint, [4] here" in one[4]
