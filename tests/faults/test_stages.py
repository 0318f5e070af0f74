"""A rank of a pipeline that dies, stops or is interrupted while others wait for what it sends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, plain_run, snapshot
from tests.harness.pool import RankError, Ranks

from . import faults

CASE = MLP(sizes=(5, 7, 6, 4), rows=8, optimizer="SGD momentum")
PROMPT = 30.0  # seconds in which all ranks raise; a machine may be busy


class Trial:
    """A step of two stages, of which a rank does something before its second backward of a call, if asked to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        mode = spmd.DataParallel(mesh=mesh, axes={"stages": "pp"}, micro_batches=4, stages=["2"])
        torch.manual_seed(0)
        self.objects, self.step = CASE.build(), spmd.compile(CASE.step, parallel_mode=mode)

    def call(self, k: int, action: Callable[[], None] | None = None) -> Any:
        """Make call ``k`` on the batch that all stages pass."""
        compiled = self.step._dispatch.programs.last
        if action is not None:
            stages: Any = compiled.executable.function.executable  # type: ignore[union-attr]
            lowered = stages._programs[f"backward.{self.rank}"]
            sound, runs = lowered.executable, list[int]()

            def acts(inputs: Any) -> Any:
                runs.append(1)
                if len(runs) == 2:
                    action()
                return sound(inputs)

            lowered.executable = acts
        try:
            return self.step(*self.objects, *CASE.part(0, k))
        finally:
            if action is not None:
                lowered.executable = sound

    def unequal(self, calls: int, result: Any) -> list[str]:
        """What differs from the plain step after so many calls."""
        return all_unequal(plain_run(CASE, 1, calls)[-1:], [snapshot(result, self.objects)], 0, 1)


def text_of(error: BaseException) -> str:
    """An error with its notes, and those of what caused it."""
    return "".join(traceback.format_exception(error))


def is_interrupted(rank: int, world: int, folder: Path) -> tuple[str, float, list[str]]:
    """Rank 0 is interrupted while rank 1 stalls, until it has raised; both make the call again, and one more."""
    trial, raised = Trial(rank), folder / "raised"
    trial.call(0)

    def stalls() -> None:
        (folder / "stalls").touch()
        until = time.time() + 2 * PROMPT
        while not raised.exists() and time.time() < until:
            time.sleep(0.05)

    def interrupts() -> None:
        while not (folder / "stalls").exists():
            time.sleep(0.05)
        time.sleep(1.5)  # rank 0 waits by now, on a busy machine too: it has milliseconds to compute until it does
        start.append(time.time())
        os.kill(os.getpid(), signal.SIGINT)

    start, message = list[float](), ""
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupts, daemon=True).start()
    try:
        trial.call(1, stalls if rank else None)
    except (KeyboardInterrupt, spmd.SpmdError) as error:
        message = text_of(error)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the pool has it
        raised.touch()
    seconds = time.time() - start[0] if start else 0.0
    trial.call(1)
    return message, seconds, trial.unequal(3, trial.call(2))


def test_an_interrupt_is_answered_while_another_stage_stalls(ranks: Ranks, tmp_path: Path) -> None:
    (own, seconds, differ), (other, _, differ_too) = ranks.run(2, is_interrupted, tmp_path)
    assert "KeyboardInterrupt" in own and "in backward.0, on micro-batch 1 of 4" in own
    assert "its state is as before the call" in own and seconds < PROMPT
    assert "RankFailedError: step did not end on all ranks: along pp, rank 0 raised KeyboardInterrupt" in other
    assert "State is on rank 0 as before the call, on rank 1 as before the call" in other
    assert differ == differ_too == []


def stops(rank: int, world: int) -> list[str]:
    """Rank 1 is stopped for a while, as by a debugger."""
    trial = Trial(rank)
    trial.call(0)
    trial.call(1, partial(faults.stops, 2.0) if rank else None)
    return trial.unequal(3, trial.call(2))


def test_a_stage_that_stops_and_goes_on_is_waited_for(ranks: Ranks) -> None:
    assert ranks.run(2, stops) == [[], []]


def own_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What this rank has of it."""
    kept: list[Any] = [*model.parameters(), *(each for slot in optimizer.state.values() for each in slot.values())]
    return [each.to_local().detach().clone() for each in kept]


def dies(rank: int, world: int, folder: Path) -> None:
    """Rank 1 is killed."""
    trial = Trial(rank)
    for k in range(2):
        trial.call(k)
    before = own_state(*trial.objects)

    def killed() -> None:
        (folder / "killed").write_text(repr(time.time()))
        faults.kills()

    with pytest.raises(spmd.RankFailedError) as caught:
        trial.call(2, killed if rank else None)
    seconds = time.time() - float((folder / "killed").read_text())
    is_as_before = all(map(torch.equal, before, own_state(*trial.objects)))
    (folder / "report").write_text(json.dumps([text_of(caught.value), seconds, is_as_before]))


def test_a_stage_that_is_killed_ends_the_call_on_the_others(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="died with exit code -9"):
        ranks.run(2, dies, tmp_path, grace=60)
    message, seconds, is_as_before = json.loads((tmp_path / "report").read_text())
    assert "along pp, rank 1 has ended, or does not answer" in message
    assert "in backward.0, on micro-batch 1 of 4" in message and "State is on rank 0 as before the call" in message
    assert seconds < PROMPT and is_as_before


def dies_connecting(rank: int, world: int, report: Path) -> None:
    """Rank 1 is killed where ranks on NCCL connect, before they send anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spmd.ranks.world._backend", lambda *group_and_device: "nccl")
        if rank == 1:
            patch.setattr("spmd.lowering.run_stages.connect", lambda *_: faults.kills())
        with pytest.raises(spmd.RankFailedError) as caught:
            Trial(rank).call(0)
    report.write_text(text_of(caught.value))


def test_a_rank_that_dies_where_ranks_connect_is_named(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="died with exit code -9"):
        ranks.run(2, dies_connecting, tmp_path / "report", grace=60)
    message = (tmp_path / "report").read_text()
    assert "along pp, rank 1 has ended, or does not answer" in message
    assert "State is on rank 0 as before the call" in message
