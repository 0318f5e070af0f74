"""Arguments by name, in dicts and lists, of no dims or plain Python; results of any structure, split or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import spmd
from tests.harness.cases import MLP, STYLES
from tests.harness.fake import fake_world
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks


class Small(MLP):
    """A 15-17-4 regression at 6 rows a rank."""

    def __init__(self) -> None:
        super().__init__(sizes=(15, 17, 4), rows=6, optimizer="SGD momentum")

    def tensors(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        x, y = super().part(rank, step)  # type: ignore[misc]
        return x, y


class ByName(Small):
    """Keyword-only arguments, nested ones, a scale without dims, plain Python values and None."""

    def part(self, rank: int, step: int) -> dict[str, Any]:
        x, y = self.tensors(rank, step)
        scale = torch.tensor(1.0 + step, dtype=torch.float64)
        return {"batch": {"x": x, "ys": [y, y.abs()]}, "scale": scale, "power": 2, "mask": None}

    @staticmethod
    def step(model: nn.Module, optimizer: Any, *, batch: Any, scale: Tensor, power: int, mask: Any = None) -> Any:
        predicted = model(batch["x"])
        first, second = (((predicted - y) / scale).abs().pow(power).mean() for y in batch["ys"])
        (first + 0.5 * second).backward()
        optimizer.step()
        optimizer.zero_grad()
        return {
            "losses": (first.detach(), second.detach()),
            "predicted": predicted.detach(),
            "power": power,
            "no": mask,
        }


class SplitResults(Small):
    """A result split along the batch comes back as this rank's part, a scalar comes back global."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return self.tensors(rank, step)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        predicted = model(x)
        losses = F.mse_loss(predicted, y, reduction="none").mean(1)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses.detach(), predicted.detach().argmax(1), losses.detach().max(), y.shape[1]


class Replicated(Small):
    """``inputs`` names two arguments that every rank has in full, one of them nested."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = self.tensors(rank, step)
        random = random_generator(99, step)
        common = torch.rand(4, generator=random, dtype=torch.float64)
        return {"x": x, "offset": common}, y, common + 1

    def whole(self, parts: list[Any]) -> Any:
        batch, y, weights = super().whole(parts)
        return {"x": batch["x"], "offset": batch["offset"][:4]}, y, weights[:4]

    @staticmethod
    def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor], y: Tensor, weights: Tensor) -> Tensor:
        loss = ((model(batch["x"]) + batch["offset"] - y).square() * weights).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Averages(Small):
    """A moving average of the parameters in a dict that the caller keeps."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        return model, optimizer, {name: p.detach().clone() for name, p in model.named_parameters()}

    @staticmethod
    def step(model: nn.Module, optimizer: Any, averages: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                averages[name].lerp_(parameter, 0.25)
        return loss, {name: average.clone() for name, average in averages.items()}

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return self.tensors(rank, step)


class BatchLast(Small):
    """The batch is dim 1 of every tensor."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = self.tensors(rank, step)
        return x.T.contiguous(), y.T.contiguous()

    def whole(self, parts: list[Any]) -> Any:
        return tree_map(lambda *leaves: torch.cat(leaves, 1), *parts)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x.T), y.T)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", [ByName(), SplitResults()], ids=lambda case: type(case).__name__)
@pytest.mark.in_turn("case")
def test_arguments_and_results_of_any_structure(ranks: Ranks, case: Case, style: str) -> None:
    assert_agrees(ranks, 2, case, style)


def test_inputs_names_what_every_rank_has_in_full(ranks: Ranks) -> None:
    inputs = {"weights": Replicate(), "batch.offset": Replicate()}
    assert_agrees(ranks, 2, Replicated(), {"parallel_style": "fully_shard", "inputs": inputs})


@pytest.mark.parametrize(
    "style", [s if s == "fully_shard" else pytest.param(s, marks=pytest.mark.exhaustive) for s in STYLES]
)
def test_the_name_of_a_dict_places_all_tensors_in_it(ranks: Ranks, style: str) -> None:
    assert_agrees(ranks, 2, Averages(), {"parallel_style": style, "inputs": {"averages": Replicate()}})


def test_input_batch_dim_says_where_the_batch_is(ranks: Ranks) -> None:
    assert_agrees(ranks, 2, BatchLast(), {"parallel_style": "default", "input_batch_dim": 1})


@pytest.mark.parametrize("inputs", [None, {"x": Shard(0)}], ids=["not named", "named"])
def test_a_dtensor_is_refused_with_what_to_pass(inputs: Any) -> None:
    with fake_world(2):
        x = distribute_tensor(torch.ones(4, 3), spmd.world(), [Shard(0)])
        step = spmd.compile(lambda model, x: model(x).sum(), parallel_mode=spmd.DataParallel(inputs=inputs))
        with pytest.raises(spmd.PlacementError, match=r"x is a DTensor, .* x\.to_local\(\), .*{'x': Shard\(0\)}"):
            step(nn.Linear(3, 2), x)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("read", [lambda x: x.is_leaf, lambda x: x.grad is None, lambda x: x.grad_fn is None])
def test_an_argument_that_came_with_a_graph_or_a_gradient_is_refused_where_that_is_read(read: Any) -> None:
    step = spmd.compile(lambda x: x.detach() * 2 if read(x) else x.detach() * 3)
    leaf = torch.ones(4, requires_grad=True)
    assert step(leaf).tolist() == [2] * 4
    joined = leaf * 1
    (joined * joined).sum().backward()
    for each in (joined, leaf):
        with pytest.raises(spmd.CaptureError, match=r"(?s)argument x, which has one.*Pass x\.detach\(\)"):
            step(each)
        assert step(each.detach().requires_grad_()).tolist() == [2] * 4
    assert len(step.programs) == 1
    assert spmd.compile(lambda x: x.detach() + 1)(joined).tolist() == [2] * 4
