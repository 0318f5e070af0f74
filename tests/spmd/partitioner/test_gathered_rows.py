"""Rows of the batch that are put together, cut and folded stay on their ranks; a gather of rows is in the report."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, STYLES
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts, mlp

pytestmark = pytest.mark.slow

Use = Callable[[nn.Module, Tensor, Tensor], Tensor]


def fixmatch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Labelled and other rows in one batch, cut apart by number."""
    n = len(x)
    logits = model(torch.cat([x, x.flip(1)]))
    return (logits[:n] - y).square() + logits[n:].softmax(1) * y


def preferences(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Chosen and rejected rows in one batch, with a mask made beside them and written into."""
    both = model(torch.cat([x, x.sin()]))
    mask = both.new_zeros(both.shape)
    mask[: len(x)] = 1
    chosen, rejected = (both * mask + both.new_zeros(len(both), 1)).split([len(x), len(x)])
    return F.logsigmoid(chosen - rejected * y)


def three_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One part is as long as the other two together."""
    both = model(torch.cat([torch.cat([x, x.cos()]), x.sin()]))
    return both[: 2 * len(x)].view(2, -1, 3).mean(0) * both[-len(x) :] + y


def modulated(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Each row is convolved by weights of its own, as rows in groups."""
    n, weight = len(x), model[0].weight
    image = x.view(1, n * 2, -1).repeat(1, 1, 2)
    styled = (weight.view(1, 4, 2, 2) * x[:, :2].view(n, 1, 2, 1)).view(n * 4, 2, 2)
    return F.conv1d(image, styled, groups=n).view(n, 4, -1).mean(-1) @ model[2].weight.t() * y


def of_two_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of a mean over all rows begins whole on every rank, and is cut in the runs of the rows."""
    return model(torch.cat([x, x.sin()])).square().mean()


KEPT: dict[str, Use] = {use.__name__: use for use in (fixmatch, preferences, three_views, modulated, of_two_views)}


@dataclass(frozen=True)
class Rows(MLP):
    """A 4-4-3 model whose rows go through one of the functions above."""

    sizes: tuple[int, ...] = (4, 4, 3)
    rows: int = 4
    use: str = ""

    def build(self) -> tuple[Any, ...]:
        model = mlp(*self.sizes)
        return model, torch.optim.SGD(model.parameters(), lr=0.05), self.use

    @staticmethod
    def step(model: nn.Module, optimizer: Any, use: str, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        result = USES[use](model, x, y)
        result.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return result.detach()


def _unequal(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The rows of the second part are twice as many, so that a rank has others of them than of the first."""
    n = len(x)
    logits = model(torch.cat([x, torch.stack([x, x.cos()], 1).view(-1, 4)]))
    return logits[:n] * y + logits[n : 2 * n] * logits[2 * n :]


def _across(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = model(x)
    ordered, compared = h[h.detach()[:, 0].argsort()], (h @ y.t()).softmax(1)
    return torch.stack([ordered[0].sum(), compared[:, 0].sum(), h.cumsum(0).square().sum(), h.roll(1, 0).prod()])


USES: dict[str, Use] = KEPT | {"unequal": _unequal, "across": _across}


def _compiled(use: str) -> Any:
    case = Rows(use=use)
    return compile_on_fake_ranks(2, case.step, case.build(), *case.part(0, 0), passes=())


@pytest.mark.parametrize("use", KEPT)
def test_rows_stay_on_their_ranks(use: str) -> None:
    compiled = _compiled(use)
    assert set(counts(compiled)) == {"all_reduce"}
    assert compiled.report().notes == ()


@pytest.mark.parametrize("use", ["unequal", "across"])
def test_every_gather_of_rows_has_a_note_with_line_and_way_out(use: str) -> None:
    compiled = _compiled(use)
    rows = [row for row in compiled.report().every if row.role == "activation" and row.kind != "all_reduce"]
    notes = [note for note in compiled.report().notes if "gathered" in note]
    noted = sum(int(count) for note in notes for count in re.findall(r"(\d+) values?, \d+ bytes", note))
    assert noted == sum(row.kind in ("all_gather", "all_to_all") for row in rows) > 0
    assert all("test_gathered_rows.py:" in note and "To avoid that, " in note for note in notes)


@pytest.mark.parametrize("style, use", [(STYLES[k % 2], use) for k, use in enumerate([*KEPT, "unequal"])])
def test_rows_are_those_of_the_plain_step(ranks: Ranks, style: str, use: str) -> None:
    assert_agrees(ranks, 2, Rows(use=use), style, steps=3)


def two_views(model: nn.Module, x: Tensor) -> Tensor:
    """Rows that each rank has joined before the call are not cut apart so."""
    first, second = model(x).chunk(2)
    return F.mse_loss(first, second).detach()


def test_a_cut_of_rows_that_ranks_may_have_joined_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"x\)\.chunk\(2\) cuts the batch across ranks, .*two views") as found:
        compile_on_fake_ranks(2, two_views, (mlp(6, 3),), torch.randn(4, 6, dtype=torch.float64))
    assert len(found) == 1


def test_one_rank_needs_no_rows_of_others() -> None:
    compiled = compile_on_fake_ranks(1, two_views, (mlp(6, 3),), torch.randn(4, 6, dtype=torch.float64))
    assert not compiled.program.notes


def test_one_rank_gathers_no_matrices_for_an_update_whatever_the_micro_batches() -> None:
    mode = spmd.DataParallel("fully_shard", micro_batches=2)
    case = MLP(optimizer="AdamW")
    compiled = compile_on_fake_ranks(1, case.step, case.build(), *case.part(0, 0), parallel_mode=mode)
    assert not [note for note in compiled.program.notes if "gathered" in note]
