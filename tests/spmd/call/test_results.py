"""What a step returns: true values with the rows that belong to this rank, also when it returns state or its inputs."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import Case, assert_agrees
from tests.harness.pool import Ranks


@dataclass(frozen=True)
class Small(MLP):
    sizes: tuple[int, ...] = (5, 7, 4)
    rows: int = 6
    optimizer: str = "SGD momentum"


class State(Small):
    """Parameters, gradients and inputs, as they are and computed with; all of a parameter, though it be split."""

    @staticmethod
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        weight, bias = model[0].weight, model[0].bias
        optimizer.step()
        results = (loss.detach(), weight, weight.detach(), weight * 2, weight.grad, bias.grad.norm(), x, y * 1)
        optimizer.zero_grad()
        return results


class PerClass(Small):
    """A table by class is whole on every rank, however it was computed; rows are this rank's, sums are global."""

    @staticmethod
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        h = model(x)
        classes = y.argmax(1)
        table = torch.zeros(4, 4, dtype=h.dtype).index_add(0, classes, h)
        loss = table.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        correct = (h.argmax(1) == classes).sum()
        return {"loss": loss, "table": table.detach(), "of rows": h.detach().softmax(1), "correct": correct, "no": None}


class GradientOfRows(Small):
    """The gradient of an activation is split as the activation is."""

    @staticmethod
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        hidden = model[0](x)
        hidden.retain_grad()
        loss = F.mse_loss(model[2](model[1](hidden)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, hidden.grad, hidden.grad.norm()


class SetData(Small):
    """Old idioms: an update, and an average of parameters, that set ``.data``."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        average, _ = super().build()
        return model, average, optimizer

    @staticmethod
    def step(model: nn.Module, average: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for parameter, mean in zip(model.parameters(), average.parameters(), strict=True):
            parameter.data = parameter.data - 0.1 * parameter.grad
            mean.data = 0.9 * mean.data + 0.1 * parameter.data
        optimizer.zero_grad()
        return loss


class SetDataBack(Small):
    """Weights that ``.data`` moves and puts back (SAM); what shared their memory before keeps what it held."""

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        parameters = list(model.parameters())
        before, part = [p.data for p in parameters], parameters[0].detach().view(-1)[3:9]
        for p in parameters:
            p.data = p.data + 0.1 * p.grad
        higher, moved = parameters[0].data, [p.data * 2 for p in parameters]
        for p, data in zip(parameters, moved, strict=True):
            p.data = data
        for p in parameters:
            p.data = p.data * 3
        distance = sum((p.detach() - old).square().sum() for p, old in zip(parameters, before, strict=True))
        there = F.mse_loss(model(x), y).detach()
        for p, old in zip(parameters, before, strict=True):
            p.data = old
        optimizer.step()
        optimizer.zero_grad()
        return loss, there, distance, sum(each.sum() for each in moved), part * 1, higher


class SetDataShares(Small):
    """What ``.data`` was assigned shares the memory from then on; the same memory, assigned again, changes nothing."""

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        first, second, *_ = model.parameters()
        shared, before = first.detach(), second.data
        first.data = first.data.clamp_(-0.5, 0.5).contiguous()
        second.data = second.data * 2
        second.data = before.detach()
        new = second.data * 0.9
        flat = new.view(-1)
        second.data = new
        optimizer.step()
        optimizer.zero_grad()
        moved = flat * 1
        second.data = before
        return loss, shared * 1, moved, new


@dataclass
class Batch:
    """An argument or a result of a class of the user's own."""

    x: Any
    y: Any
    tag: str = ""
    options: Any = None

    @property
    def rows(self) -> int:
        return len(self.x)


class Named(OrderedDict):  # type: ignore[type-arg]
    """A kind of dict, as model outputs are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Encoded(UserDict):  # type: ignore[type-arg]
    """A kind of UserDict, as the batches of tokenizers are, which note an object without content for each batch."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.origin, self.rows = [object()], 6

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Pair(NamedTuple):
    """An argument or a result with names."""

    first: Any
    second: Any


class Records(Small):
    """Dataclasses, subclasses of dict and UserDict and named tuples as arguments and results."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = super().part(rank, step)  # type: ignore[misc]
        return (Batch(Pair(Encoded({"x": x}), 1), Named(target=y), "train", {"power": [2]}),)

    def whole(self, parts: list[Any]) -> Any:
        batches = [part[0] for part in parts]
        x, y = (torch.cat(each) for each in zip(*((b.x.first.x, b.y.target) for b in batches), strict=True))
        return (Batch(Pair(Encoded({"x": x}), 1), Named(target=y), "train", {"power": [2]}),)

    @staticmethod
    def step(model: Any, optimizer: Any, batch: Batch) -> Any:  # type: ignore[override]
        encoded = batch.x.first
        error = model(encoded["x"]) - batch.y.target
        loss = error.pow(batch.options["power"][0]).sum() / len(encoded.x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out = Named(loss=loss, out=Batch(error.detach(), None, batch.tag))
        return out.loss, Pair(out.out.x, (Pair(loss, None), None)), vars(seen(out)), type(out).__name__


def seen(out: Named) -> Batch:
    """Something of a class of the user's own, that holds no tensors, made in a step."""
    return Batch(x=list(out), y=None)


CASES: list[Case] = [State(), PerClass(), GradientOfRows(), SetData(), SetDataBack(), SetDataShares(), Records()]


@pytest.mark.parametrize("style, world", [("replicate", 2), ("fully_shard", 2)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
@pytest.mark.in_turn("style, world")
def test_results_are_true(ranks: Ranks, case: Case, style: str, world: int) -> None:
    assert_agrees(ranks, world, case, style)


def shapes_of_what_is_made(rank: int, world: int) -> None:
    """Noise of the batch's shape is the rows of this rank; other noise is whole."""

    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.randn(x.shape[0], 3)
        return noise * 2, torch.randn(x.shape[0] + 1, 3), torch.zeros(4, 2)

    results = spmd.compile(step)(torch.zeros(6, 2))
    assert [tuple(result.shape) for result in results] == [(6, 3), (6 * world + 1, 3), (4, 2)]


def returns_records(x: Tensor) -> Any:
    return Named(twice=Batch(x * 2, None, "tag")), Batch(x, Named(more=[x + 1]))


@pytest.mark.usefixtures("alone")
def test_results_have_the_user_s_classes() -> None:
    x = torch.arange(3.0)
    named, batch = spmd.compile(returns_records)(x)
    assert type(named) is Named and list(named) == ["twice"]
    assert torch.equal(named.twice.x, 2 * x) and named.twice.tag == "tag"
    assert batch.rows == 3 and torch.equal(batch.y.more[0], x + 1)


def test_named_tuples_and_user_dicts_keep_their_class_and_their_names(alone: None) -> None:
    def step(pair: Pair) -> Pair:
        pair.second["more"] = pair.second.x + pair.first
        return Pair(pair.second, [Pair(pair.first, pair.second.rows)])

    compiled = spmd.compile(step)
    for k in (1.0, 2.0):
        encoded = Encoded({"x": torch.full((6,), k)})
        result = compiled(Pair(torch.ones(6), encoded))
        assert type(result) is Pair and type(result.first) is Encoded and result.second[0].second == 6
        assert torch.equal(result.first.more, torch.full((6,), k + 1)) and torch.equal(encoded.more, result.first.more)
    (program,) = compiled.programs
    assert [each.name for each in program.inputs] == ["pair.first", "pair.second.x"]


def test_containers_that_the_step_changes_are_changed_at_each_call(alone: None) -> None:
    def step(batch: dict[str, Any], seen: list[Tensor], named: Batch) -> Tensor:
        batch["x"] = batch.pop("y") + batch["x"]
        batch["more"] = {"twice": 2 * batch["x"], "name": "new"}
        seen.append(batch["x"].sum())
        named.tag = "seen"
        return batch["x"]

    compiled = spmd.compile(step)
    for k in (1.0, 2.0, 3.0):
        seen, named = [], Batch(torch.ones(2), None)
        batch: dict[str, Any] = {"x": torch.full((2,), k), "y": torch.ones(2)}
        result = compiled(batch, seen, named)
        assert list(batch) == ["x", "more"] and torch.equal(batch["x"], result) and batch["more"]["name"] == "new"
        assert torch.equal(batch["more"]["twice"], 2 * result) and float(seen[0]) == 2 * k + 2 and named.tag == "seen"
    assert len(compiled.programs) == 1


def test_what_a_step_makes_for_the_batch_is_this_rank_s(ranks: Ranks) -> None:
    ranks.run(2, shapes_of_what_is_made)
