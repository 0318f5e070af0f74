"""Fused optimizer ops that a step calls itself: the arithmetic that replaces them, and placements of their state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spmd.capture.fused_optimizers import fused_decompositions
from tests.harness.cases import mlp
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

aten = torch.ops.aten
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
SGD = {"momentum": 0.9, "dampening": 0.1}

CALLS: dict[str, tuple[Any, int, dict[str, Any]]] = {  # the op, how many lists of state it has, its options
    "adam": (aten._fused_adam_, 3, {**ADAM, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "adamw": (aten._fused_adamw_, 3, {**ADAM, "weight_decay": 0.1, "amsgrad": True, "maximize": False}),
    "adam, plain": (aten._fused_adam_, 2, {**ADAM, "weight_decay": 0.0, "amsgrad": False, "maximize": False}),
    "sgd": (aten._fused_sgd_, 1, {**SGD, "weight_decay": 0.1, "nesterov": True, "maximize": True}),
    "sgd, plain": (aten._fused_sgd_, 1, {**SGD, "weight_decay": 0.0, "nesterov": False, "maximize": False}),
    "adagrad": (aten._fused_adagrad_, 1, {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": True}),
}


def _tensors(lists: int) -> list[list[Tensor]]:
    """Parameters, gradients, and lists of state, none of it negative."""
    generator = random_generator(0, 0)
    made = [[torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (2, 5)] for _ in range(2 + lists)]
    return [*made[:2], *([tensor.abs() for tensor in one] for one in made[2:])]


@pytest.mark.parametrize("scaled", [None, 0.0, 1.0], ids=["", "scaled", "infinite"])
@pytest.mark.parametrize("name", CALLS)
def test_the_arithmetic_is_the_kernels(name: str, scaled: float | None) -> None:
    packet, lists, options = CALLS[name]
    options = {**options, "lr": 0.05} | ({"is_first_step": name.endswith("plain")} if "sgd" in name else {})
    if scaled is not None:
        options |= {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(scaled)}
    results = []
    for run in (packet.default, fused_decompositions()[packet.default]):
        state = _tensors(lists)
        rest = [] if "sgd" in name else [[torch.tensor(float(k)) for k in (1, 7)]]
        run(*state, *([[]] if "adam" in name and lists == 2 else []), *rest, **options)
        results.append(state)
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(results[1][0][0], _tensors(lists)[0][0]) == (scaled == 1.0)


class ByHand(torch.optim.Optimizer):
    """AdamW as a user writes it around the fused op."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = group["params"]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {
                        "mean": torch.zeros_like(p),
                        "square": torch.zeros_like(p),
                        "step": torch.zeros(()),
                    }
            state = [[self.state[p][name] for p in params] for name in ("mean", "square", "step")]
            for count in state[2]:
                count += 1
            options = {**ADAM, "lr": group["lr"], "weight_decay": 0.1, "amsgrad": False, "maximize": False}
            torch._fused_adamw_(params, [p.grad for p in params], *state[:2], [], state[2], **options)


@dataclass(frozen=True)
class Fused(Case):
    """Regression by ``ByHand``; nothing divides by the ranks."""

    def build(self) -> tuple[Any, ...]:
        model = mlp(5, 7, 3)
        return model, ByHand(model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return tuple(torch.randn(4, n, generator=random_generator(rank, step), dtype=torch.float64) for n in (5, 3))

    @staticmethod
    def step(model: nn.Module, optimizer: ByHand, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def test_an_optimizer_around_a_fused_op(ranks: Ranks) -> None:
    assert_agrees(ranks, 2, Fused(), "fully_shard", steps=3)
