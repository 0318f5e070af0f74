"""A rank that is interrupted, or fails, where the others may end the call already: it ends it, or all know the call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spmd.interpreter.interrupts import answering_after, hold_signals
from spmd.ranks import patience
from spmd.ranks.connection import Connection, _Rendezvous
from spmd.running.results import Results
from tests.harness.meeting import wait_for
from tests.harness.pool import Ranks

from . import faults
from .faults import Fault
from .test_failed_calls import CASE, Trial, communicating

BARRIER = "the end of this call"  # what ranks wait for in front of the update


def sends() -> None:
    """Send this rank an interrupt, whose handler is there already."""
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def before(
    owner: Any, name: str, action: Callable[[], Any], condition: Callable[..., bool] | None = None
) -> Iterator[None]:
    """Do something, once, before a method is called on an object that meets a ``condition``."""
    method, done = getattr(owner, name), list[int]()

    def called(*args: Any, **kwargs: Any) -> Any:
        if not done and (condition is None or condition(args[0])):
            done.append(1)
            action()
        return method(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, called)
        yield
    assert done, f"{name} was not called"


@contextmanager
def answered() -> Iterator[None]:
    """An interrupt raises."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the pool has it


def waits_at_the_barrier(waiting: patience.Patience) -> bool:
    return waiting.what == BARRIER


def interrupted_late(
    rank: int, world: int, style: str, transport: str, where: str, folder: Path
) -> tuple[str, int, list[str]]:
    """Rank 0 is interrupted in its third call, once its last message has left; both ranks go on."""
    sent, fault, doing = folder / "sent", None, nullcontext[Any]()

    def sends_there() -> None:
        sends()
        sent.touch()

    if where == "update":
        fault = Fault(sends, 0.999) if rank == 0 else None
    elif where == "results":
        doing = before(Results, "write_python_state", sends if rank == 0 else int)
    elif rank == 0:
        doing = before(patience.Patience, "wait", sends_there, waits_at_the_barrier)
    else:
        doing = before(Connection, "barrier", partial(wait_for, sent))
    with communicating(rank, transport), pytest.MonkeyPatch.context() as patched:
        patched.setattr(patience, "_SLICE", 60.0)  # a busy machine may keep rank 1 from coming for a second
        trial = Trial(rank, world, style)
        for k in range(2):
            trial.call(k)
        with answered(), doing:
            message, _ = trial.failing(2, fault)
        for k in range(3, 5):
            result = trial.call(k)
    return message, len(trial.step.recompiles().programs), trial.unequal(5, result)


@pytest.mark.parametrize("style, transport, where", [
    ("replicate", "messages", "barrier"),
    ("replicate", "shared memory", "barrier"),
    ("fully_shard", "messages", "update"),
    ("replicate", "shared memory", "results"),
])  # fmt: skip
def test_an_interrupt_once_the_last_message_has_left_waits_until_the_call_is_over(
    ranks: Ranks, style: str, transport: str, where: str, tmp_path: Path
) -> None:
    (own, programs, differ), (other, _, differ_too) = ranks.run(2, interrupted_late, style, transport, where, tmp_path)
    assert own == "KeyboardInterrupt: " and other == ""
    assert programs == 1, "the call did not fail, so the ranks stay connected"
    assert differ == differ_too == []


def interrupted_while_another_stalls(rank: int, world: int, transport: str, folder: Path) -> tuple[str, list[str]]:
    """Rank 0 is interrupted where it waits for rank 1, which comes once rank 0 has raised; both make the call again."""
    raised = folder / "raised"
    with communicating(rank, transport), pytest.MonkeyPatch.context() as patched:
        patched.setattr(patience, "_SLICE", 0.05)
        trial = Trial(rank, world, "replicate")
        for k in range(2):
            trial.call(k)
        doing = before(patience.Patience, "wait", sends, waits_at_the_barrier)
        with answered(), doing if rank == 0 else before(Connection, "barrier", partial(wait_for, raised)):
            message, _ = trial.failing(2, None)
        raised.touch()
        for k in range(2, 4):
            result = trial.call(k)
    return message, trial.unequal(4, result)


@pytest.mark.parametrize("transport", ["shared memory", "messages"])
def test_an_interrupt_at_the_barrier_is_answered_where_another_rank_does_not_come(
    ranks: Ranks, transport: str, tmp_path: Path
) -> None:
    (own, differ), (other, differ_too) = ranks.run(2, interrupted_while_another_stalls, transport, tmp_path)
    assert own.startswith("KeyboardInterrupt") and "its state is as before the call" in own
    assert "State is on rank 0 as before the call, on rank 1 as before the call" in other
    assert differ == differ_too == []


@pytest.mark.parametrize("times", [1, 2])
def test_signals_are_held_from_a_moment_of_a_call_on_but_for_the_second_of_a_kind(times: int) -> None:
    seen = list[str]()

    def handler(number: int, frame: Any) -> None:
        seen.append("handled")
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyboardInterrupt), answering_after():
            hold_signals()
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGUSR1)
            seen.append("went on")
        assert seen == (["went on", "handled"] if times == 1 else ["handled", "handled"])
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def fails_behind_the_others(
    rank: int, world: int, failing: tuple[int, ...], transport: str, how: str, first: int, folder: Path
) -> tuple[list[str], list[str]]:
    """Some ranks fail in their third call, which others end; four more calls of each raise, and all state is recovered.

    Rank ``first`` comes first to the fourth call; where two have failed, the second of them comes last.
    """
    ended, came = [[folder / f"rank {each} {what}" for each in range(world)] for what in ("ended", "came")]

    def fails() -> None:
        for each in {*range(world)} - {*failing}:
            wait_for(ended[each])
        if how == "partly updated":
            faults.raises()
        sends()
        sends()  # the second is not held

    fault, doing = None, nullcontext[Any]()
    if rank in failing and how == "partly updated":
        fault = Fault(fails, 0.999)
    elif rank in failing:
        doing = before(patience.Patience, "wait", fails, waits_at_the_barrier)
    with communicating(rank, transport):
        trial = Trial(rank, world, "replicate")
        for k in range(2):
            trial.call(k)
        with answered(), doing:
            messages = [trial.failing(2, fault)[0]]
        ended[rank].touch()
        if rank != first:
            wait_for(came[0 if rank in failing[1:] else first])
        with before(_Rendezvous, "arrive", came[rank].touch) if first in failing else nullcontext():
            messages.append(trial.failing(3, None)[0])
        came[rank].touch()
        messages += [trial.failing(k, None)[0] for k in range(4, 7)]
        (folder / f"rank {rank} has raised").touch()
        for each in range(world):
            wait_for(folder / f"rank {each} has raised")  # it makes no more calls meanwhile
        trial.step.recover()
        for k in range(3 if how == "partly updated" else 2, 5):
            result = trial.call(k)
    return messages, trial.unequal(5, result)


@pytest.mark.parametrize("world, failing, transport, how, first", [
    pytest.param(2, (1,), "messages", "partly updated", 0, marks=pytest.mark.exhaustive),
    pytest.param(2, (1,), "shared memory", "partly updated", 1, marks=pytest.mark.exhaustive),
    pytest.param(2, (1,), "shared memory", "an update behind", 0, marks=pytest.mark.exhaustive),
    (2, (1,), "messages", "an update behind", 1),
    (3, (1,), "messages", "partly updated", 0),
    (3, (1,), "shared memory", "partly updated", 1),
    (3, (1, 2), "shared memory", "an update behind", 0),
    (3, (1, 2), "messages", "partly updated", 1),
])  # fmt: skip
def test_ranks_that_failed_where_others_ended_the_call_answer_as_many_calls(
    ranks: Ranks, world: int, failing: tuple[int, ...], transport: str, how: str, first: int, tmp_path: Path
) -> None:
    """None waits for a call that another never makes, whichever comes to the next one ``first``."""
    given = failing, transport, how, first, tmp_path
    outcomes = ranks.run(world, fails_behind_the_others, *given, timeout=120)
    for rank, (messages, differ) in enumerate(outcomes):
        has_failed, joined = rank in failing, first in failing
        assert messages[0].startswith(("Injected", "KeyboardInterrupt")) if has_failed else messages[0] == ""
        assert messages[1].startswith("StateError" if has_failed or joined else "RankFailedError")
        for message in messages[1 if has_failed or joined else 2 :]:
            assert message.startswith("StateError") and "rank 0: whole, after 3 updates; rank " in message
            assert ("partly updated" if how == "partly updated" else "whole, after 2 updates") in message
        assert differ == []


def raises_ahead(rank: int, world: int, how: str, folder: Path) -> list[str]:
    """Rank 1 fails in its third call, which rank 0 ends, and waits in its fourth, which rank 0 raises in by itself."""
    ended, came = folder / "ended", folder / "came"

    def fails() -> None:
        wait_for(ended)
        faults.raises()

    with communicating(rank, "messages"):
        trial = Trial(rank, world, "replicate")
        for k in range(2):
            trial.call(k)
        messages = [trial.failing(2, Fault(fails, 0.999) if rank == 1 else None)[0]]
        ended.touch()
        doing = before(_Rendezvous, "arrive", came.touch)
        if rank == 0:
            wait_for(came)
            doing = before(patience.Patience, "wait", sends) if how == "is interrupted" else nullcontext()
        batch = slice(0, 0 if rank == 0 and how == "lacks arguments" else None)
        with answered(), doing, pytest.MonkeyPatch.context() as patched:
            patched.setattr(trial, "call", lambda k: trial.step(*trial.objects, *CASE.part(rank, k)[batch]))
            messages.append(trial.failing(3, None)[0])
        messages.append(trial.failing(4, None)[0])
    return messages


@pytest.mark.parametrize("how, own, others", [
    ("lacks arguments", "TypeError", "StateError"),
    ("is interrupted", "KeyboardInterrupt", "RankFailedError"),
])  # fmt: skip
def test_a_rank_that_failed_learns_why_one_that_ended_the_call_does_not_join_it(
    ranks: Ranks, how: str, own: str, others: str, tmp_path: Path
) -> None:
    ahead, behind = ranks.run(2, raises_ahead, how, tmp_path, timeout=100)
    assert ahead[0] == "" and behind[0].startswith("Injected")
    assert ahead[1].startswith(own) and behind[1].startswith(others)
    assert all(messages[2].startswith("StateError") for messages in (ahead, behind))
