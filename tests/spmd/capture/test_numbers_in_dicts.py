"""Numbers in a dict that a step reads and writes: counters, running averages, the best value so far."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.pool import Ranks


class Trainer:
    """A trainer with a dict for what it keeps; ``update`` does that."""

    def __init__(self, update: Callable[[Any, Tensor], None]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state: dict[Any, Any] = {"steps": 0, "loss": 0.0, "best": 1e9, 7: 1, "name": "run"}
        self.update = update

    def step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.update(self, loss.detach())
        return loss


def counts(trainer: Trainer, loss: Tensor) -> None:
    trainer.state["steps"] += 1
    trainer.state[7] *= 2


def averages(trainer: Trainer, loss: Tensor) -> None:
    trainer.state["loss"] = 0.9 * trainer.state["loss"] + 0.1 * loss.item()
    trainer.state["best"] = min(trainer.state["best"], loss.item())


def depends_on_a_count(trainer: Trainer, loss: Tensor) -> None:
    """The count reaches the graph, and one that is only read is an input, too."""
    trainer.state["steps"] += 1
    trainer.model.bias.data.mul_(1.0 / (trainer.state["steps"] + trainer.state[7]))


def logs_and_counts(trainer: Trainer, loss: Tensor) -> None:
    trainer.state["last"] = loss
    trainer.state["steps"] = trainer.state.get("steps", 0) + 1


UPDATES = (counts, averages, depends_on_a_count, logs_and_counts)


def train(rank: int, world: int, update: Callable[[Any, Tensor], None]) -> int:
    """Compare with the plain step; returns how many programs were compiled."""
    compiled, plain = Trainer(update), Trainer(update)
    step, draw = spmd.compile(compiled.step), torch.Generator().manual_seed(0)
    for k in range(6):
        x = torch.randn(2 * world, 3, generator=draw, dtype=torch.float64)
        torch.testing.assert_close(step(x[2 * rank : 2 * rank + 2]), plain.step(x))
        if k == 3:
            for each in (compiled, plain):  # as at the end of an epoch
                each.state = copy.copy(each.state) | {"steps": 0, "loss": 0.0}
        assert list(compiled.state) == list(plain.state)
        for key, value in plain.state.items():
            assert type(compiled.state[key]) is type(value), key
            if key != "name":
                torch.testing.assert_close(compiled.state[key], value)
    return len(step.programs)


@pytest.mark.parametrize("update", UPDATES)
def test_they_are_those_of_the_plain_step(ranks: Ranks, update: Callable[[Any, Tensor], None]) -> None:
    assert ranks.run(2, train, update) == [1, 1]


def sums_tensors(trainer: Trainer, loss: Tensor) -> None:
    trainer.state["loss"] += loss


def looks_at_all(trainer: Trainer, loss: Tensor) -> None:
    trainer.state["steps"] = len(trainer.state)


def reads_text(trainer: Trainer, loss: Tensor) -> None:
    trainer.state["steps"] = len(trainer.state["name"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("update", [sums_tensors, looks_at_all, reads_text])
def test_what_else_is_read_of_a_dict_that_is_written_is_refused(update: Callable[[Any, Tensor], None]) -> None:
    trainer = Trainer(update)
    before = dict(trainer.state)
    with pytest.raises(spmd.CaptureError, match=r"changes the entries of .*state.*or in an attribute"):
        spmd.compile(trainer.step)(torch.ones(2, 3, dtype=torch.float64))
    assert trainer.state == before


@pytest.mark.usefixtures("alone")
def test_another_kind_of_number_compiles_another_program() -> None:
    trainer = Trainer(counts)
    step, x = spmd.compile(trainer.step), torch.ones(2, 3, dtype=torch.float64)
    step(x)
    trainer.state["steps"] = 0.5
    step(x)
    assert trainer.state["steps"] == 1.5
    del trainer.state["steps"]
    with pytest.raises(KeyError, match="steps"):
        step(x)
