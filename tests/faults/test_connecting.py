"""A rank that dies while the ranks connect is named at once, too."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spmd
from passes.runtime.peer_connection import PeerLostError
from spmd._torch import default_store
from spmd.interpreter.interrupts import deferred_signals
from spmd.ranks import connection, local_ranks
from spmd.ranks.failures import Failure, FailureBoard, StateIs
from spmd.ranks.members import Members
from tests.harness.cases import MLP
from tests.harness.pool import RankError, Ranks

CASE = MLP(sizes=(15, 7), rows=6, optimizer="SGD")
PROMPT = 30.0  # seconds in which the other rank raises; its group would wait for 240, and a machine may be busy


def interrupted_while_it_comes(rank: int, world: int) -> float:
    """Rank 1 is interrupted just before its part of a collective in the user's group, in which ranks meet."""
    objects, step = CASE.build(), spmd.compile(CASE.step)
    rendezvous: Any = connection._Rendezvous
    arrival_key = rendezvous._arrival_key
    if rank == 1:
        rendezvous._arrival_key = lambda *given: (os.kill(os.getpid(), signal.SIGINT), arrival_key(*given))[1]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt if rank else spmd.RankFailedError):
            step(*objects, *CASE.part(rank, 0))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the pool has it
        rendezvous._arrival_key = arrival_key
    total = torch.tensor(1.0 + rank)
    dist.all_reduce(total)
    assert torch.isfinite(step(*objects, *CASE.part(rank, 1)))
    return float(total)


def test_an_interrupt_leaves_nothing_pending_in_the_group_of_the_user(ranks: Ranks) -> None:
    assert ranks.run(2, interrupted_while_it_comes) == [3.0, 3.0]


def test_all_handlers_answer_deferred_signals() -> None:
    """Also where the first one raises."""
    answered: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _: answered.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), deferred_signals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert answered == [signal.SIGTERM]


def fails_while_the_other_opens_its_group(rank: int, world: int) -> tuple[float, float]:
    objects, step = CASE.build(), spmd.compile(CASE.step)
    rendezvous: Any = connection._Rendezvous
    opens, start = rendezvous._open, time.time()
    if rank == 1:
        rendezvous._open = lambda *_: (time.sleep(1), {}["no such key"])
    try:
        with pytest.raises(KeyError if rank else spmd.RankFailedError, match="no such key"):
            step(*objects, *CASE.part(rank, 0))
    finally:
        rendezvous._open = opens
    seconds = time.time() - start
    total = torch.tensor(1.0 + rank)
    dist.all_reduce(total)
    assert torch.isfinite(step(*objects, *CASE.part(rank, 1)))
    return seconds, float(total)


def test_a_rank_that_fails_while_another_opens_its_group_is_named(ranks: Ranks) -> None:
    for seconds, total in ranks.run(2, fails_while_the_other_opens_its_group):
        assert seconds < PROMPT and total == 3.0


def loses_another_while_it_opens_a_group(rank: int, world: int, report: Path) -> None:
    """The last rank dies before it has opened its group, which is another one."""
    objects, step = CASE.build(), spmd.compile(CASE.step)
    step(*objects, *CASE.part(rank, 0))
    # Others may be of groups of earlier jobs, which are not collected yet.
    known = next(each for each in reversed(connection._known.values()) if each.open_connection() is not None)
    assert known.connection is not None
    if rank == 2:
        time.sleep(1)
        os._exit(7)
    start = time.time()
    try:
        known.connection._group_of((0, 1))
    except PeerLostError:
        (report / str(rank)).write_text(str(time.time() - start))


def test_a_rank_that_dies_before_it_opens_its_subgroup_is_noticed(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 2 of 3 failed first: the process died with exit code 7"):
        ranks.run(3, loses_another_while_it_opens_a_group, tmp_path, grace=60)
    assert all(float((tmp_path / rank).read_text()) < PROMPT for rank in ("0", "1"))


def dies_while_connecting(rank: int, world: int, name: str, folder: Path) -> None:
    """Rank 1 dies in the function ``name``, and notes when; the other, when it raises, and what."""

    def die(*_: Any) -> None:
        time.sleep(1)  # the other waits for it by then
        (folder / "died").write_text(str(time.time()))
        os._exit(7)

    if rank == 1:
        owner: Any = local_ranks if name == "_connect" else connection._Rendezvous
        setattr(owner, name, die)
    objects, step = CASE.build(), spmd.compile(CASE.step)
    try:
        step(*objects, *CASE.part(rank, 0))
    except spmd.RankFailedError as error:
        (folder / "raised").write_text(f"{time.time()}\n{error}")


@pytest.mark.parametrize("name", ["_arrival_key", "_wait_for_arrivals", "_open", "_connect"])
def test_a_rank_that_dies_while_ranks_connect_is_named(ranks: Ranks, tmp_path: Path, name: str) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed first: the process died with exit code 7"):
        ranks.run(2, dies_while_connecting, name, tmp_path, grace=60)
    raised, message = (tmp_path / "raised").read_text().splitlines()
    assert "along dp, rank 1 has ended, or does not answer. State is on rank 0 as before the call" in message
    assert float(raised) - float((tmp_path / "died").read_text()) < PROMPT


def restarted(rank: int, world: int) -> int:
    """The sum over ranks that a step returns, in a store where the ranks before a restart have reported a failure."""
    members = Members((0, 1), (("dp", 2),))
    board = FailureBoard(default_store(), connection._next_name([2], members), members)
    board.publish(Failure.of(ValueError("of the ranks before"), StateIs.BEFORE, lost=False))
    connection._attempts.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        return int(spmd.compile(lambda x: x.sum())(torch.ones(3)))


def restarted_late(rank: int, world: int, port: int) -> int:
    """As above, where torchrun's store has the addresses of the ranks before, and rank 0 comes later than rank 1."""
    torchrun = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
            patched.setenv(name, value)
        spmd.world()
        dist.barrier()  # a rank that is done at once must not close connections that the other still opens
        dist.destroy_process_group()
        patched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        time.sleep(1 - rank)
        total = int(spmd.compile(lambda x: x.sum())(torch.ones(3)))
        dist.destroy_process_group()
    return total


def test_a_rank_that_restarts_first_waits_for_the_others(ranks: Ranks) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(2, restarted_late, store.port, process_group=False) == [6, 6]


def test_failures_before_a_restart_of_all_ranks_are_forgotten(ranks: Ranks) -> None:
    assert ranks.run(2, restarted) == [6, 6]
