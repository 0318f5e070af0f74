"""Attributes that the user attaches to parameters, buffers and arguments: a step may read them, but not write them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks


class Scaled(MLP):
    """A factor on the gradient of each parameter, of which one is changed after the second step."""

    sizes = (5, 4, 3)

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        model[0].weight.factor, model[0].bias.options = 0.1, {"factor": 0.5}
        return model, optimizer

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) * getattr(x, "share", 1.0)
        loss.backward()
        for parameter in model.parameters():
            options: Any = getattr(parameter, "options", {})
            assert parameter.grad is not None
            parameter.grad.mul_(getattr(parameter, "factor", 1.0) * options.get("factor", 1.0))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        layer = objects[0][0]
        if step == 1:
            layer.weight.factor = 0.3
        if step == 2:
            layer.bias.options["factor"] = 2.0
        if step == 3:
            layer.bias.factor = 3.0


@pytest.mark.slow
@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_what_is_attached_to_parameters_is_read(ranks: Ranks, style: str) -> None:
    assert_agrees(ranks, 2, Scaled(optimizer="SGD momentum"), style, steps=6)


@pytest.mark.usefixtures("alone")
def test_each_change_compiles_anew_and_nothing_else_does() -> None:
    case = Scaled()
    objects, step = case.build(), spmd.compile(case.step)
    x, y = case.part(0, 0)
    for k, programs in enumerate([1, 1, 2, 3, 4, 4]):
        step(*objects, x, y)
        assert len(step.programs) == programs
        case.after(objects, k)
    x.share = 0.5
    expected = 0.5 * F.mse_loss(objects[0](x), y)
    torch.testing.assert_close(step(*objects, x, y), expected.detach())
    assert len(step.programs) == 5


@pytest.mark.usefixtures("alone")
def test_what_the_step_attaches_is_refused() -> None:
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.weight.norm_of_last = loss.detach()
        return loss

    model = nn.Linear(2, 2)
    with pytest.raises(spmd.CaptureError, match=r"it writes model\.weight\.norm_of_last, .* Keep it in an attribute"):
        spmd.compile(step)(model, torch.ones(1, 2))
    assert vars(model.weight) == {}


@pytest.mark.usefixtures("alone")
def test_a_write_into_what_is_attached_is_refused_and_undone() -> None:
    def step(model: Any, x: Tensor) -> Tensor:
        model.weight.options["count"] += 1
        return model(x).sum() * model.weight.options["count"]

    model: Any = nn.Linear(2, 2)
    model.weight.options = {"count": 0}
    with pytest.raises(spmd.CaptureError, match=r"changes the entries of model\.weight\.options"):
        spmd.compile(step)(model, torch.ones(1, 2))
    assert model.weight.options == {"count": 0}


def scaled(model: Any, x: Any) -> Tensor:
    out: Tensor = model(x).sum() * getattr(x, "share", 1.0) * getattr(model.weight, "factor", 1.0)
    return out


@pytest.mark.usefixtures("alone")
def test_what_no_code_names_does_not_count() -> None:
    model, x, step = nn.Linear(2, 2), torch.ones(1, 2), spmd.compile(scaled)
    for k in range(3):
        x.index, model.weight.index, model.weight.before = k, k, model.weight.detach().clone()  # type: ignore[attr-defined, assignment]
        step(model, x)
    assert len(step.programs) == 1


@pytest.mark.usefixtures("alone")
def test_the_reason_shows_plain_values_and_runs_nothing_of_the_users(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("the user's own")

    monkeypatch.delenv("SPMD_QUIET", raising=False)
    model, x, step = nn.Linear(2, 2), torch.ones(1, 2), spmd.compile(scaled)
    x.share = Odd()  # type: ignore[attr-defined]
    with pytest.raises(TypeError):  # it cannot be multiplied, in the plain step either
        step(model, x)
    for share in (2.0, 3.0):
        x.share = share  # type: ignore[attr-defined]
        step(model, x)
    assert "with share=2.0 -> float32[1, 2] on cpu, with share=3.0" in capfd.readouterr().err


@pytest.mark.usefixtures("alone")
def test_what_is_attached_is_not_kept_alive() -> None:
    def step(model: nn.Module, x: Any) -> Tensor:
        return model(x).sum() * (2 if hasattr(x, "last") else 1)

    model, x, compiled = nn.Linear(2, 2), torch.ones(1, 2), spmd.compile(step)
    x.last = torch.ones(3)  # type: ignore[attr-defined]
    torch.testing.assert_close(compiled(model, x), step(model, x).detach())
    alive = weakref.ref(x.last)  # type: ignore[attr-defined]
    del x
    gc.collect()
    assert alive() is None
    torch.testing.assert_close(compiled(model, torch.ones(1, 2)), step(model, torch.ones(1, 2)).detach())
