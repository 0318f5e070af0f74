"""A version never changes while it is read, whatever is published meanwhile, and whichever process ends midway."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import spmd
from spmd.publishing import segments
from spmd.publishing.folders import MEMORY, OWNER, read_newest
from tests.harness.pool import RankError, Ranks


def of(value: float, size: int = 5) -> nn.Module:
    """A model of which all numbers are ``value``."""
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size)).double()
    return fill(model, value)


@torch.no_grad()
def fill(model: nn.Module, value: float) -> nn.Module:
    for parameter in model.parameters():
        parameter.fill_(value)
    return model


def values(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {value for each in tensors.values() for value in each.flatten().unique().tolist()}


def forked(work: Callable[[], None]) -> int:
    """A child process that does ``work`` and stays until it is killed."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
            os.write(write, b".")
            time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(read, 1) == b"."
    os.close(read)
    os.close(write)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def publishes(rank: int, world: int, to: str) -> int:
    """Publish versions as fast as ranks can until a reader has seen enough, all numbers of each its number."""
    model, version, goes_on = of(0, 300), 0, torch.ones(1)
    while goes_on.item() > 0:
        version += 1
        goes_on.fill_(not (MEMORY / f"{to}.end").exists())
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
        spmd.publish(fill(model, version), to=to).wait()
    return len(list((MEMORY / to).glob("*-*-*")))


def test_no_version_is_torn_while_another_process_writes(ranks: Ranks, to: str) -> None:
    seen, wrong = set[int](), list[Any]()

    def read() -> None:
        try:
            reader, model = spmd.subscribe(to), of(0, 300)
            deadline = time.monotonic() + 60
            while len(seen) < 25 and time.monotonic() < deadline:
                version = reader.load(model)
                found = {value for each in model.parameters() for value in (each.min().item(), each.max().item())}
                if found != {version} or version < max(seen, default=0):
                    wrong.append((version, found))
                seen.add(version)
        finally:
            (MEMORY / f"{to}.end").touch()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        made = ranks.run(2, publishes, to)
    finally:
        thread.join()
        (MEMORY / f"{to}.end").unlink()
    assert not wrong and len(seen) == 25
    assert max(made) <= 6  # segments of two ranks: newest, next, and one that was read


def test_what_is_held_stays_and_takes_one_segment_more(alone: None, to: str) -> None:
    model = of(1)
    spmd.publish(model, to=to, wait=True)
    reader, other = spmd.subscribe(to), spmd.subscribe(to)
    with reader._version(None) as (_, (held,)):
        before = held.clone()
        for version in range(2, 6):
            assert spmd.publish(fill(model, version), to=to, wait=True).version == version
            assert values(other.read()) == {version}
        assert torch.equal(held, before)
        assert len(list((MEMORY / to).glob("*-*-*"))) == 3
    for version in (6, 7):
        spmd.publish(fill(model, version), to=to, wait=True)
    assert values(reader.read()) == {7} and len(list((MEMORY / to).glob("*-*-*"))) == 2


def test_without_locks_this_would_be_seen(alone: None, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = of(1)
    spmd.publish(model, to=to, wait=True)
    reader = spmd.subscribe(to)
    monkeypatch.setattr(segments.fcntl, "flock", lambda *args: None)
    with reader._version(None) as (_, (held,)):
        before = held.clone()
        for version in (2, 3):
            spmd.publish(fill(model, version), to=to, wait=True)
        assert not torch.equal(held, before)


def test_forked_children_and_threads_do_not_let_go_for_others(alone: None, to: str) -> None:
    model = of(1)
    spmd.publish(model, to=to, wait=True)
    reader, done = spmd.subscribe(to), threading.Event()
    thread = threading.Thread(target=lambda: (reader.read(), done.set()))
    with reader._version(None) as (_, (held,)):
        before = held.clone()
        thread.start()
        kill(forked(lambda: reader.read() and None))
        assert not done.wait(0.05)
        for version in (2, 3):
            spmd.publish(fill(model, version), to=to, wait=True)
        assert torch.equal(held, before)
    thread.join()
    assert values(reader.read()) == {3}


def test_a_reader_that_is_killed_lets_go(alone: None, to: str) -> None:
    model = of(1)
    spmd.publish(model, to=to, wait=True)

    held: list[Any] = []

    def hold() -> None:
        held.append(spmd.subscribe(to)._version(None))
        held[0].__enter__()

    child = forked(hold)
    for version in (2, 3):
        spmd.publish(fill(model, version), to=to, wait=True)
    assert len(list((MEMORY / to).glob("*-*-*"))) == 3
    kill(child)
    for version in (4, 5):
        spmd.publish(fill(model, version), to=to, wait=True)
    assert len(list((MEMORY / to).glob("*-*-*"))) == 2
    assert values(spmd.subscribe(to).read()) == {5}


def dies_while_it_writes(rank: int, world: int, to: str) -> None:
    """Publish two versions, and be killed in the middle of the third."""
    model = of(1)
    for version in (1, 2):
        spmd.publish(fill(model, version), to=to, wait=True)
    (MEMORY / f"{to}.published").touch()
    while not (MEMORY / f"{to}.read").exists():
        time.sleep(0.01)
    segments.Segment.end = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    spmd.publish(fill(model, 3), to=to, wait=True)


def test_a_writer_that_is_killed_leaves_its_last_version_and_the_next_one_goes_on(ranks: Ranks, to: str) -> None:
    found: list[Any] = []

    def read() -> None:
        while not (MEMORY / f"{to}.published").exists():
            time.sleep(0.01)
        reader = spmd.subscribe(to)
        found.extend([reader, values(reader.read())])
        (MEMORY / f"{to}.read").touch()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        with pytest.raises(RankError):
            ranks.run(1, dies_while_it_writes, to)
    finally:
        thread.join()
        for name in ("published", "read"):
            (MEMORY / f"{to}.{name}").unlink(missing_ok=True)
    reader, first = found
    assert first == {2} and values(reader.read()) == {2}
    with pytest.raises(spmd.SpmdError, match=rf"version above 2 in /dev/shm/{to}, but the process .* has ended"):
        reader.read(after=2)
    with pytest.raises(spmd.SpmdError, match="within 0 s, but no process publishes there: pass a longer timeout="):
        spmd.subscribe(to, timeout=0)
    model = of(7)
    assert spmd.publish(model, to=to, wait=True).version == 3  # and what was left is gone
    assert values(reader.read(after=2)) == {7} and reader.version == 3
    assert len(list((MEMORY / to).iterdir())) == 4


def test_all_versions_go_with_the_last_handle_and_the_process(alone: None, to: str) -> None:
    model = of(1)
    handle = spmd.publish(model, to=to)
    reader = spmd.subscribe(to)
    with reader._version(None) as (_, (held,)):
        handle.withdraw()
        assert held.view(torch.float64).max() == 1 and not (MEMORY / to).exists()
    with pytest.raises(spmd.SpmdError, match="has ended, and version 1 was its last"):
        reader.read()
    assert spmd.publish(model, to=to, wait=True).version == 1
    assert values(reader.read(after=1)) == {1}  # of another run any is new


def fails_on_one(rank: int, world: int, to: str) -> list[str]:
    """Errors of publications that one rank cannot make, at once and in the background; the version before stays."""
    model, messages = of(1), list[str]()
    step = spmd.compile(lambda model, x: model(x).sum())
    step(model, torch.ones(2, 5).double())
    spmd.publish(model, to=to, wait=True)
    reader = spmd.subscribe(to)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(spmd.SpmdError) as raised:
            spmd.publish(fill(model, 2), to=to)
        messages.append(str(raised.value))
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(segments.Segment, "end", full)
        with pytest.raises(spmd.SpmdError) as raised:
            handle = spmd.publish(fill(model, 2), to=to)
            handle.wait()
        messages.append(str(raised.value))
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(segments.Segment, "end", full)
        with pytest.raises(spmd.SpmdError) as raised:
            spmd.publish(fill(model, 3), to=to)
            spmd.publish(model, to=to)
        messages.append(str(raised.value))
    assert values(reader.read()) == {1}
    spmd.publish(fill(model, 4), to=to, wait=True)
    assert values(reader.read()) == {4}
    spmd.state_dict(model)
    return messages


def test_a_rank_that_cannot_write_is_known_to_all(ranks: Ranks, to: str) -> None:
    one, other = ranks.run(2, fails_on_one, to)
    assert one == other
    assert "bytes of memory for /dev/shm/" in one[0] and "more with --shm-size (on rank 1)" in one[0]
    assert one[2] == f"the publication before this one failed: {one[1]}"
    assert one[1] == f"publishing to /dev/shm/{to} failed: OSError: [Errno 28] No space left on device (on rank 1)"


def test_another_run_is_refused_while_the_owner_lives(alone: None, to: str) -> None:
    model = of(1)

    def own() -> None:
        spmd.publish(model, to=to, wait=True)

    child = forked(own)
    try:
        with pytest.raises(spmd.SpmdError, match=rf"of this run alone, but process {child} publishes to .*/{to}: pass"):
            spmd.publish(of(2), to=to)
        assert values(spmd.subscribe(to).read()) == {1}
    finally:
        kill(child)
    assert spmd.publish(of(2), to=to, wait=True).version == 2


def test_a_folder_that_is_removed_meanwhile_is_named(alone: None, to: str) -> None:
    model = of(1)
    handle = spmd.publish(model, to=to, wait=True)
    for each in (MEMORY / to).iterdir():
        each.unlink()
    (MEMORY / to).rmdir()
    with pytest.raises(spmd.SpmdError, match=r"is gone: somebody has removed it.*withdraw\(\)"):
        spmd.publish(model, to=to, wait=True)
    handle.withdraw()
    assert spmd.publish(model, to=to, wait=True).version == 1


def test_files_that_nobody_published_are_named(alone: None, to: str) -> None:
    folder = MEMORY / to
    folder.mkdir()
    (folder / "mine.txt").touch()
    with pytest.raises(spmd.SpmdError, match=r"holds mine.txt, which spmd.publish did not write: pass another"):
        spmd.publish(of(1), to=to)
    (folder / "mine.txt").unlink()
    model = of(1)
    spmd.publish(model, to=to, wait=True)
    newest = read_newest(folder)
    assert newest is not None
    reader = spmd.subscribe(to)
    os.truncate(folder / newest.segments[0], 100)
    fresh = spmd.subscribe.__globals__["Subscription"](folder, None, None, 0, 1, 1.0)
    with pytest.raises(spmd.SpmdError, match="bytes: it is another file, or was cut off"):
        fresh.read()
    (folder / "newest.json").write_text("{}")
    with pytest.raises(spmd.SpmdError, match=r"expected weights that spmd.publish wrote, but .*newest.json is another"):
        reader.read()
    assert (folder / OWNER).exists()
