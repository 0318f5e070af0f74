"""Numbers of parameter groups are read at every call, also where the optimizer branches on them; counters are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import spmd
from tests.harness.cases import MLP

CASE = MLP(sizes=(15, 17, 4), rows=6)
pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]


def both(make_optimizer: Any, change: Any, calls: int = 4, model: Any = None) -> tuple[Any, int]:
    """(parameters and state after the plain steps and after the compiled ones, the number of programs)."""
    ends = []
    compiled = spmd.compile(CASE.step)
    for step in (CASE.step, compiled):
        torch.manual_seed(0)
        net = CASE.build()[0] if model is None else model()
        optimizer = make_optimizer(net.parameters())
        for k in range(calls):
            change(optimizer.param_groups[0], k)
            step(net, optimizer, *CASE.part(0, k))
        state = [[v for v in values.values() if v is not None] for values in optimizer.state.values()]
        ends.append(([p.detach() for p in net.parameters()], state))
    return ends, len(compiled.programs)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_weight_decay_that_is_switched_on_and_off(make: Any) -> None:
    def change(group: dict[str, Any], k: int) -> None:
        group["weight_decay"] = [0.0, 0.1, 0.0, 0.2][k]

    ends, _ = both(lambda p: make(p, lr=0.01, weight_decay=0.0), change)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)


def test_momentum_that_is_switched_on_later() -> None:
    def change(group: dict[str, Any], k: int) -> None:
        group["momentum"] = 0.9 * (k > 1)

    ends, _ = both(lambda p: torch.optim.SGD(p, lr=0.01), change)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)


def test_a_rate_of_a_table_of_numpy() -> None:
    rates = np.linspace(0.1, 0.01, 8)

    def change(group: dict[str, Any], k: int) -> None:
        group["lr"], group["momentum"] = rates[k], rates[k + 4]

    ends, programs = both(lambda p: torch.optim.SGD(p, lr=0.01), change)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)
    assert programs == 1


class Floats(torch.optim.Optimizer):
    """Takes the learning rate out as a Python float."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=float(group["lr"]))


def test_a_tensor_learning_rate_that_is_read_as_a_float_compiles_anew() -> None:
    def change(group: dict[str, Any], k: int) -> None:
        group["lr"] = [0.1, 0.1, 0.2, 0.1][k]

    ends, programs = both(lambda p: Floats(p, 0.1), change)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)
    assert programs == 2


def test_a_learning_rate_that_is_a_tensor() -> None:
    ends, _ = both(
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), lambda group, k: group["lr"].fill_(0.1 / (k + 1))
    )
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)


class Scaled(nn.Module):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(15, 4).double(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Mine(torch.optim.AdamW):
    """A subclass of a user."""


@pytest.mark.parametrize("make", [torch.optim.Adam, Mine])
def test_parameters_without_dims_and_subclasses(make: Any) -> None:
    ends, programs = both(lambda p: make(p, lr=0.01), lambda group, k: None, model=Scaled)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)
    assert programs == (1 if make is torch.optim.Adam else 2)


def test_ops_on_live_numbers_hit_the_fake_cache_and_stay_live_in_the_graph() -> None:
    """Torch keeps no results of calls on fakes with symbols: an optimizer would be most of a compile."""
    (net, *_), before = CASE.build(), FakeTensorMode.cache_info().bypasses
    optimizer, compiled = torch.optim.AdamW(net.parameters()), spmd.compile(CASE.step)
    for k in range(2):
        compiled(net, optimizer, *CASE.part(0, k))
    assert FakeTensorMode.cache_info().bypasses.get("symbolic shape", 0) == before.get("symbolic shape", 0)
    rates = [node for node in compiled.program.placeholders if isinstance(node.meta["val"], torch.SymFloat)]
    assert rates and all(node.users for node in rates)


def test_a_number_made_of_a_constant_and_a_hyper_parameter_is_read_at_each_call() -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        scale = (torch.tensor(2.0, dtype=torch.float64) * optimizer.param_groups[0]["lr"]).item()
        return x * scale

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    compiled, x = spmd.compile(step), torch.ones(3, dtype=torch.float64)
    for lr in (0.5, 0.25, 0.75):
        optimizer.param_groups[0]["lr"] = lr
        assert torch.equal(compiled(model, optimizer, x), x * (2 * lr))
