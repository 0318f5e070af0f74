"""Experts as people write them: numbers beside the plain step, or the sentence that says what runs instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

WIDTH, HIDDEN, EXPERTS, CHOSEN = 16, 24, 4, 2
Mix = Callable[["Mixture", Tensor, Tensor, Tensor], Tensor]
ALONE: dict[str, Any] = {"parallel_style": "replicate"}
OVER_BATCH: dict[str, Any] = {"axes": {"batch": "ep", "experts": "ep"}}
OVER_TWO: dict[str, Any] = {"parallel_style": "fully_shard", "axes": {"batch": ("dp", "ep"), "experts": "ep"}}


class Mixture(nn.Module):
    """Two experts a token; ``mix`` computes and sums up theirs. ``dtype``: that of products."""

    def __init__(self, mix: Mix, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.mix, self.dtype = mix, dtype
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) -> the same."""
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        return x + self.mix(self, x, chosen, weights / weights.sum(-1, keepdim=True))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Train on a batch."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def verified(model: nn.Module, mesh: dict[str, int], **options: Any) -> spmd.Verdict:
    """Two steps in all stages of a compilation, beside the plain ones."""
    torch.manual_seed(0)
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(**options))
    dtype = next(model.parameters()).dtype
    batch = (torch.randn(16, WIDTH, dtype=dtype) for _ in range(2))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    return spmd.verify(step, model, optimizer, *batch, world=torch.Size(mesh.values()).numel(), mesh=mesh, steps=2)


# Rows sorted by expert


def by_ends(self: Mixture, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The product of ``torch.nn.functional``, in any dtype that it has."""
    experts, order = chosen.flatten().sort()
    ends = experts.bincount(minlength=EXPERTS).cumsum(0).int()
    hidden = F.silu(F.grouped_mm(x[order // CHOSEN].to(self.dtype), self.up.to(self.dtype), offs=ends))
    out = F.grouped_mm(hidden, self.down.to(self.dtype), offs=ends).to(x.dtype) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // CHOSEN, out)


def by_capacity(self: Mixture, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Places for all tokens at each expert, and grouped products of as many rows each."""
    hot, capacity = F.one_hot(chosen, EXPERTS).to(x.dtype), len(x)
    place = (hot.sum(1).cumsum(0) - 1).clamp(0, capacity - 1).long()
    sent = torch.einsum("nke,nec->nec", hot, F.one_hot(place, capacity).to(x.dtype))
    rows = torch.einsum("nec,nd->ecd", sent, x).to(self.dtype)
    out = F.grouped_mm(F.silu(F.grouped_mm(rows, self.up.to(self.dtype))), self.down.to(self.dtype)).to(x.dtype)
    return torch.einsum("nec,nke,nk,ecd->nd", sent, hot, weights, out)


@pytest.mark.slow
@pytest.mark.parametrize("mix, dtype, mesh, options", [
    (by_ends, torch.float16, {"dp": 2}, {**ALONE, "micro_batches": 2}),
    (by_ends, torch.float32, {"dp": 2, "ep": 2}, OVER_TWO),
    (by_capacity, torch.bfloat16, {"ep": 2}, OVER_BATCH),
])  # fmt: skip
def test_grouped_products_in_each_dtype(
    mix: Mix, dtype: torch.dtype, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    verdict = verified(Mixture(mix, dtype), mesh, **options)
    assert verdict, str(verdict)


def test_grouped_products_in_fp64_are_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match=r"float16 or bfloat16 for _grouped_mm, got torch\.float64") as caught:
        verified(Mixture(by_ends, torch.float64), {"dp": 2}, **ALONE)
    assert "test_expert_forms.py" in "".join(caught.value.__notes__)


@dataclass(frozen=True)
class Training(Case):
    """Steps in fp32."""

    rtol, atol = 1e-5, 1e-6  # the order of sums in fp32

    mix: Mix = by_ends

    def build(self) -> tuple[Any, ...]:
        """The model, and SGD."""
        model = Mixture(self.mix)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """Rows and targets."""
        draw = random_generator(rank, step)
        return tuple(torch.randn(8, WIDTH, generator=draw) for _ in range(2))

    step = staticmethod(train_step)


@pytest.mark.parametrize("mode", [{"micro_batches": 2, **ALONE}, {"axes": {"batch": "dp", "experts": "dp"}}])
def test_grouped_products_in_fp32_on_ranks(ranks: Ranks, mode: dict[str, Any]) -> None:
    assert_agrees(ranks, 2, Training(), mode)
