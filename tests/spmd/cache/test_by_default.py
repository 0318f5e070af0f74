"""Who says nothing of a cache has one in the user's cache directory; where that is impossible, the report says so."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

import spmd
from spmd.cache import folder as folders
from spmd.options import CacheOption

from ...harness.fake import fake_world
from .trainer import Trainer, batch
from .trainer import trainer as trainer

pytestmark = [pytest.mark.usefixtures("alone", "unset"), pytest.mark.filterwarnings("error")]


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment of a user, who has a cache directory and no wish."""
    monkeypatch.delenv("SPMD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def train(trainer: Trainer, **options: Any) -> spmd.CompiledStep[..., Any]:
    """The first call of a process that starts now; returns the step."""
    module = trainer.start()
    step = spmd.compile(module.step, **options)
    step(*module.build(), *batch())
    return step


def test_a_later_process_traces_nothing(trainer: Trainer, tmp_path: Path) -> None:
    train(trainer)
    assert len(list((tmp_path / "home" / "spmd").iterdir())) == 1
    trainer.refuse_traces()
    train(trainer)


def test_it_can_be_switched_off(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(trainer, cache="off")
    monkeypatch.setenv("SPMD_CACHE", "off")
    train(trainer)
    assert not (tmp_path / "home").exists()


def test_a_folder_that_is_not_private_is_a_note(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "home" / "spmd").mkdir(parents=True)
    (tmp_path / "home" / "spmd").chmod(0o777)
    (note,) = notes_on_the_cache(train(trainer))
    assert note.startswith("compiled steps are not kept for later processes: expected a folder") and "private" in note
    assert not list((tmp_path / "home" / "spmd").iterdir())


def test_a_folder_that_cannot_be_made_is_a_note(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    (note,) = notes_on_the_cache(train(trainer))
    assert "File exists" in note


def test_a_full_disk_is_a_note(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "_write", full)
    (note,) = notes_on_the_cache(train(trainer))
    assert note.endswith("No space left on device. Training goes on")


def test_many_ranks_write_nothing_into_a_home(trainer: Trainer, tmp_path: Path) -> None:
    with fake_world(65):
        (note,) = notes_on_the_cache(train(trainer))
        assert note == "steps of more than 64 ranks are kept for later processes if cache= says where"
        assert not (tmp_path / "home").exists()
        train(trainer, cache=tmp_path / "cache")
        assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_user_without_a_home_has_a_folder_among_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert (CacheOption.of("on").folder or Path()).parent == Path(tempfile.gettempdir())


def notes_on_the_cache(step: spmd.CompiledStep[..., Any]) -> list[str]:
    """The notes of a report that say what is not kept."""
    return [note for note in step.report().notes if "later processes" in note]
