"""Steps that seem to need values while they are traced, but do not: rows by a counter, known masks, counts, checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import mlp
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def score_matching(model: Any, x: Tensor, t: Tensor) -> Tensor:
    x.requires_grad_()
    energy = model(x).square().sum()
    (score,) = torch.autograd.grad(energy, x, create_graph=True)
    return score.square().mean() + 0.01 * energy


def adversarial(model: Any, x: Tensor, t: Tensor) -> Tensor:
    x.requires_grad_()
    F.mse_loss(model(x), torch.ones_like(x)).backward()
    assert x.grad is not None
    worse = (x + 0.1 * x.grad.sign()).detach()
    model.zero_grad()
    loss: Tensor = model(worse).square().mean()
    return loss


def row_by_a_counter(model: Any, x: Tensor, t: Tensor) -> Tensor:
    table = torch.linspace(0.5, 2, 12, dtype=x.dtype).view(3, 4) * x.mean()
    return (model(x) * table[t] + table[..., None][-1 - t, :, 0]).square().mean()


def row_by_argmax(model: Any, x: Tensor, t: Tensor) -> Tensor:
    h = model(x)
    return h[h.sum(1).argmax()].square().sum() + h[:, h.mean(0).argmax()].square().mean()


def rows_written(model: Any, x: Tensor, t: Tensor) -> Tensor:
    h = model(x)
    table = torch.zeros(4, 4, dtype=x.dtype)
    table[t] += h.mean(0)
    table[t + 1] = 2 * x.sum(0)
    table[:, t] = 0.5
    return (h @ table).square().mean()


def gaussian_nll(model: Any, x: Tensor, t: Tensor) -> Tensor:
    return F.gaussian_nll_loss(model(x), x, model(x).exp())


def counts(model: Any, x: Tensor, t: Tensor) -> Tensor:
    classes = x.argmax(1)
    frequency = torch.bincount(classes, minlength=4) / len(x)
    return (model(x) * frequency).sum() + torch.bincount(classes, x[:, 0], 4).square().sum() * model(x).mean()


def all_but_the_diagonal(model: Any, x: Tensor, t: Tensor) -> Tensor:
    n, h = len(x), model(x)
    similar, eye = h @ h.T, torch.eye(n, dtype=torch.bool)
    others = similar[~eye].view(n, n - 1)
    return (
        others.logsumexp(1).mean()
        + similar.masked_select(eye).mean()
        + similar.flatten()[eye.flatten().nonzero()].mean()
    )


LOSSES: dict[str, Loss] = {
    each.__name__: each
    for each in (
        *(score_matching, adversarial, row_by_a_counter, row_by_argmax, rows_written),
        *(gaussian_nll, counts, all_but_the_diagonal),
    )
}


@dataclass(frozen=True)
class Trained(Case):
    """A 4-6-4 model with one of the losses above; ``t`` counts to 3 and begins again."""

    loss: str = "score_matching"

    def build(self) -> tuple[Any, ...]:
        model = mlp(4, 6, 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.05), self.loss

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x = torch.randn(5, 4, generator=random_generator(rank, step), dtype=torch.float64)
        return x, torch.tensor(step % 3)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, loss: str, x: Tensor, t: Tensor) -> Tensor:
        value = LOSSES[loss](model, x, t)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value


@pytest.mark.parametrize("loss", LOSSES)
def test_the_numbers_of_the_plain_step(ranks: Ranks, loss: str, pytestconfig: pytest.Config) -> None:
    for world in (1, 2) if pytestconfig.getoption("--exhaustive") else (2,):
        assert_agrees(ranks, world, Trained(loss), steps=4)


def writes_into_a_row(x: Tensor, t: Tensor) -> Tensor:
    table = x * 2
    table[t].add_(1)
    return table


def reads_a_row_too_late(x: Tensor, t: Tensor) -> Tensor:
    table = x * 2
    row = table[t]
    table.add_(1)
    return row.sum()


def writes_by_two(x: Tensor, t: Tensor) -> Tensor:
    table = x * 2
    table[t, t] = 1.0
    return table


REFUSED = {
    writes_into_a_row: r"writes into a row taken by the value of a tensor.*table\[t\] = value",
    reads_a_row_too_late: r"(?s)reads, after writing to the table, a row.*return row\.sum\(\)",
    writes_by_two: r"(?s)values of several 0-dim tensors.*table\[t, t\] = 1\.0",
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step, words", REFUSED.items(), ids=[step.__name__ for step in REFUSED])
def test_a_row_that_is_not_what_a_view_is_in_eager_is_refused(step: Any, words: str) -> None:
    with pytest.raises(spmd.CaptureError, match=words):
        spmd.compile(step)(torch.ones(3, 3), torch.tensor(1))


@pytest.mark.usefixtures("alone")
def test_a_class_beyond_those_counted_raises() -> None:
    compiled = spmd.compile(lambda x: torch.bincount(x, minlength=3))
    assert compiled(torch.tensor([0, 2, 2])).tolist() == [1, 0, 2]
    with pytest.raises((IndexError, RuntimeError), match="index 3 is out of bounds"):
        compiled(torch.tensor([0, 3, 2]))


def writes_a_mask(x: Tensor, y: Tensor) -> Any:
    keep = torch.ones(12, dtype=torch.bool)
    keep[10:12] = False
    out = x.clone()
    out[keep] = y[keep]
    return out


def lists_a_mask(x: Tensor, y: Tensor) -> Any:
    return x[torch.tensor([True] * 10 + [False] * 2)]


def writes_through_views(x: Tensor, y: Tensor) -> Any:
    keep = torch.zeros(12, dtype=torch.bool)
    keep.view(3, 4)[1] = True
    keep[torch.tensor([0, 2])] = True
    before = x[keep]
    keep &= torch.arange(12) > 3
    keep.logical_not_()
    return before, y[keep]


def joins_crops_of_a_size(x: Tensor, y: Tensor) -> Any:
    """As DINO's wrapper runs a model once for each size of its crops."""
    crops = [x, y, x[:, :2]]
    ends = torch.unique_consecutive(torch.tensor([crop.shape[-1] for crop in crops]), return_counts=True)[1].cumsum(0)
    start, found = 0, []
    for end in ends:
        found.append(torch.cat(crops[start:end]))
        start = end
    return found, x[:, torch.tensor([2, 0, 2]).unique()]


def depends_on_values(x: Tensor, y: Tensor) -> Any:
    keep = torch.ones(12, dtype=torch.bool)
    keep[0] = x.sum() > 0
    return x[keep]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("plain", [writes_a_mask, lists_a_mask, writes_through_views, joins_crops_of_a_size])
def test_masks_that_follow_from_no_input_are_known(plain: Any) -> None:
    x, y = torch.randn(12, 3), torch.randn(12, 3)
    torch.testing.assert_close(spmd.compile(plain)(x, y), plain(x, y))


@pytest.mark.usefixtures("alone")
def test_a_mask_with_a_value_of_an_input_is_not() -> None:
    with pytest.raises(spmd.CaptureError, match="depends on values"):
        spmd.compile(depends_on_values)(torch.randn(12, 3), torch.randn(12, 3))


@pytest.mark.usefixtures("alone")
def test_weights_of_a_recurrent_layer_are_not_asked_for_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each forward on CUDA does."""
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: [each.data_ptr() for each in self._flat_weights])
    layer, x = nn.GRU(3, 4, batch_first=True).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(spmd.compile(lambda layer, x: layer(x)[0])(layer, x), layer(x)[0])
