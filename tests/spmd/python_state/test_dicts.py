"""Numbers and tensors in a dict that a step reads and writes: counters, running averages, the best value so far."""

from __future__ import annotations

import copy
import weakref
from collections import Counter, OrderedDict, defaultdict
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
        self.logged: dict[str, Any] = {}
        self.ordered = OrderedDict(loss=0.0)
        self.totals, self.seen = defaultdict[str, float](float), Counter[str]()
        self.meters, self.history = defaultdict[str, list[Tensor]](list), [0, 0.0, torch.zeros((), dtype=torch.float64)]
        self.shadow = {name: value.detach().clone() for name, value in self.model.named_parameters()}
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


@torch.no_grad()
def averages_weights(trainer: Trainer, loss: Tensor) -> None:
    for name, value in trainer.model.named_parameters():
        trainer.shadow[name] = 0.9 * trainer.shadow[name] + 0.1 * value.detach()


def writes_into_a_tensor(trainer: Trainer, loss: Tensor) -> None:
    trainer.shadow["bias"].mul_(0.5)


def logs_by_name(trainer: Trainer, loss: Tensor) -> None:
    trainer.logged.setdefault("loss", []).append(loss)
    trainer.logged.setdefault("twice", []).extend([loss, 2 * loss])
    trainer.meters["loss"].append(loss)
    trainer.meters["last"] = [loss]


def sums_by_name(trainer: Trainer, loss: Tensor) -> None:
    trainer.totals["loss"] += loss.item()
    trainer.totals["rows"] += 2.0
    trainer.ordered["loss"] += loss.item()
    trainer.seen["calls"] += 1
    trainer.seen.update(["calls", "batches"])


def counts_in_a_list(trainer: Trainer, loss: Tensor) -> None:
    trainer.history[0] += 1
    trainer.history[1] = 0.9 * trainer.history[1] + loss.item()
    trainer.history[2] = trainer.history[2] + loss * trainer.history[0]


def writes_in_place(trainer: Trainer, loss: Tensor) -> None:
    trainer.shadow["bias"].mul_(0.9).add_(loss, alpha=0.1)
    trainer.history[2].mul_(0.9).add_(loss)


UPDATES = (
    *(counts, averages, depends_on_a_count, logs_and_counts, averages_weights, writes_into_a_tensor),
    *(logs_by_name, sums_by_name, counts_in_a_list, writes_in_place),
)


def assert_same(got: Any, want: Any) -> None:
    """Containers of one class with equal entries, nested ones too, in one order."""
    assert type(got) is type(want)
    if isinstance(got, dict):
        assert list(got) == list(want)
        got, want = list(got.values()), list(want.values())
    if not isinstance(got, list):
        return torch.testing.assert_close(got, want)
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


def train(rank: int, world: int, update: Callable[[Any, Tensor], None], style: str = "replicate") -> int:
    """Compare with the plain step; returns how many programs were compiled."""
    compiled, plain = Trainer(update), Trainer(update)
    step = spmd.compile(compiled.step, parallel_mode=spmd.DataParallel(style))  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(0)
    for k in range(6):
        x = torch.randn(2 * world, 3, generator=draw, dtype=torch.float64)
        torch.testing.assert_close(step(x[2 * rank : 2 * rank + 2]), plain.step(x))
        if k == 3:
            for each in (compiled, plain):  # as at the end of an epoch
                each.state = copy.copy(each.state) | {"steps": 0, "loss": 0.0}
                each.logged, each.totals = {}, defaultdict(float)
                each.seen.clear()
                each.history[1] = 0.5 if update is counts_in_a_list else 0.0
        for name in ("logged", "totals", "seen", "meters", "history", "ordered"):
            assert_same(getattr(compiled, name), getattr(plain, name))
        torch.testing.assert_close(compiled.shadow, plain.shadow)
        assert list(compiled.state) == list(plain.state)
        for key, value in plain.state.items():
            assert type(compiled.state[key]) is type(value), key
            if key != "name":
                torch.testing.assert_close(compiled.state[key], value)
    return len(step.programs)


@pytest.mark.parametrize("update", UPDATES)
def test_they_are_those_of_the_plain_step(ranks: Ranks, update: Callable[[Any, Tensor], None]) -> None:
    assert ranks.run(2, train, update) == [1, 1]


def test_an_average_of_the_weights_in_a_dict_beside_a_split_model(ranks: Ranks) -> None:
    assert ranks.run(2, train, averages_weights, "fully_shard") == [1, 1]


def begins_with_the_first_value(trainer: Trainer, loss: Tensor) -> None:
    """The first call finds no entry, and so does that after the fourth, when the trainer begins another dict."""
    if "loss" not in trainer.logged:
        trainer.logged["loss"] = 0.0
    trainer.logged["loss"] += loss.item()
    trainer.logged["best"] = min(trainer.logged.get("best", 1e9), loss.item())
    trainer.logged["calls"] = trainer.logged.setdefault("calls", 0) + 1


def test_a_key_that_is_new_makes_two_programs(ranks: Ranks) -> None:
    assert ranks.run(2, train, begins_with_the_first_value) == [2, 2]


def sums_tensors(trainer: Trainer, loss: Tensor) -> None:
    """A number becomes a tensor in the first call, and is reset after the fourth."""
    trainer.state["loss"] += loss


def test_a_number_that_becomes_a_tensor_makes_two_programs(ranks: Ranks) -> None:
    assert ranks.run(2, train, sums_tensors) == [2, 2]


def keeps_rows(rank: int, world: int) -> None:
    """Rows of the batch that are kept for the next call are whole on each rank."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(3, 3).double(), {"rows": torch.zeros(2 * world, 3, dtype=torch.float64)}

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            loss: Tensor = (h @ self.last["rows"].T).square().mean()
            self.last["rows"] = h.detach()
            return loss

    torch.manual_seed(0)
    model, step = Kept(), spmd.compile(lambda model, x: model(x))
    plain, draw = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(2 * world, 3, generator=draw, dtype=torch.float64)
        torch.testing.assert_close(step(model, x[2 * rank : 2 * rank + 2]), plain(x))
        torch.testing.assert_close(model.last, plain.last)


def test_rows_that_are_kept_in_a_dict(ranks: Ranks) -> None:
    ranks.run(2, keeps_rows)


def looks_at_all(trainer: Trainer, loss: Tensor) -> None:
    trainer.state["steps"] = len(trainer.state)


def reads_text(trainer: Trainer, loss: Tensor) -> None:
    trainer.state["steps"] = len(trainer.state["name"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("update", [looks_at_all, reads_text])
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


class ByParameter:
    """Scales and groups that are noted by parameter, or by its id, before the first call."""

    def __init__(self, by_id: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scales = OrderedDict((each, 1.0 / (k + 2)) for k, each in enumerate(self.model[0].parameters()))
        self.names: dict[Any, str] = {each: name for name, each in self.model.named_parameters()}
        self.ids = {id(each) for each in self.model.parameters() if each.ndim > 1} if by_id else set()
        self.decay = 0.5
        self.model[2].weight.register_post_accumulate_grad_hook(self.scale)

    def scale(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(self.scales.get(parameter, 3.0))

    def step(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.model(x).square().mean()
        loss.backward()
        for each in self.model.parameters():
            each.grad.mul_(self.scales.get(each, 1.0))
            if self.ids and id(each) in self.ids:
                each.grad.add_(each.detach(), alpha=self.decay)
        for each, scale in self.scales.items():
            each.grad.mul_(scale)
        norms = {self.names[each]: each.grad.norm() for each in self.model.parameters()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norms


def trained_by_parameter(rank: int, world: int, mode: Any, by_id: bool) -> None:
    plain, trainer = ByParameter(by_id), ByParameter(by_id)
    step = spmd.compile(parallel_mode=mode)(trainer.step)
    for k in range(4):
        x = torch.randn(4 if k < 2 else 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        (loss, norms), (one, others) = step(x.chunk(world)[rank]), plain.step(x)
        torch.testing.assert_close(loss, one, rtol=1e-12, atol=0)
        torch.testing.assert_close(norms, others, rtol=1e-12, atol=0)
    assert [*trainer.scales] == [*trainer.model[0].parameters()] and trainer.names.keys() == {
        *trainer.model.parameters()
    }


@pytest.mark.parametrize(
    "mode, by_id",
    [
        (spmd.DataParallel("replicate", shard_optimizer=True), True),
        (spmd.DataParallel("fully_shard"), False),
    ],
)
def test_entries_are_found_by_parameter(ranks: Ranks, mode: Any, by_id: bool) -> None:
    ranks.run(2, trained_by_parameter, mode, by_id)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_found_by_parameter_is_refused() -> None:
    model, norms = nn.Linear(2, 2), dict[Any, Tensor]()
    known = weakref.WeakKeyDictionary({model.weight: 2.0})

    def writes(model: nn.Linear, x: Tensor) -> None:
        norms[model.weight] = model(x).sum().detach()

    with pytest.raises(spmd.CaptureError, match=r"changes the entries of .*norms.*Return the value"):
        spmd.compile(writes)(model, torch.ones(1, 2))
    assert not norms
    with pytest.raises(spmd.CaptureError, match=r"known.*deque or weak dict"):
        spmd.compile(lambda model, x: model(x) * known.get(model.weight, 1.0))(model, torch.ones(1, 2))
    with pytest.raises(spmd.CaptureError, match=r"dict with tensors for keys.*names"):
        spmd.compile(lambda model, of: of[model.weight])(model, {model.weight: 1.0})
