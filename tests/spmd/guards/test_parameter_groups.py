"""Groups and state of an optimizer are guarded: another arrangement compiles another program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.cases import MLP

pytestmark = pytest.mark.slow

CASE = MLP(sizes=(15, 17, 4), rows=6)


class Warmed(torch.optim.Optimizer):
    """An optimizer that keeps a plain number: its steps grow."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["scale"] = state.get("scale", 0.0) + 0.25
                parameter.sub_(parameter.grad * (group["lr"] * state["scale"]))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.usefixtures("alone")
def test_parameters_that_change_groups_are_updated_with_the_new_ones() -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        first, last = [model[0].weight, model[0].bias], [model[2].weight, model[2].bias]
        return [{"params": first, "lr": 0.1}, {"params": last, "lr": 0.01}]

    trained = []
    for step in (CASE.step, spmd.compile(CASE.step)):
        torch.manual_seed(0)
        model, _ = CASE.build()
        optimizer = torch.optim.SGD(groups(model))
        step(model, optimizer, *CASE.part(0, 0))
        a, b = optimizer.param_groups
        a["params"], b["params"] = b["params"], a["params"]
        step(model, optimizer, *CASE.part(0, 1))
        trained.append(weights(model))
    torch.testing.assert_close(*trained, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("alone")
def test_plain_numbers_in_optimizer_state_are_never_stale() -> None:
    trained = []
    for step in (CASE.step, spmd.compile(CASE.step)):
        torch.manual_seed(0)
        model, _ = CASE.build()
        optimizer = Warmed(model.parameters())
        for k in range(3):
            step(model, optimizer, *CASE.part(0, k))
        trained.append((weights(model), [state["scale"] for state in optimizer.state.values()]))
    torch.testing.assert_close(*trained, rtol=1e-9, atol=1e-10)
