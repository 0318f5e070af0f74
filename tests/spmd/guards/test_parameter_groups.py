"""Groups and state of an optimizer are guarded: another arrangement compiles another program."""

from __future__ import annotations

from collections.abc import Callable
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
def test_an_int_that_the_step_counts_in_a_group_is_read_where_state_is_made_ahead() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = CASE.step(model, optimizer, x, y)
        optimizer.param_groups[0]["calls"] += 1
        return loss * optimizer.param_groups[0]["calls"]

    losses = []
    for train in (step, spmd.compile(step)):
        torch.manual_seed(0)
        model, _ = CASE.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.param_groups[0]["calls"] = 0
        losses.append([float(train(model, optimizer, *CASE.part(0, k))) for k in range(3)])
        assert optimizer.param_groups[0]["calls"] == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


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


class Counting(torch.optim.SGD):
    """Keeps numbers of its own in its state and, from the first step on, in its group, as some optimizers do."""

    def step(self, closure: Any = None) -> None:
        own = self.state.setdefault("all", {"steps": 0, "scale": 1.0})
        own["steps"] += 1
        own["scale"] *= 0.5
        (group,) = self.param_groups
        group["step"] = group["step"] + 1 if "step" in group else 1
        for parameter in group["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1 * own["scale"] / own["steps"] / group["step"])


def counted(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum() * (1.0 + len(optimizer.state))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [Counting, torch.optim.SGD])
def test_state_of_no_parameter_counts(kind: type[torch.optim.SGD]) -> None:
    trained = []
    for step in (counted, spmd.compile(counted)):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.5)
        optimizer.state["noted"], optimizer.state[torch.ones(3)] = {"by": "hand"}, {"old": torch.ones(3)}  # type: ignore[index]
        losses = [step(model, optimizer, torch.ones(2, 4).double()) for _ in range(4)]
        own = {key: values for key, values in optimizer.state.items() if isinstance(key, str)}
        trained.append((losses, weights(model), own, optimizer.param_groups[0].get("step")))
    torch.testing.assert_close(trained[0][:2], trained[1][:2], rtol=1e-9, atol=1e-10)
    assert trained[0][2:] == trained[1][2:]
    optimizer.state["k"] = 1  # type: ignore[index]
    with pytest.raises(spmd.CaptureError, match=r"optimizer\.state\['k'\] is of no parameter.*self\.steps"):
        step(model, optimizer, torch.ones(2, 4).double())


class Settings:
    """An object in a group."""

    scale = 1.0


def put_deep(groups: dict[str, Any], scale: float) -> None:
    groups["deep"] = [((scale,),)]


READ_AND_CHANGED: dict[str, tuple[Callable[[dict[str, Any]], float], Callable[[dict[str, Any], float], None]]] = {
    "dict": (lambda group: group["dict"]["scale"], lambda group, scale: group["dict"].update(scale=scale)),
    "object": (lambda group: group["object"].scale, lambda group, scale: setattr(group["object"], "scale", scale)),
    "dict in a tuple": (
        lambda group: group["pair"][1]["scale"],
        lambda group, scale: group["pair"][1].update(scale=scale),
    ),
    "deep": (lambda group: group["deep"][0][0][0], put_deep),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", READ_AND_CHANGED)
def test_what_changes_inside_of_a_value_of_a_group_is_never_stale(kind: str) -> None:
    read, change = READ_AND_CHANGED[kind]
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group, x = optimizer.param_groups[0], torch.ones(2, 4)
    group |= {"dict": {"scale": 1.0}, "object": Settings(), "pair": (0.5, {"scale": 1.0}), "deep": [((1.0,),)]}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        return model(x).sum() * read(optimizer.param_groups[0])

    compiled = spmd.compile(step)
    programs = []
    for scale in (1.0, 1.0, 3.0, 3.0):
        change(group, scale)
        torch.testing.assert_close(compiled(model, optimizer, x), step(model, optimizer, x))
        programs.append(len(compiled.programs))
    assert programs == [1, 1, 2, 2]


@pytest.mark.usefixtures("alone")
def test_a_write_into_a_dict_in_a_group_is_refused_and_undone() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["dict"] = {"count": 0}

    @spmd.compile
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.param_groups[0]["dict"]["count"] += 1
        return model(x).sum() * optimizer.param_groups[0]["dict"]["count"]

    with pytest.raises(spmd.CaptureError, match=r"changes the entries of optimizer\.0\.dict"):
        step(model, optimizer, torch.ones(2, 4))
    assert optimizer.param_groups[0]["dict"] == {"count": 0}
