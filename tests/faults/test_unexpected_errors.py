"""An exception inside spmd that nobody raised on purpose becomes one of ours, and changes nothing."""

from __future__ import annotations

import copy
import re
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes
import spmd
from spmd.capture import decompositions, provenance, trace
from spmd.capture.functional.second_trace import SecondTrace
from spmd.guards.guards import Guards
from spmd.lowering.codegen import _Writer
from spmd.partitioner.cheapest_option import Chooser
from spmd.partitioner.emit import Emitter
from spmd.rules.registry import RULES
from spmd.running.inputs import Inputs
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, plain_run, snapshot, unequal
from tests.harness.pool import Ranks
from tests.harness.torch_state import torch_state

CASE = MLP(sizes=(3, 4, 2), rows=4, optimizer="SGD momentum")


def _raising() -> Any:
    """A function that raises as a line of our own would: its code is in a file of the package."""
    scope: dict[str, Any] = {}
    file = str(Path(spmd.__file__).with_name("injected.py"))
    exec(compile("def fails(*args, **kwargs):\n    raise KeyError('injected')", file, "exec"), scope)
    return scope["fails"]


FAILS = _raising()
aten = torch.ops.aten
STAGES: list[tuple[Any, Any, type[spmd.SpmdError], str]] = [  # what fails, the kind of error, and a part of its text
    (provenance.Recorder, "_origin", spmd.CaptureError, "capture of MLP.step"),
    (SecondTrace, "_added", spmd.CaptureError, "capture of step"),
    (decompositions, "_mean", spmd.CaptureError, "aten.mse_loss.default cannot be made functional or decomposed"),
    (RULES, aten.mm.default, spmd.PartitionError, "at aten.mm.default"),
    (Chooser, "cheapest", spmd.PartitionError, "partition of step"),
    (Emitter, "placeholder", spmd.PartitionError, "partition of step"),
    (passes.DropDetach, "rewrite", spmd.PassError, "pass DropDetach"),
    (passes.StartEarly, "rewrite", spmd.PassError, "pass StartEarly"),
    (passes.FuseUpdate, "rewrite", spmd.PassError, "pass FuseUpdate"),
    (passes.ReuseMemory, "rewrite", spmd.PassError, "pass ReuseMemory"),
    (_Writer, "_write", spmd.PassError, "lower of step/program-0 raised KeyError: 'injected'"),
    (spmd.step_compiler, "prepare", spmd.PartitionError, "partition of step"),
    (spmd.step_compiler, "describe_for_agreement", spmd.SpmdError, "compiling of step"),
    (Guards, "of", spmd.SpmdError, "compiling of step"),
    (Inputs, "enter", spmd.SpmdError, "running of step/program-0"),
]


def text_of(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def inject(monkeypatch: pytest.MonkeyPatch, owner: Any, name: Any) -> None:
    """Let ``owner.name``, or ``owner[name]``, raise."""
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, FAILS)
    else:
        monkeypatch.setattr(owner, name, FAILS)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("owner, name, kind, text", STAGES, ids=lambda each: str(getattr(each, "__name__", ""))[-40:])
def test_a_stage_that_fails(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: Any, kind: type[spmd.SpmdError], text: str
) -> None:
    torch.manual_seed(0)
    objects, step, before = CASE.build(), spmd.compile(CASE.step), torch_state()
    done = int(owner is Inputs)  # what runs has compiled before
    for k in range(done):
        step(*objects, *CASE.part(0, k))
    state = snapshot(None, objects)
    with monkeypatch.context() as patch, pytest.raises(kind) as caught:
        inject(patch, owner, name)
        step(*objects, *CASE.part(0, done))
    found = text_of(caught.value)
    assert type(caught.value) is kind
    assert text in found and "KeyError: 'injected'" in found
    assert "error in spmd, not in the step. Please report it" in found
    assert "cases.py:" in found, "the user's line, or that of the step"
    assert isinstance(caught.value.__cause__, KeyError)
    assert unequal(state, snapshot(None, objects), 0, 1) == [] and torch_state() == before
    result = step(*objects, *CASE.part(0, done))
    assert all_unequal(plain_run(CASE, 1, done + 1)[-1:], [snapshot(result, objects)], 0, 1) == []


@pytest.mark.usefixtures("alone")
def test_state_that_fails_on_its_way_to_the_ranks_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    objects, step = CASE.build(), spmd.compile(CASE.step)
    saved = [copy.deepcopy(each.state_dict()) for each in objects]
    with monkeypatch.context() as patch, pytest.raises(spmd.SpmdError, match="distributing state of step") as caught:
        inject(patch, spmd.step_compiler, "commit")
        step(*objects, *CASE.part(0, 0))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(spmd.SpmdError, match="distributing state of step/program-0 raised KeyError"):
        step(*objects, *CASE.part(0, 0))
    with pytest.raises(spmd.SpmdError, match=r"(?s)cannot recover: .* no other rank\. Load a checkpoint"):
        step.recover()
    for each, state in zip(objects, saved, strict=True):
        each.load_state_dict(state)
    result = step(*objects, *CASE.part(0, 0))
    assert all_unequal(plain_run(CASE, 1, 1), [snapshot(result, objects)], 0, 1) == []


def fails_on_one(rank: int, world: int, failing: int, owner: Any, name: str) -> tuple[str, float, list[str]]:
    """The first call's error, when it was raised, and what differs after the next call."""
    torch.manual_seed(0)
    objects, step = CASE.build(), spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(CASE.step)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(spmd.SpmdError) as caught:
        if rank == failing:
            inject(patch, owner, name)
        step(*objects, *CASE.part(rank, 0))
    when = time.time()
    result = step(*objects, *CASE.part(rank, 0))
    return text_of(caught.value), when, all_unequal(plain_run(CASE, world, 1), [snapshot(result, objects)], rank, world)


@pytest.mark.parametrize(
    "failing, owner, name",
    [(1, Chooser, "cheapest"), (0, passes.StartEarly, "rewrite")],  # the first rank runs passes for all
    ids=["choose", "pass"],
)
def test_the_other_rank_raises_at_once(ranks: Ranks, failing: int, owner: Any, name: str) -> None:
    found = ranks.run(2, fails_on_one, failing, owner, name)
    (own, one, differ), (other, two, differ_too) = found[failing], found[1 - failing]
    assert "KeyError: 'injected'" in own and "Please report it" in own
    assert (
        f"step was not compiled on any rank, since rank {failing} failed" in other and "KeyError: 'injected'" in other
    )
    assert abs(one - two) < 30
    assert differ == differ_too == []


class Table(nn.Module):
    """Looks up rows; ``wrong`` is what it does to them."""

    def __init__(self, wrong: Any = None) -> None:
        super().__init__()
        self.rows, self.wrong = nn.Embedding(5, 3, dtype=torch.float64), wrong

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.rows(x)
        return self.wrong(self, rows) if self.wrong else rows


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    return loss


takes_floats = pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="its shape function takes them")
MISTAKES: list[Any] = [
    (lambda self, rows: rows @ torch.ones(4, 4, dtype=rows.dtype), RuntimeError),
    pytest.param(lambda self, rows: F.embedding_bag(rows, self.rows.weight), RuntimeError, marks=takes_floats),
    (lambda self, rows: F.batch_norm(rows, None, None, torch.ones(2, dtype=rows.dtype), training=True), RuntimeError),
    (lambda self, rows: F.linear(rows, [1.0]), TypeError),
    (lambda self, rows: rows[:, 3], IndexError),
    (lambda self, rows: self.misspelled(rows), AttributeError),
    (lambda self, rows: {"a": rows}["b"], KeyError),
    (lambda self, rows: F.nll_loss(rows, torch.zeros(3, dtype=torch.long)), ValueError),
]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrong, kind", MISTAKES)
def test_a_mistake_of_the_step_s_stays_as_it_is(wrong: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        backward(Table(wrong), torch.tensor([0, 3]))
    with pytest.raises(kind) as caught:
        spmd.compile(backward)(Table(wrong), torch.tensor([0, 3]))
    assert "raised while spmd traced backward" in text_of(caught.value)
    assert "test_unexpected_errors.py:" in text_of(caught.value)


@pytest.mark.usefixtures("alone")
def test_an_op_that_fails_on_the_data_of_a_call_shows_the_user_s_line() -> None:
    model, step = Table(), spmd.compile(backward)
    step(model, torch.tensor([0, 3]))
    with pytest.raises(IndexError, match="index out of range") as caught:
        step(model, torch.tensor([0, 5]))
    assert re.search(r"index_select.*  # test_unexpected_errors.py:\d+: rows: Tensor = self.rows\(x\)",
                     "".join(traceback.format_exception(caught.value)))  # fmt: skip
    assert step(model, torch.tensor([0, 4])).isfinite()


@pytest.mark.usefixtures("alone")
def test_an_op_that_only_fails_in_our_trace_is_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    table = decompositions.first_trace_table() | {aten.embedding.default: FAILS}
    monkeypatch.setattr(trace, "first_trace_table", lambda: table)
    pattern = (
        r"(?s)raised KeyError: 'injected' at aten\.embedding\.default.*test_unexpected_errors\.py:\d+ in model\.rows"
    )
    with pytest.raises(spmd.CaptureError, match=pattern) as caught:
        spmd.compile(backward)(Table(), torch.tensor([0, 3]))
    assert "Please report it" in str(caught.value)
