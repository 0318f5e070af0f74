"""Ops that look across the rows of the batch, or leave them where they are: losses and results of the global batch.

The ops stand in groups, one step for each, so that many share one compilation; every term is a result, by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.cases import MLP, mlp
from tests.harness.oracle import assert_agrees, random_generator
from tests.harness.pool import Ranks

Terms = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
GROUPS: dict[str, Terms] = {}


def group(terms: Terms) -> Terms:
    """``h``, ``y``: (batch, 6); ``t``: (batch,) integers below 5. The loss is the sum of the terms' means."""
    GROUPS[terms.__name__] = terms
    return terms


@group
def contrast(h: Tensor, y: Tensor, t: Tensor) -> dict[str, Tensor]:
    """Every row against every other one of the global batch."""
    z, n = F.normalize(h, dim=1), len(h)
    logits = z @ F.normalize(y, dim=1).T / 0.1
    pairs = torch.cat([z, F.normalize(y, dim=1)])
    similarity = (pairs @ pairs.T).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    same = (t[:, None] == t[None, :]).double()
    own = z @ z.T
    return {
        "InfoNCE": (F.cross_entropy(logits, torch.arange(n)) + F.cross_entropy(logits.T, torch.arange(n))) / 2,
        "SimCLR": F.cross_entropy(similarity, torch.cat([torch.arange(n, 2 * n), torch.arange(n)])),
        "by class": -(same * (own - own.logsumexp(1, keepdim=True))).sum() / same.sum(),
        "distances": torch.cdist(h, y) + F.pdist(h).mean(),
        "decorrelation": ((z - z.mean(0)).T @ (z - z.mean(0)) / n - torch.eye(6)).square(),
    }


@group
def order(h: Tensor, y: Tensor, t: Tensor) -> dict[str, Tensor]:
    """Sorted, summed up, moved along and turned around over the batch."""
    ranked = h[h.detach()[:, 0].argsort()]
    return {
        "sorted": h[:, 0].sort().values * torch.arange(len(h)),
        "in order": ranked * torch.arange(len(h))[:, None],
        "top": h[:, 1].topk(3).values,
        "cumulative": h.cumsum(0).square() + h.logcumsumexp(0),
        "rolled": (h - h.roll(1, 0)).square() + h * h.roll(3, 1),
        "turned": h * h.flip(0),
        "differences": h.diff(dim=0).abs(),
        "median": h.median(0).values + h.quantile(0.3, dim=0),
        "softmax": (h[:, 0].softmax(0)[:, None] * h).sum(0) + h.log_softmax(0),
    }


@group
def pieces(h: Tensor, y: Tensor, t: Tensor) -> dict[str, Tensor]:
    """Cut from the batch, and put together from it."""
    first, second = h.chunk(2)
    left, middle, right = h.split(2, 1)
    return {
        "together": torch.cat([h, y]).square(),
        "stacked": torch.stack([h, y]).pow(3),
        "repeated": h.repeat_interleave(2, 0).square() + h.repeat(2, 1),
        "every second": h[::2].square(),
        "first four": h[:4] + h[3] * h[-1],
        "moved by hand": torch.cat([h[1:], h[:1]]).pow(3) * h,
        "halves": first * second,
        "columns": left * middle * right,
        "row by row": torch.stack([row.square() * k for k, row in enumerate(h.unbind(0))]),
        "chosen": h[t].square() + h[[0, 3]].sum() + h[torch.arange(len(h)), t].mean(),
        "gathered": h.gather(1, t[:, None]) + h.index_select(0, t).mean(),
        "padded": F.pad(h, (0, 0, 1, 0)).square(),
        "windows": h.unfold(1, 3, 2).square(),
        "by two": h.view(2, -1, 6).mean(1).square(),
        "flat": h.flatten().square(),
    }


@group
def tables(h: Tensor, y: Tensor, t: Tensor) -> dict[str, Tensor]:
    """Sums by class, counts, masks and choices."""
    ones = torch.ones_like(h[:, 0])
    return {
        "sums": torch.zeros(5, 6, dtype=h.dtype).index_add(0, t, h),
        "scattered": torch.zeros(5, 6, dtype=h.dtype).scatter_add(0, t[:, None].expand(-1, 6), h).square(),
        "counts": torch.zeros(5, dtype=h.dtype).index_add(0, t, ones),
        "one hot": h * torch.zeros_like(h).scatter(1, t[:, None], 1.0) + F.one_hot(t, 6),
        "all": torch.where(torch.isfinite(h).all(), h, 0.0) * (1 + (h > 1).any()),
        "any": (h > 0).any(0) + (h > -1).all(1).sum() + (h > 0.1).count_nonzero(),
        "masked": h.masked_fill(y > 0, 0).square() + torch.where(y > 0, h, 2.0),
        "scattered by a mask": h.masked_scatter(y > 0, h.sin() * y),
        "products": torch.einsum("bi,bj->ij", h, y) + torch.einsum("bi,ci->bc", h, y).mean(),
        "outer": torch.outer(h[:, 0], y[:, 1]).square() + torch.tril(h @ h.T),
        "extremes": h.amax(0) + h.max() - h.min(0).values.square(),
        "moments": h.var(0) + h.std() + h.norm() + h.prod(1).mean(),
    }


@group
def losses(h: Tensor, y: Tensor, t: Tensor) -> dict[str, Tensor]:
    """Reductions over the global batch, with weights, smoothing and ignored targets."""
    weight = torch.arange(1.0, 7.0, dtype=h.dtype)
    log, target, ones = h.log_softmax(1), y.softmax(1), (y > 0).double()
    ignored = torch.where(t == 0, -100, t)
    images = torch.stack([t % 3, (t + 1) % 3], 1)
    padded = torch.stack([t, *[torch.full_like(t, -1)] * 5], 1)
    return {
        "classes": F.cross_entropy(h, ignored) + F.cross_entropy(h, t, weight=weight, label_smoothing=0.1),
        "soft": F.cross_entropy(h, target) + F.cross_entropy(h, t, weight=weight, ignore_index=1, reduction="sum"),
        "of each row": F.cross_entropy(h, t, reduction="none"),
        "of images": F.cross_entropy(h.view(-1, 3, 2), images, weight=weight[:3], label_smoothing=0.1),
        "divergence": F.kl_div(log, target, reduction="batchmean") + F.kl_div(log, target.log(), log_target=True),
        "regression": F.huber_loss(h, y) + F.smooth_l1_loss(h, y) + F.l1_loss(h, y) + F.poisson_nll_loss(h, y.abs()),
        "binary": F.binary_cross_entropy_with_logits(h, ones, pos_weight=weight, weight=y.abs())
        + F.binary_cross_entropy(h.sigmoid(), ones),
        "margins": F.triplet_margin_loss(h, y, y.flip(1)) + F.multi_margin_loss(h, t),
        "signs": F.cosine_embedding_loss(h, y, y[:, 0].sign())
        + F.margin_ranking_loss(h[:, 0], h[:, 1], y[:, 0].sign()),
        "labels": F.multilabel_soft_margin_loss(h, ones) + F.multilabel_margin_loss(h, padded),
        "likelihood": F.nll_loss(log, t, weight=weight) + F.hinge_embedding_loss(h, y.sign()),
    }


@dataclass(frozen=True)
class OverTheBatch(MLP):
    """A 5-7-6 model whose output goes through one of the groups."""

    sizes: tuple[int, ...] = (5, 7, 6)
    rows: int = 6
    group: str = ""

    def build(self) -> tuple[Any, ...]:
        model = mlp(*self.sizes)
        return model, torch.optim.SGD(model.parameters(), lr=0.01), self.group

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = super().part(rank, step)  # type: ignore[misc]
        return x, y, torch.randint(5, (self.rows,), generator=random_generator(rank, step))

    @staticmethod
    def step(model: nn.Module, optimizer: Any, group: str, x: Tensor, y: Tensor, t: Tensor) -> Any:  # type: ignore[override]
        terms = GROUPS[group](model(x), y, t)
        torch.stack([term.double().mean() for term in terms.values()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {name: term.detach() for name, term in terms.items()}


def cases() -> Iterator[Any]:
    """Worlds and styles in turn."""
    for index, name in enumerate(GROUPS):
        style, world = (("fully_shard", 2), ("replicate", 2), ("replicate", 3))[index % 3]
        yield pytest.param(OverTheBatch(group=name), style, world, id=name)


@pytest.mark.parametrize("case, style, world", list(cases()))
def test_ops_see_the_global_batch(ranks: Ranks, case: OverTheBatch, style: str, world: int) -> None:
    assert_agrees(ranks, world, case, style)
