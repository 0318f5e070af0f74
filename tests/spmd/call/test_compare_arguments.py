"""Tables that are the same on all ranks, such as class weights, are not taken for rows of the batch in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import passes
import spmd
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

ROWS = 4  # of a rank, and as many classes and features
TABLE = torch.tensor([0.5, 2.0, 3.0, 0.25], dtype=torch.float64)


def linear() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(ROWS, ROWS).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    """``table`` has a weight, or a target, for each row."""
    predicted = model(x)
    loss = by_row(predicted, y, table) if table.ndim == 1 else F.mse_loss(predicted, table)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    draw = random_generator(rank, step)
    return torch.rand(ROWS, ROWS, generator=draw, dtype=torch.float64), torch.arange(ROWS).roll(rank + step)


def outcome(rank: int, table: Tensor, same_batch: bool, inputs: Any) -> tuple[str, list[str], float]:
    """The error of a call, the warnings of two calls, and by how much the first has changed the model."""
    model, optimizer = linear()
    before = [p.detach().clone() for p in model.parameters()]
    step = spmd.compile(parallel_mode=spmd.DataParallel("replicate", inputs=inputs))(train)
    given = batch(0 if same_batch else rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step(model, optimizer, *given, table)
            step(model, optimizer, *given, table)
        except passes.PlacementError as raised:
            error = str(raised)
        else:
            error = ""
    changed = max(float((a - b).abs().max()) for a, b in zip(before, model.parameters(), strict=True))
    about = [each for each in caught if "looks like a table" in str(each.message)]
    assert all(each.filename == __file__ for each in about), "the warning stands at the user's line"
    return error, [str(each.message) for each in about], changed


def on_ranks(rank: int, world: int, *args: Any) -> tuple[str, list[str], float]:
    return outcome(rank, *args)


def test_class_weights_are_refused_before_anything_changes(ranks: Ranks) -> None:
    for error, warned, changed in ranks.run(2, on_ranks, TABLE, False, None):
        assert "all ranks passed the same table, of shape [4], while x differs between ranks" in error
        assert "inputs={'table': Replicate()} for a table, inputs={'table': Shard(0)} for rows" in error
        assert not warned and not changed


@pytest.mark.parametrize("table, same_batch, inputs", [
    (torch.ones(ROWS, dtype=torch.float64), False, None),
    (TABLE, True, None),
    (TABLE, False, {"table": Shard(0)}),
], ids=["of one value", "one batch for all", "named"])  # fmt: skip
def test_what_passes_without_a_word(ranks: Ranks, table: Tensor, same_batch: bool, inputs: Any) -> None:
    for error, warned, changed in ranks.run(2, on_ranks, table, same_batch, inputs):
        assert not error and not warned and changed


def test_other_tables_are_warned_about_once(ranks: Ranks) -> None:
    table = torch.arange(16, dtype=torch.float64).view(ROWS, ROWS)
    found = ranks.run(2, on_ranks, table, False, None)
    assert all(not error and changed for error, _, changed in found)
    (_, (warned,), _), (_, others, _) = found
    assert "of shape [4, 4], while x differs" in warned and not others


class Weighted(Case):
    """Class weights, as a table, or with a row of it for each row of the batch."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.loss = loss

    def build(self) -> tuple[Any, ...]:
        return linear()

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return (*batch(rank, step), TABLE, self.loss)

    def whole(self, parts: list[Any]) -> Any:
        x, y, *_ = zip(*parts, strict=True)
        return torch.cat(x), torch.cat(y), TABLE if self.loss is by_class else TABLE.repeat(len(parts)), self.loss

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, table: Tensor, loss: Any) -> Tensor:
        result: Tensor = loss(model(x), y, table)
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        return result


def by_class(predicted: Tensor, y: Tensor, table: Tensor) -> Tensor:
    return F.cross_entropy(predicted, y, weight=table)


def by_row(predicted: Tensor, y: Tensor, table: Tensor) -> Tensor:
    return (F.cross_entropy(predicted, y, reduction="none") * table).mean()


@pytest.mark.parametrize("loss, placement, style", [
    (by_class, Replicate(), "fully_shard"),
    (by_row, Shard(0), "replicate"),
])  # fmt: skip
def test_either_meaning_has_the_numbers_of_the_plain_step(ranks: Ranks, loss: Any, placement: Any, style: str) -> None:
    assert_agrees(ranks, 2, Weighted(loss), {"parallel_style": style, "inputs": {"table": placement}}, steps=3)


def labels_that_happen_to_be_equal(rank: int, world: int) -> list[str]:
    """A program for other shapes is compiled with labels that are the same on all ranks; they differed before."""
    model, optimizer = linear()
    step = spmd.compile(train)
    x, y = batch(rank)
    step(model, optimizer, x, y, torch.rand(ROWS, generator=random_generator(rank, 0), dtype=torch.float64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, optimizer, x[:2], y[:2], torch.tensor([0.5, 2.0], dtype=torch.float64))
    return [str(each.message) for each in caught]


def test_what_once_differed_is_rows_for_good(ranks: Ranks) -> None:
    assert ranks.run(2, labels_that_happen_to_be_equal) == [[], []]


def test_zeros_and_ones_may_be_labels(ranks: Ranks) -> None:
    labels = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    found = ranks.run(2, on_ranks, labels, False, None)
    assert all(not error and changed for error, _, changed in found)
    assert [len(warned) for _, warned, _ in found] == [1, 0]


def one_batch(rank: int, world: int, same: bool) -> list[str]:
    """The warnings of two calls, where all arguments are the same on all ranks, or none is."""
    model, optimizer = linear()
    step = spmd.compile(lambda model, optimizer, x, y: train(model, optimizer, x, x, y))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(2):
            seen = 0 if same else rank
            step(model, optimizer, batch(seen, k)[0], batch(seen, k + 2)[0])
    return [str(each.message) for each in caught if "all ranks passed the same" in str(each.message)]


def test_one_batch_for_all_ranks_is_warned_of_once_on_the_first(ranks: Ranks) -> None:
    first, second = ranks.run(2, one_batch, True)
    assert len(first) == 1 and not second
    assert "Pass other rows on each rank" in first[0] and "x.chunk(world_size)[rank]" in first[0]
    assert ranks.run(2, one_batch, False) == [[], []]
