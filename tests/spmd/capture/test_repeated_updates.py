"""Updates that are copied from one parameter to others: the captured program is that of tracing all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.overrides import TorchFunctionMode

import spmd
from spmd.capture import optimizers
from spmd.capture.provenance import Recorder

pytestmark = pytest.mark.usefixtures("alone")


class Seen(TorchFunctionMode):
    """A mode of the user's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def traced_whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(optimizers.RepeatedUpdates, "of", lambda *_: nullcontext())
        yield


@contextmanager
def counted_copies() -> Iterator[list[int]]:
    """How often updates are copied: seen by the profiler's hook, as the step must not reach a counter of the test."""
    found = [0]

    def note(frame: Any, event: str, _: Any) -> None:
        found[0] += event == "call" and frame.f_code is Recorder.copy.__code__

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def captured(folder: Path, build: Callable[[Any], optim.Optimizer], mode: Any = None) -> str:
    torch.manual_seed(0)
    shapes = [(3, 2), (3, 2), (2,), (3, 2), (2,), (2,), (3, 2)]
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    optimizer = build(list(model))

    @spmd.compile(dump=str(folder))
    def step(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> Tensor:
        loss = sum((p * p).sum() for p in model.parameters()) * x.mean()
        loss.backward()
        with mode or nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        return loss

    step(model, optimizer, torch.ones(2))
    return (folder / "step" / "program-0" / "00_capture.py").read_text()


CASES = {
    "AdamW": (lambda p: optim.AdamW(p, fused=True), 3),
    "two groups": (
        lambda p: optim.Adam([{"params": p[:4]}, {"params": p[4:], "lr": 0.1}], amsgrad=True),
        1,
    ),
    "SGD": (lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1), 3),
    "RMSprop": (
        lambda p: optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9),
        2,
    ),  # the first adds nodes for numbers
    "a rate in a tensor": (lambda p: optim.Adam(p, lr=torch.tensor(0.1)), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_that_of_tracing_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, copies = CASES[name]
    with counted_copies() as found:
        got = captured(tmp_path / "copied", build)
    assert found == [copies]
    with traced_whole(monkeypatch):
        assert got == captured(tmp_path / "traced", build)


def test_a_mode_of_the_user_s_sees_all_ops(tmp_path: Path) -> None:
    with counted_copies() as found:
        captured(tmp_path, CASES["SGD"][0], Seen())
    assert found == [0]


@pytest.mark.parametrize("ask", [float, bool])
def test_an_update_that_asks_for_a_value_is_not_copied(
    ask: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["torch.optim.sgd"]  # torch.optim itself forgets the name
    function = vars(module)["_single_tensor_sgd"]

    def asking(params: Any, *lists: Any, **options: Any) -> None:
        for k in range(len(params)):
            assert ask(torch.ones(()))
            function([params[k]], *([each[k]] if each else each for each in lists), **options)

    monkeypatch.setattr(module, "_single_tensor_sgd", asking)
    with counted_copies() as found:
        captured(tmp_path, CASES["SGD"][0])
    assert found == [0]
