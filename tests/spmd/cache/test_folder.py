"""The folder of the cache: private, written whole or not at all, and damaged entries are no entries."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spmd
from spmd.cache import folder as folders
from spmd.cache.folder import MANIFEST, Folder, RefusedFolderError
from spmd.cache.not_cached import NotCachedError
from spmd.options import CacheOption

from .trainer import TracedError, Trainer, batch
from .trainer import trainer as trainer


def train(trainer: Trainer, cache: Path) -> Any:
    """The first call of a process that starts now; returns the step."""
    module = trainer.start()
    model, optimizer = module.build()
    step = spmd.compile(module.step, cache=cache)
    step(model, optimizer, *batch())
    return step


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_flipped_byte_in_any_file_is_found(trainer: Trainer, tmp_path: Path) -> None:
    train(trainer, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    files = sorted(entry.iterdir())
    assert {"capture.json", "captured.json", "final.json", MANIFEST, "reads.json"} <= {each.name for each in files}
    trainer.refuse_traces()
    for file in files:
        content = file.read_bytes()
        for position in (0, len(content) // 2):
            flipped = bytearray(content)
            flipped[position] ^= 1
            file.write_bytes(flipped)
            with pytest.raises(TracedError):
                train(trainer, tmp_path / "cache")
        file.write_bytes(content)
    train(trainer, tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_file_that_is_missing_or_an_entry_under_another_name_is_found(trainer: Trainer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    train(trainer, cache)
    (entry,) = cache.iterdir()
    key, coordinates = entry.name.rsplit("-", 1)
    digit = "1" if key[-1] == "0" else "0"
    other = entry.rename(entry.with_name(f"{key[:-1]}{digit}-{coordinates}"))
    with pytest.raises(NotCachedError, match="under another name"):
        Folder.open(cache).read(other)
    other.rename(entry)
    (entry / "reads.json").unlink()
    trainer.refuse_traces()
    with pytest.raises(TracedError):
        train(trainer, cache)


def test_a_folder_is_private(tmp_path: Path) -> None:
    opened = Folder.open(tmp_path / "a" / "cache")
    opened.write("key-number-0", {"x.json": b"{}"})
    for path in (opened.path, opened.path / "key-number-0"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((opened.path / "key-number-0" / "x.json").stat().st_mode) == 0o600
    assert opened.read(opened.path / "key-number-0") == {"x.json": b"{}"}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Folder.open(tmp_path / "cache").path
    path.chmod(0o770)
    with pytest.raises(RefusedFolderError, match=r"can be written to by others \(its mode is 770\)"):
        Folder.open(path)
    path.chmod(0o700)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(RefusedFolderError, match="is a link"):
        Folder.open(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(RefusedFolderError, match="is no folder"):
        Folder.open(tmp_path / "file")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(RefusedFolderError, match="belongs to the user"):
        Folder.open(path)


def test_an_entry_or_a_file_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    opened = Folder.open(tmp_path / "cache")
    opened.write("a-b-0", {"x.json": b"{}"})
    (opened.path / "a-b-0").rename(tmp_path / "away")
    (opened.path / "a-b-0").symlink_to(tmp_path / "away")
    with pytest.raises(RefusedFolderError):
        opened.read(opened.path / "a-b-0")
    (opened.path / "a-b-0").unlink()
    (tmp_path / "away").rename(opened.path / "a-b-0")
    (opened.path / "a-b-0" / "x.json").rename(tmp_path / "x.json")
    (opened.path / "a-b-0" / "x.json").symlink_to(tmp_path / "x.json")
    with pytest.raises(NotCachedError, match="cannot be read"):
        opened.read(opened.path / "a-b-0")


@pytest.mark.usefixtures("alone")
def test_training_goes_on_without_a_private_folder(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.warns(UserWarning, match="private to you"):
        train(trainer, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.usefixtures("alone")
def test_training_goes_on_with_a_full_disk(trainer: Trainer, tmp_path: Path) -> None:
    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer.monkeypatch.setattr(folders, "_write", full)
    with pytest.warns(UserWarning, match="No space left on device. Training goes on"):
        train(trainer, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def in_a_process(function: Callable[[], object]) -> int:
    """Fork a process that runs ``function`` and ends; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    opened = Folder.open(tmp_path / "cache")
    files = {"x.json": b"1" * 100_000, "y.json": b"2" * 100_000}

    def write() -> None:
        for k in range(20):
            opened.write(f"same-number-{k}", files)
            assert opened.read(opened.path / f"same-number-{k}") == files

    children = [in_a_process(write) for _ in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert sorted(each.name for each in opened.path.iterdir()) == sorted(f"same-number-{k}" for k in range(20))


def test_a_process_is_killed_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, written = Folder.open(tmp_path / "cache"), folders._write

    def killed(path: Path, content: bytes) -> None:
        if path.name == "y.json":
            written(path, content[:10])
            os.kill(os.getpid(), signal.SIGKILL)
        written(path, content)

    with monkeypatch.context() as context:
        context.setattr(folders, "_write", killed)
        child = in_a_process(lambda: opened.write("key-n-0", {"x.json": b"1" * 100, "y.json": b"2" * 100}))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(opened.path.iterdir())) == 1 and not opened.entries()
    opened.write("key-n-0", {"x.json": b"3"})
    assert opened.read(opened.entries("key")[0]) == {"x.json": b"3"}


def test_nothing_is_left_of_what_the_disk_has_no_room_for(tmp_path: Path) -> None:
    """The system refuses a write, here by a limit on the size of files."""
    opened = Folder.open(tmp_path / "cache")

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(OSError, match="File too large"):
            opened.write("key-n-0", {"x.json": b"1" * 100, "y.json": b"2" * 5000})

    assert os.waitpid(in_a_process(write), 0)[1] == 0
    assert not list(opened.path.iterdir())


def test_what_a_killed_process_left_is_no_entry_and_goes(tmp_path: Path) -> None:
    opened = Folder.open(tmp_path / "cache")
    left = opened.path / ".writing-0"
    left.mkdir()
    (left / "x.json").write_bytes(b"half")
    assert not opened.entries()
    opened.tidy()
    assert left.is_dir()  # it may be written still
    os.utime(left, (time.time() - 9999, time.time() - 9999))
    opened.tidy()
    assert not left.exists()


def test_beyond_the_limit_the_least_recently_used_go(tmp_path: Path) -> None:
    opened = Folder(Folder.open(tmp_path / "cache").path, limit=3500)
    for k in range(3):
        opened.write(f"key{k}-n-0", {"x.json": b"1" * 800})
        os.utime(opened.path / f"key{k}-n-0" / MANIFEST, (k, k))
    opened.touch(opened.path / "key0-n-0")
    opened.write("key3-n-0", {"x.json": b"1" * 800})
    assert sorted(each.name for each in opened.entries()) == ["key0-n-0", "key2-n-0", "key3-n-0"]


def test_what_else_lies_in_the_folder_is_left_there(tmp_path: Path) -> None:
    opened = Folder(tmp_path, limit=1)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("precious")
    opened.write("key-n-0", {"x.json": b"1" * 800})
    assert (tmp_path / "data" / "manifest.json").exists() and not opened.entries()


def test_a_folder_that_is_named_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert CacheOption.of("/there").folder == Path("/there")
