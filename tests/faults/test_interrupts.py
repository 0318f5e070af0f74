"""An interrupt while a step is traced ends the call, not the process, wherever it comes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import spmd
from spmd.interpreter import interrupts
from spmd.python_state.effects.cleared_gradients import ClearedGradients
from tests.harness.cases import MLP
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 7), rows=6, optimizer="SGD momentum")


def interrupted(rank: int, world: int, package: str, file: str, function: str, called_by: str) -> tuple[str, str]:
    """Rank 0 is interrupted while it traces, as if code of ``package`` ran. What that and the next call do."""
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
        sys.setprofile(interrupt if rank == 0 else None)
        step(*objects, *CASE.part(rank, 0))
    except (KeyboardInterrupt, spmd.RankFailedError) as error:
        message = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    finally:
        sys.setprofile(None)
        gc.set_threshold(*thresholds)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the pool has it
    assert bool(sent) == (rank == 0)
    return message, str(float(step(*objects, *CASE.part(rank, 0))))


PLACES = {
    "a shape function, which C++ calls": (torch.__file__, "simple_registry.py", "find_torch_dispatch_rule"),
    "a callback of the collector, whose errors are ignored": (spmd.__file__, "new_objects.py", "_note_young"),
    "a record of what is undone": (spmd.__file__, "stand_ins.py", "put"),
}
CALLERS = ("__torch_function__", "_before_a_collection", "_note")


@pytest.mark.parametrize("place, called_by", [*zip(PLACES.values(), CALLERS, strict=True)], ids=list(PLACES))
def test_an_interrupt_ends_the_call_and_changes_nothing(
    ranks: Ranks, place: tuple[str, str, str], called_by: str
) -> None:
    outcomes = ranks.run(2, interrupted, *place, called_by, timeout=120)
    (own, first), (other, second) = outcomes
    assert own.startswith("KeyboardInterrupt") and "its state is as before the call" in own
    assert "along dp, rank 0 raised KeyboardInterrupt" in other
    assert first == second


class AtLine:
    """Sends an interrupt before the ``k``-th line that a call runs of code below ``folder``; counts these lines."""

    def __init__(self, folder: Path, k: int = 0) -> None:
        self.folder, self.k, self.count = str(folder), k, 0

    @contextmanager
    def traced(self) -> Iterator[None]:
        sys.settrace(self._enter)
        try:
            yield
            if self.k and self.count == self.k:  # it was sent, and may have been held until now
                time.sleep(10)  # it comes here then, which ends this
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self.folder) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        self.count += event == "line"
        if self.count == self.k and event == "line":
            sys.settrace(None)
            os.kill(os.getpid(), signal.SIGINT)
        return self._line

    _line.__code__ = _line.__code__.replace(co_filename=spmd.__file__)  # the signal comes in its code


def interrupted_at_lines(rank: int, world: int, optimizer: str, folder: Path, places: int) -> tuple[int, list[str]]:
    """How many compilations an interrupt ended, at one of the lines below ``folder`` each, and what they changed."""
    case = MLP(sizes=(15, 7), rows=6, optimizer=optimizer)
    batch, at = case.part(0, 0), AtLine(folder)
    torch.manual_seed(0)
    objects, step = case.build(), spmd.compile(case.step)
    with at.traced():
        expected = float(step(*objects, *batch))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        lines = [1 + k * at.count // places for k in range(places)]
        found = [_changed_by(AtLine(folder, line), case, batch, expected) for line in lines]
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the pool has it
    ended = [changes for changes in found if changes is not None]
    return len(ended), [change for changes in ended for change in changes]


def _changed_by(at: AtLine, case: MLP, batch: Any, expected: float) -> list[str] | None:
    """What a compilation changed that was interrupted; None if the interrupt came after it."""
    torch.manual_seed(0)
    (model, optimizer), step = case.build(), spmd.compile(case.step)
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with suppress(KeyboardInterrupt), at.traced():
        step(model, optimizer, *batch)
    if step._dispatch.programs.all:
        return None
    changed = ["the optimizer has state"] if optimizer.state else []
    changed += [] if torch.is_grad_enabled() else ["the grad mode"]
    for now, (parameter, value) in zip(model.parameters(), before, strict=True):
        if now is not parameter or now.grad is not None or not torch.equal(now, value):
            changed.append("a parameter has changed")
    loss = float(step(model, optimizer, *batch))
    return changed if loss == expected else [*changed, f"the loss is {loss} instead of {expected}"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, folder, places", [("AdamW", "", 6), ("SGD momentum", "call/initial_state.py", 8)])
def test_an_interrupt_at_any_line_of_ours_changes_nothing(
    ranks: Ranks, optimizer: str, folder: str, places: int
) -> None:
    """Our code replaces parts of the user's objects while it traces a step, and puts all of them back."""
    at = Path(spmd.__file__).parent / folder
    [(ended, changed)] = ranks.run(1, interrupted_at_lines, optimizer, at, places, process_group=False)
    assert ended and changed == []  # how many end theirs is chance: those that are held come when the call is over


def test_what_restores_a_setting_of_torch_is_not_interrupted() -> None:
    """``no_grad`` sets the grad mode back by a function that function modes see."""

    def ends(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with ClearedGradients({}):
        with torch.no_grad():
            interrupts._held.append((signal.SIGINT, ends))
        assert torch.is_grad_enabled()
        with pytest.raises(KeyboardInterrupt):
            torch.ones(2).neg()
    assert not interrupts._held
