"""A call that fails on one rank is known to all at once, and leaves state whole on all ranks or refuses to go on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import spmd
from spmd.ranks import local_ranks
from tests.harness.cases import MLP
from tests.harness.meeting import wait_for
from tests.harness.oracle import all_unequal, plain_run, snapshot
from tests.harness.pool import RankError, Ranks

from . import faults
from .faults import Fault, arm

CASE = MLP(sizes=(15, 7), rows=6, optimizer="SGD momentum")
STYLES = {"replicate": {}, "fully_shard": {}}
PROMPT = 30.0  # seconds in which all ranks raise; their group would wait for 240, and a machine may be busy


@contextmanager
def communicating(rank: int, transport: str) -> Iterator[None]:
    """Ranks communicate through "shared memory", or by "messages", as if each had a host of its own."""
    with pytest.MonkeyPatch.context() as patched:
        if transport == "messages":
            patched.setattr(local_ranks, "_host", lambda: f"host {rank}")
        yield


class Trial:
    """A compiled step on one rank, with fault points."""

    def __init__(self, rank: int, world: int, style: str) -> None:
        self.rank, self.world = rank, world
        torch.manual_seed(0)
        self.objects = CASE.build()
        mode = spmd.DataParallel(style)
        self.step = spmd.compile(parallel_mode=mode, passes=faults.pipeline())(CASE.step)

    def call(self, k: int) -> Any:
        """Make call ``k``."""
        return self.step(*self.objects, *CASE.part(self.rank, k))

    def failing(self, k: int, fault: Fault | None) -> tuple[str, float]:
        """Make call ``k``, which fails; what it raised, with its notes, and the time."""
        arm(fault)
        try:
            self.call(k)
        except BaseException as error:
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]), time.time()
        finally:
            arm(None)
        return "", time.time()

    def unequal(self, calls: int, result: Any) -> list[str]:
        """What differs from the plain step after so many calls."""
        expected = plain_run(CASE, self.world, calls)
        return all_unequal(expected[-1:], [snapshot(result, self.objects)], self.rank, self.world)


@pytest.fixture(autouse=True)
def undone() -> Any:
    """Nothing is left armed in this process."""
    yield
    arm(None)


def fails_then_goes_on(
    rank: int, world: int, style: str, transport: str, action: Any, at: float
) -> tuple[str, float, list[str]]:
    """Rank 1 fails in the third call, before it writes; all raise, and make that call again."""
    with communicating(rank, transport):
        trial = Trial(rank, world, style)
        for k in range(2):
            trial.call(k)
        fault = Fault(action, at) if rank == 1 else None
        message, when = trial.failing(2, fault)
        times = [0.0] * world
        dist.all_gather_object(times, fault.when if fault else 0.0)  # in the user's group, where nothing is pending
        for k in range(2, 4):
            result = trial.call(k)
        assert len(trial.step.programs) == 1, "that of the closed connection can never run again"
        return message, when - max(times), trial.unequal(4, result)


ACTIONS = [faults.raises, faults.interrupts, faults.runs_out_of_memory]


@pytest.mark.parametrize("style, transport, action, at", [
    ("replicate", "messages", faults.interrupts, 0.0),
    ("replicate", "shared memory", faults.raises, 0.5),
    ("fully_shard", "messages", faults.runs_out_of_memory, 0.3),
    pytest.param("replicate", "shared memory", faults.interrupts, 0.0, marks=pytest.mark.exhaustive),
    pytest.param("replicate", "messages", faults.raises, 0.5, marks=pytest.mark.exhaustive),
    pytest.param("fully_shard", "shared memory", faults.runs_out_of_memory, 0.3, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_a_failure_before_the_update_leaves_all_state_as_it_was(
    ranks: Ranks, style: str, transport: str, action: Any, at: float
) -> None:
    outcomes = ranks.run(2, fails_then_goes_on, style, transport, action, at)
    (other, seconds, differ), (own, _, differ_too) = outcomes
    raised = {
        faults.interrupts: "KeyboardInterrupt",
        faults.raises: "Injected",
        faults.runs_out_of_memory: "MemoryError",
    }
    assert own.startswith(raised[action]) and "its state is as before the call" in own
    assert "RankFailedError" in other and f"along dp, rank 1 raised {raised[action]}" in other
    assert "State is on rank 0 as before the call, on rank 1 as before the call" in other
    assert seconds < PROMPT
    assert differ == differ_too == []


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def fails_while_it_updates(rank: int, world: int, style: str) -> tuple[list[str], list[str]]:
    """Rank 1 fails after its first writes. What calls and saves say then, and what differs after the way out."""
    trial = Trial(rank, world, style)
    for k in range(2):
        result = trial.call(k)
    model, optimizer = trial.objects
    saved = tree_map(clone, [model.state_dict(), optimizer.state_dict()])
    messages = [trial.failing(2, Fault(faults.raises, 0.999) if rank == 1 else None)[0]]
    messages += [trial.failing(2, None)[0] for _ in range(2)]
    for each in (model, optimizer):
        with pytest.raises(spmd.SpmdError, match="cannot be saved") as caught:
            each.state_dict()
        messages.append(str(caught.value))
    try:
        trial.step.recover()
        done = int(re.findall(r"rank 0: whole, after (\d) updates", messages[2])[0])
    except spmd.SpmdError as error:
        assert "split over ranks" in str(error)
        for each, state in zip(trial.objects, saved, strict=True):
            each.load_state_dict(state)
        done = 2
    for k in range(done, 4):
        result = trial.call(k)
    for each in trial.objects:
        each.state_dict()
    return messages, trial.unequal(4, result)


@pytest.mark.parametrize("style", STYLES)
def test_state_that_is_partly_updated_is_refused_until_it_is_whole_again(ranks: Ranks, style: str) -> None:
    (one, differ), (other, differ_too) = ranks.run(2, fails_while_it_updates, style)
    assert "Injected" in other[0] and "partly updated" in other[0]
    assert "StateError" in one[1] or "RankFailedError" in one[1]  # in the call before, or in it
    for message in (one[2], *other[1:3]):
        assert "StateError" in message and "rank 1: partly updated" in message
        assert re.search("rank 0: whole, after [23] updates", message)
        assert "recover()" in message and "checkpoint" in message
    assert differ == differ_too == []


def trains_another(rank: int, world: int, style: str, ended: Path) -> tuple[list[str], list[str]]:
    """Rank 1 fails after its first writes; another model trains on, and that one is refused until it is whole."""

    def raises_late() -> None:
        wait_for(ended)  # by the other rank, whose update waits for nobody
        faults.raises()

    broken, other = Trial(rank, world, style), Trial(rank, world, style)
    for each in (broken, other):
        each.call(0)
        each.call(1)
    saved = tree_map(clone, [each.state_dict() for each in broken.objects])
    messages = [broken.failing(2, Fault(raises_late, 0.999) if rank == 1 else None)[0]]
    ended.touch()
    if not messages[0]:  # this rank ended that call, and learns of it in the next
        messages = [other.failing(2, None)[0]]
    for k in range(2, 4):
        other.call(k)
        messages.append(broken.failing(2, None)[0])
    differ = other.unequal(5, other.call(4))
    if style == "replicate":
        broken.step.recover()
    else:
        for each, state in zip(broken.objects, saved, strict=True):
            each.load_state_dict(state)
    for k in range(3 if style == "replicate" else 2, 5):
        result = broken.call(k)
    return messages, differ + broken.unequal(5, result)


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_steps_of_other_models_go_on_where_one_is_partly_updated(ranks: Ranks, style: str, tmp_path: Path) -> None:
    for messages, differ in ranks.run(2, trains_another, style, tmp_path / "ended"):
        assert len(messages) == 3 and all("partly updated" in message for message in messages)
        assert all("StateError" in message for message in messages[1:])
        assert differ == []


def dies(rank: int, world: int, style: str, transport: str, report: Path) -> None:
    with communicating(rank, transport):
        trial = Trial(rank, world, style)
        for k in range(2):
            trial.call(k)
        message, _ = trial.failing(2, Fault(faults.kills, 0.4) if rank == 1 else None)
    before = plain_run(CASE, world, 2)[-1:]
    differ = [
        line for line in all_unequal(before, [snapshot(None, trial.objects)], rank, world) if "result" not in line
    ]
    report.write_text(f"{message}\n{differ}")


@pytest.mark.parametrize("transport", ["shared memory", "messages"])
def test_a_rank_that_is_killed_is_named_and_the_state_of_the_others_is_whole(
    ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    with pytest.raises(RankError, match="died with exit code -9"):
        ranks.run(2, dies, "replicate", transport, tmp_path / "report", grace=60)
    message = (tmp_path / "report").read_text()
    assert "along dp, rank 1 has ended, or does not answer" in message
    assert "State is on rank 0 as before the call, on rank 1 unknown. Look at the output of rank 1" in message
