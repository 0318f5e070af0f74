"""Replicated parameters: one all_reduce per trainable parameter and what the loss needs, and nothing global."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.structure import compile_on_fake_ranks, counts, regression, shapes

NO_PASSES = {"parallel_mode": spmd.DataParallel("replicate"), "passes": ()}


class ReadsOften(nn.Module):
    """One weight that 100 operations read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(13))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(x * self.weight)
        return x


def step_of(loss: Any) -> Any:
    """A train step with this loss of (prediction, target)."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return train_step


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_one_all_reduce_per_parameter_and_one_for_a_mean_loss(world: int) -> None:
    model, *rest = regression(50, 32, 8)
    compiled = compile_on_fake_ranks(world, MLP.step, (model, *rest), **NO_PASSES)
    assert counts(compiled) == {"all_reduce": 4 + 1}


@pytest.mark.slow
def test_one_all_reduce_for_a_weight_that_a_hundred_operations_read() -> None:
    model = ReadsOften()
    x = torch.randn(7, 13)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = compile_on_fake_ranks(4, MLP.step, (model, optimizer), x, x, **NO_PASSES)
    assert counts(compiled) == {"all_reduce": 1 + 1}


@pytest.mark.parametrize("loss, needed", [
    (lambda predicted, y: predicted.sum(), 1),
    (lambda predicted, y: F.mse_loss(predicted, y, reduction="sum"), 1),
    (lambda predicted, y: (predicted - y).abs().mean(), 1),
    (lambda predicted, y: F.cross_entropy(predicted, y.argmax(1)), 2),
    (lambda predicted, y: (predicted * (y > 0)).sum() / (y > 0).sum(), 2),
], ids=["sum of outputs", "squared sum", "mean", "cross entropy", "masked mean"])  # fmt: skip
def test_collectives_of_the_loss(loss: Any, needed: int) -> None:
    model, *rest = regression(50, 32, 8)
    compiled = compile_on_fake_ranks(4, step_of(loss), (model, *rest), **NO_PASSES)
    assert counts(compiled) == {"all_reduce": 4 + needed}


def test_the_bias_of_a_first_and_only_layer_is_reduced_once() -> None:
    model, *rest = regression(50, 9)
    compiled = compile_on_fake_ranks(4, step_of(lambda predicted, y: predicted.sum()), (model, *rest), **NO_PASSES)
    assert counts(compiled) == {"all_reduce": 2 + 1}


def test_a_frozen_parameter_is_not_reduced() -> None:
    model, *rest = regression(50, 32, 8)
    model[0].weight.requires_grad_(False)
    compiled = compile_on_fake_ranks(4, MLP.step, (model, *rest), **NO_PASSES)
    assert counts(compiled) == {"all_reduce": 3 + 1}


def test_no_rank_holds_a_global_activation_or_gradient() -> None:
    model, *rest = regression(50, 32, 8, rows=7)
    compiled = compile_on_fake_ranks(4, MLP.step, (model, *rest), **NO_PASSES)
    assert {shape for shape in shapes(compiled.program) if 4 * 7 in shape} == set()


def test_nor_where_batch_and_time_are_one_dim() -> None:
    model, optimizer, *_ = regression(50, 32, 8)
    x, y = torch.randn(7, 5, 50).double(), torch.randint(8, (7, 5))
    step = step_of(lambda predicted, y: F.cross_entropy(predicted.flatten(0, 1), y.flatten()))
    compiled = compile_on_fake_ranks(4, step, (model, optimizer), x, y, **NO_PASSES)
    assert {shape for shape in shapes(compiled.program) if 28 in shape or 140 in shape} == set()


def test_each_reduction_says_which_gradient_it_is() -> None:
    model, *rest = regression(50, 32, 8)
    compiled = compile_on_fake_ranks(4, MLP.step, (model, *rest), **NO_PASSES)
    served = [name for node in compiled.program.collectives() for name in node.meta["collective"].of]
    assert {f"model.{name}" for name, _ in model.named_parameters()} <= set(served)


def test_bytes_are_those_of_one_rank() -> None:
    model, *rest = regression(50, 32, 8)
    compiled = compile_on_fake_ranks(4, MLP.step, (model, *rest), **NO_PASSES)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert compiled.report().bytes("all_reduce") == parameters + 8


def test_the_default_passes_merge_gradients_but_never_the_loss_with_them() -> None:
    model, *rest = regression(50, 32, 16, 8)
    compiled = compile_on_fake_ranks(4, MLP.step, (model, *rest), parallel_mode=NO_PASSES["parallel_mode"])
    assert counts(compiled) == {"all_reduce": 1 + 1}
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert compiled.report().bytes("all_reduce") == parameters + 8
