"""Batches of which ranks bring unequal numbers of rows: the global batch is what all bring, in their order."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import spmd
from tests.harness.pool import Ranks

Step = Callable[..., Any]


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(x)
    loss = F.cross_entropy(scores, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, scores.detach()


def contrast(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Each row is compared with all others, whatever rank has them."""
    same = F.normalize(model(x))
    loss = F.cross_entropy(same @ same.t(), torch.arange(len(x)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, 2 * x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def normalized() -> nn.Module:
    """Batch statistics are those of the global batch."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 3)
    )


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=draw, dtype=torch.float64), torch.randint(3, (rows,), generator=draw)


def own(values: Tensor, rows: Sequence[int], rank: int) -> Tensor:
    return values.split(list(rows))[rank]


def train(
    rank: int, world: int, build: Callable[[], nn.Module], step: Step, rows: Sequence[Sequence[int]], options: Any
) -> int:
    """Compare with the plain step on the whole batch, bit by bit but for the order of sums; returns the programs."""
    torch.manual_seed(0)
    model = build().double()
    plain = copy.deepcopy(model)
    momentum = 0.0 if step is contrast else 0.9
    optimizer, its = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=momentum) for each in (model, plain))
    mode = dict(options)
    if "mesh" in mode:
        mode["mesh"] = init_device_mesh("cpu", mode["mesh"][0], mesh_dim_names=mode["mesh"][1])
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**mode))
    for k, given in enumerate(rows):
        x, y = batch(sum(given), k)
        loss, scores = compiled(model, optimizer, own(x, given, rank), own(y, given, rank))
        expected_loss, expected = step(plain, its, x, y)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(scores, own(expected, given, rank), rtol=1e-10, atol=1e-11)
    with spmd.unshard(model):
        for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )
    return len(compiled.programs)


@pytest.mark.parametrize("style, build, step, fewest", [
    ("replicate", mlp, classify, 1), ("fully_shard", normalized, classify, 7), ("fully_shard", mlp, contrast, 7),
])  # fmt: skip
def test_any_rows_are_exact(ranks: Ranks, style: str, build: Callable[[], nn.Module], step: Step, fewest: int) -> None:
    rows = [(4, 4), (5, 3), (4, 3), (fewest, 0), (2, 5), (8, 0), (4, 4)]
    programs = ranks.run(2, train, build, step, rows, {"parallel_style": style})
    assert programs == [len({8, 7, fewest})] * 2


def test_three_ranks_of_which_one_ends_up_without_rows(ranks: Ranks) -> None:
    rows = [(3, 3, 3), (2, 2, 0), (0, 4, 0)]
    assert ranks.run(3, train, mlp, classify, rows, {"parallel_style": "fully_shard"}) == [2] * 3


def test_a_batch_that_is_split_over_two_axes(ranks: Ranks) -> None:
    mesh = ((2, 2), ("replicate", "shard"))
    rows = [(3, 1, 0, 3), (2, 2, 2, 1)]
    assert ranks.run(4, train, mlp, classify, rows, {"parallel_style": "fully_shard", "mesh": mesh}) == [1] * 4


def refused(rank: int, world: int, step: Step, rows: Sequence[int], error: type[Exception]) -> str:
    """The error of a call with these rows; a call with equal ones succeeds afterwards."""
    torch.manual_seed(0)
    model = mlp().double()
    compiled, optimizer = spmd.compile(step), torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = batch(sum(rows), 0)
    before = [each.clone() for each in model.parameters()]
    with pytest.raises(error) as caught:
        compiled(model, optimizer, own(x, rows, rank), own(y, rows, rank))
    assert all(map(torch.equal, before, model.parameters()))
    x, y = batch(4, 1)
    compiled(model, optimizer, own(x, (2, 2), rank), own(y, (2, 2), rank))
    return str(caught.value)


def reasons(rank: int, world: int) -> str:
    """The lines of progress of a step that compiles for rows that become unequal."""
    model, shown = nn.Linear(6, 3).double(), io.StringIO()
    compiled, optimizer = spmd.compile(classify), torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(shown):
        patch.setenv("SPMD_QUIET", "0")
        for step, rows in enumerate([(2, 2), (2, 1)]):
            compiled(model, optimizer, *(own(each, rows, rank) for each in batch(sum(rows), step)))
    return shown.getvalue()


def test_the_rows_are_named_as_what_is_compiled_for(ranks: Ranks) -> None:
    shown, _ = ranks.run(2, reasons)
    assert "(program 2: ranks have unequal numbers of rows, 3 of x in all, 3 of y in all)" in shown


def overwrite(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return classify(model, optimizer, x, y)[0]


def test_rows_that_a_result_may_have_are_not_guessed(ranks: Ranks) -> None:
    """One row for two ranks: one of them has none, so rows are gathered, and with them those of the result."""
    for message in ranks.run(2, refused, classify, (1, 0), spmd.PlacementError):
        assert "result.1, of shape [1, 3], may be rows of the batch or not" in message


def test_a_step_that_writes_into_its_rows_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, refused, overwrite, (3, 1), spmd.RankMismatchError):
        assert "unequal numbers of rows of x, which the step writes into" in message


def noisy(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return classify(model, optimizer, F.dropout(x, 0.5), y)[0]


def draws(rank: int, world: int) -> list[float]:
    """Losses of one global batch, which ranks bring in other parts each time; draws belong to its rows."""
    x, y = batch(8, 0)
    losses = []
    for rows in [(4, 4), (7, 1), (0, 8)]:
        torch.manual_seed(0)
        model = mlp().double()
        compiled, optimizer = spmd.compile(noisy), torch.optim.SGD(model.parameters(), lr=0.0)
        losses.append(float(compiled(model, optimizer, own(x, rows, rank), own(y, rows, rank))))
    return losses


def test_draws_belong_to_rows_of_the_global_batch(ranks: Ranks) -> None:
    for first, *others in ranks.run(2, draws):
        assert others == [first, first]


class Recurrent(nn.Module):
    """Keeps its hidden rows from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.Linear(6, 6).double(), None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.cell(x) if self.hidden is None else self.cell(x) + self.hidden)
        self.hidden = hidden.detach()
        return hidden


def recur(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = (model(x).sum(1) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, 2 * x


def test_rows_that_the_step_keeps(ranks: Ranks) -> None:
    ranks.run(2, train, Recurrent, recur, [(4, 3), (3, 4), (7, 0)], {"parallel_style": "replicate"})


def several(model: nn.Module, optimizer: torch.optim.Optimizer, pair: dict[str, Tensor], wide: Tensor) -> Tensor:
    """Arguments that are split along other dims, and one of two rows for each of the others'."""
    scores = model(pair["x"])
    loss = F.cross_entropy(scores, pair["y"]) + (scores.sum() * wide).mean() + (wide.sum(0) * pair["twice"].sum()).var()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_several(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = mlp().double()
    plain = copy.deepcopy(model)
    optimizer, its = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain))
    inputs = {"pair.x": Shard(0), "pair.y": Shard(0), "pair.twice": Shard(0), "wide": Shard(1)}
    compiled = spmd.compile(several, parallel_mode=spmd.DataParallel(inputs=inputs))
    for k, rows in enumerate([(3, 3), (1, 5), (3, 2)]):
        x, y = batch(sum(rows), k)
        twice, wide = torch.cat([x, -3 * x]), x.t()[:4].contiguous()
        of_two = twice.split([2 * each for each in rows])[rank]
        part = {"x": own(x, rows, rank), "y": own(y, rows, rank), "twice": of_two}
        loss = compiled(model, optimizer, part, wide.split(rows, dim=1)[rank])
        expected = several(plain, its, {"x": x, "y": y, "twice": twice}, wide)
        torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)


def test_arguments_split_along_other_dims(ranks: Ranks) -> None:
    ranks.run(2, train_several)
