"""An interrupt while a step is traced ends the call, not the process, wherever it comes."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any

import pytest
import torch

import spmd
from tests.harness.cases import MLP
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 7), rows=6, optimizer="SGD momentum")


def interrupted(rank: int, world: int, package: str, file: str, function: str, called_by: str) -> tuple[str, str]:
    """Rank 1 is interrupted in a function, as if code of ``package`` ran. What that and the next call do."""
    objects, step = CASE.build(), spmd.compile(CASE.step)
    message, sent = "nothing was raised", []

    def interrupt(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        caller = frame.f_back and frame.f_back.f_code.co_name
        if not sent and event == "call" and (code.co_name, caller) == (function, called_by):
            assert code.co_filename.endswith(file)
            sys.setprofile(None)
            sent.append(file)
            os.kill(os.getpid(), signal.SIGINT)

    interrupt.__code__ = interrupt.__code__.replace(co_filename=package)  # the signal comes in its code
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thresholds = gc.get_threshold()
    gc.set_threshold(500)  # the collector comes often
    try:
        sys.setprofile(interrupt if rank == 1 else None)
        step(*objects, *CASE.part(rank, 0))
    except (KeyboardInterrupt, spmd.RankFailedError) as error:
        message = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    finally:
        sys.setprofile(None)
        gc.set_threshold(*thresholds)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the pool has it
    assert bool(sent) == (rank == 1)
    return message, str(float(step(*objects, *CASE.part(rank, 0))))


PLACES = {
    "a shape function, which C++ calls": (torch.__file__, "simple_registry.py", "find_torch_dispatch_rule"),
    "a callback of the collector, whose errors are ignored": (spmd.__file__, "new_objects.py", "_note_young"),
    "a record of what is undone": (spmd.__file__, "python_reads.py", "_stand_in"),
}
CALLERS = ("__torch_function__", "_before_a_collection", "_note")


@pytest.mark.parametrize("place, called_by", [*zip(PLACES.values(), CALLERS, strict=True)], ids=list(PLACES))
def test_an_interrupt_ends_the_call_and_changes_nothing(
    ranks: Ranks, place: tuple[str, str, str], called_by: str
) -> None:
    outcomes = ranks.run(2, interrupted, *place, called_by, timeout=120)
    (other, first), (own, second) = outcomes
    assert own.startswith("KeyboardInterrupt") and "its state is as before the call" in own
    assert "along dp, rank 1 raised KeyboardInterrupt" in other
    assert first == second
