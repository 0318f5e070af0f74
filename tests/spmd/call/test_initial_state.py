"""State that torch's optimizers make in their first step is made ahead: the first call's program serves all calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import spmd
from spmd import capture_call
from spmd.call.initial_state import InitialState
from spmd.call.state import Arguments
from tests.harness.memory import resident_bytes

pytestmark = pytest.mark.usefixtures("alone")

Make = Callable[[Any], optim.Optimizer]
MADE: dict[str, Make] = {
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "Adadelta": optim.Adadelta,
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adafactor": optim.Adafactor,
    "Muon": optim.Muon,
    "Adagrad": optim.Adagrad,
}


class Damped(optim.Adam):
    """An optimizer of the user's own, of which nothing is known."""


KEPT: dict[str, Make] = {
    "SGD with dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "one of the user's own": Damped,
    "Rprop, whose state has the learning rate": lambda p: optim.Rprop(p, lr=0.01),
}


class Pair:
    """Two equal models with optimizers; the first is trained by a compiled step, the second by the plain one."""

    def __init__(self, make: Make, step: Callable[..., Tensor]) -> None:
        torch.manual_seed(0)
        self.x, self.step, self.compiled = torch.randn(5, 3, dtype=torch.float64), step, spmd.compile(step)
        self.models = [_model(), _model()]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.optimizers = [make(model.parameters()) for model in self.models]

    def check(self, *args: Any) -> None:
        """One call of each, with the same results, parameters and optimizer state."""
        steps = [self.compiled, self.step]
        for step, model, optimizer in zip(steps, self.models, self.optimizers, strict=True):
            step(model, optimizer, self.x, *args)
        got, want = ([m.state_dict(), o.state_dict()] for m, o in zip(self.models, self.optimizers, strict=True))
        assert got[1]["state"].keys() == want[1]["state"].keys()
        torch.testing.assert_close(got[0], want[0], rtol=1e-10, atol=1e-12)
        for index, values in want[1]["state"].items():
            assert _described(got[1]["state"][index]) == _described(values)
            torch.testing.assert_close(got[1]["state"][index], values, rtol=1e-10, atol=1e-12)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()


def _described(values: Mapping[str, Any]) -> list[Any]:
    return [(key, value.dtype, value.shape, value.stride()) for key, value in values.items() if torch.is_tensor(value)]


def train(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_one_program_serves_all_steps(name: str) -> None:
    pair = Pair(MADE[name], train)
    for _ in range(3):
        pair.check()
    assert len(pair.compiled.programs) == 1


@pytest.mark.parametrize("name", KEPT)
def test_what_does_not_begin_with_constants_has_a_first_program(name: str) -> None:
    pair = Pair(KEPT[name], train)
    for _ in range(3):
        pair.check()
    assert len(pair.compiled.programs) == 2


def train_at_times(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, update: bool) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def test_a_step_that_updates_nothing_leaves_the_optimizer_without_state() -> None:
    pair = Pair(optim.Adam, train_at_times)
    pair.check(False)
    assert not pair.optimizers[0].state
    for update in (True, False, True):
        pair.check(update)


def test_parameters_without_a_gradient_have_no_state() -> None:
    def train_first(model: nn.Sequential, optimizer: optim.Optimizer, x: Tensor) -> Tensor:
        return train(model[0], optimizer, x)

    pair = Pair(optim.Adam, train_first)
    pair.check()
    pair.check()
    assert len(pair.compiled.programs) == 1 and len(pair.optimizers[0].state) == 1


def scaled_at_first(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> Tensor:
    return train(model, optimizer, x * (0.1 if not optimizer.state else 1.0))


def damped_later(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.param_groups[0]["dampening"] = 0.5
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_parameters_without_a_gradient_cost_one_more_trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithUnused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(x)
            return y

    traces: list[Any] = []
    original = capture_call.capture
    monkeypatch.setattr(capture_call, "capture", lambda *given: (traces.append(given), original(*given))[1])
    model = WithUnused()
    step, optimizer = spmd.compile(train), optim.AdamW(model.parameters())
    counts = []
    for shape in ((5, 3), (5, 3), (5, 2, 3)):
        step(model, optimizer, torch.randn(shape))
        counts.append(len(traces))
    assert counts == [2, 2, 3]
    assert len(optimizer.state) == 2


@pytest.mark.parametrize("step", [scaled_at_first, damped_later])
def test_a_step_that_would_notice_has_a_first_program(step: Callable[..., Tensor]) -> None:
    pair = Pair(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), step)
    for _ in range(3):
        pair.check()


def test_a_hook_that_would_notice_has_a_first_program() -> None:
    def hook(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not optimizer.state:
            optimizer.param_groups[0]["params"][0].grad.mul_(3.0)

    pair = Pair(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), train)
    for optimizer in pair.optimizers:
        optimizer.register_step_pre_hook(hook)
    for _ in range(3):
        pair.check()


def test_large_state_is_stored_flat_all_the_same() -> None:
    model = nn.Linear(700, 700)
    step = spmd.compile(train)
    step(model, optim.AdamW(model.parameters()), torch.ones(2, 700))
    assert step.program is not None and not step.program.fixed
    assert [len(declared.parts) for declared in step.program.inputs if declared.parts] == [2, 2, 2]


def test_an_error_takes_the_state_back() -> None:
    def fails(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        return loss if float(loss) > 0 else -loss

    model = _model()
    optimizer = optim.Adam(model.parameters())
    with pytest.raises(spmd.SpmdError):
        spmd.compile(fails)(model, optimizer, torch.ones(2, 3, dtype=torch.float64))
    assert not optimizer.state and model[0].weight.grad is None


def test_zeros_take_no_memory_until_they_are_written() -> None:
    model = nn.Linear(4096, 4096)
    optimizer = optim.Adam(model.parameters())
    before = resident_bytes()
    InitialState.of(Arguments([], None, {"m": model}, {"o": optimizer}, {}))  # type: ignore[arg-type]
    assert resident_bytes() - before < 10 << 20  # of 128 MiB
    assert not optimizer.state[model.weight]["exp_avg"][::512].any()
