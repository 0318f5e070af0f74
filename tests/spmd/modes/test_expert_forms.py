"""Experts as people write them: numbers beside the plain step, or the sentence that says what runs instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import spmd
from tests.harness.fake import fake_world
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


def verified(model: nn.Module, mesh: dict[str, int], passes: Any = (), **options: Any) -> spmd.Verdict:
    """A step in all stages of a compilation, beside the plain one; without ``passes`` in the one that knows experts."""
    torch.manual_seed(0)
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(**options), passes=passes)
    dtype = next(model.parameters()).dtype
    batch = (torch.randn(16, WIDTH, dtype=dtype) for _ in range(2))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    return spmd.verify(step, model, optimizer, *batch, world=torch.Size(mesh.values()).numel(), mesh=mesh, steps=1)


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


def by_columns_of_numbers(self: Mixture, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Rows gathered and added by numbers that are repeated for each column; counts by ``histc``."""
    order = torch.argsort(chosen.view(-1), stable=True)
    counts = torch.histc(chosen.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
    ends, rows = counts.cumsum(0, dtype=torch.int32), (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH)
    hidden = F.silu(F.grouped_mm(torch.gather(x, 0, rows), self.up, offs=ends))
    out = F.grouped_mm(hidden, self.down, offs=ends) * weights.view(-1)[order].reshape(-1, 1)
    return torch.zeros_like(x).scatter_add(0, rows, out)


@pytest.mark.slow
@pytest.mark.parametrize("mix, dtype, mesh, options", [
    (by_columns_of_numbers, torch.float32, {"dp": 2, "ep": 2}, {"passes": None, "micro_batches": 2, **OVER_TWO}),
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

    mix: Any = by_ends

    def build(self) -> tuple[Any, ...]:
        """The model, and SGD."""
        model = (Loops if self.mix is weighed else Mixture)(self.mix)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """Rows and targets."""
        draw = random_generator(rank, step)
        return tuple(torch.randn(8, WIDTH, generator=draw) for _ in range(2))

    step = staticmethod(train_step)


@pytest.mark.parametrize("mode", [{"micro_batches": 2, **ALONE}, {"axes": {"batch": "dp", "experts": "dp"}}])
def test_grouped_products_in_fp32_on_ranks(ranks: Ranks, mode: dict[str, Any]) -> None:
    assert_agrees(ranks, 2, Training(), mode)


# Weights looked up by number, and computed from others


def by_matmul(self: Mixture, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Matrices of (tokens, chosen), by products that broadcast."""
    hidden = F.silu(x[:, None, None] @ self.up[chosen])
    return ((hidden @ self.down[chosen]).squeeze(2) * weights.unsqueeze(-1)).sum(1)


def by_einsum(self: Mixture, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Transposed weights, by sums over letters."""
    hidden = F.silu(torch.einsum("ti,taoi->tao", x, self.up.mT[chosen]))
    return torch.einsum("tai,ta->ti", torch.einsum("tao,taio->tai", hidden, self.down.mT[chosen, ...]), weights)


def by_columns(self: Mixture, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Rows of a flat table, and weights selected by ``index_select``, with tokens as columns."""
    up = F.embedding(chosen, self.up.flatten(1)).view(-1, WIDTH, HIDDEN)
    down = self.down.index_select(0, chosen.flatten())
    hidden = F.silu(torch.bmm(up.mT, x.repeat_interleave(CHOSEN, 0).unsqueeze(-1)))
    out = torch.bmm(down.mT, hidden).squeeze(-1) * weights.reshape(-1, 1)
    return out.view(-1, CHOSEN, WIDTH).sum(1)


def by_elements(self: Mixture, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """No product of matrices: elements are multiplied and added up, for one expert after the other."""
    out = torch.zeros_like(x)
    for k in range(CHOSEN):
        hidden = F.silu((x[:, :, None] * self.up[chosen[:, k]]).sum(1))
        out = out + weights[:, k, None] * (hidden[:, :, None] * self.down[chosen[:, k]]).sum(1)
    return out


class Adapted(Mixture):
    """Frozen weights, with the product of two small ones added to each."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix)
        shapes = [(EXPERTS, *shape) for shape in ((WIDTH, 2), (2, HIDDEN), (HIDDEN, 2), (2, WIDTH))]
        self.low = nn.ParameterList(torch.randn(shape) / 3 for shape in shapes)
        self.base = nn.ParameterList([self.up, self.down]).requires_grad_(False)
        del self.up, self.down

    @property
    def up(self) -> Tensor:  # type: ignore[override]
        """The weights that tokens see."""
        return self.base[0] + 0.5 * (self.low[0] @ self.low[1])

    @property
    def down(self) -> Tensor:  # type: ignore[override]
        """The weights that tokens see."""
        return self.base[1] + 0.5 * (self.low[2] @ self.low[3])


@pytest.mark.slow
@pytest.mark.parametrize("make, mix, mesh, options", [
    (Mixture, by_matmul, {"ep": 2}, {"passes": None, "micro_batches": 2, **OVER_BATCH}),
    (Mixture, by_einsum, {"dp": 2, "ep": 2}, OVER_TWO),
    (Mixture, by_columns, {"ep": 2}, OVER_BATCH),
    (Mixture, by_elements, {"ep": 2}, {"micro_batches": 2, **OVER_BATCH}),
    (Adapted, by_ends, {"ep": 2}, OVER_BATCH),
    (Adapted, by_einsum, {"ep": 2}, OVER_BATCH),
])  # fmt: skip
def test_looked_up_and_computed_weights(make: Any, mix: Mix, mesh: dict[str, int], options: dict[str, Any]) -> None:
    model = make(mix)
    verdict = verified(model if mix is by_ends else model.double(), mesh, **options)
    assert verdict, str(verdict)


@pytest.mark.parametrize("mix", [by_matmul, by_einsum])
def test_looked_up_weights_and_their_gradients_stay(mix: Mix) -> None:
    """Tokens and sums of activations travel, never what is as large as weights."""
    with fake_world(2):
        mode = spmd.DataParallel(mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), **OVER_BATCH)
        step = spmd.compile(train_step, parallel_mode=mode, passes=())
        model = Mixture(mix)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    assert step.program is not None and isinstance(model.up, DTensor) and model.up.placements == (Shard(0),)
    sent = [node.args[0].meta["val"] for node in step.program.collectives()]
    assert max(map(torch.numel, sent)) == 16 * CHOSEN * HIDDEN  # (tokens, chosen, hidden)


# Loops over experts


class Loops(nn.Module):
    """An expert is a module of a list; ``mix`` chooses the rows of each."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.mix, self.router = mix, nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(EXPERTS)
        )

    forward = Mixture.forward


def weighed(self: Loops, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each expert for all rows."""
    return sum(expert(x) * (weights * (chosen == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))


def where(self: Loops, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The rows of each expert, added by their numbers."""
    out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(self.experts):
        place, row = torch.where(mask[e])
        out.index_add_(0, row, expert(x[None, row].reshape(-1, WIDTH)) * weights[row, place, None])
    return out


def if_any(self: Loops, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The rows of each expert, written by a mask, if there are some."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = (chosen == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
    return out


def by_counts(self: Loops, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Runs of sorted rows, as long as counts say."""
    order, counts = chosen.flatten().argsort(), chosen.flatten().bincount(minlength=EXPERTS).tolist()
    rows = x[order // CHOSEN].split(counts)
    out = torch.cat([expert(each) for expert, each in zip(self.experts, rows, strict=True)])
    return torch.zeros_like(x).index_add(0, order // CHOSEN, out * weights.flatten()[order, None])


def test_each_expert_of_a_list_for_all_rows(ranks: Ranks) -> None:
    assert_agrees(ranks, 2, Training(weighed), {"micro_batches": 2, **ALONE})


@pytest.mark.parametrize("mix", [where, if_any, by_counts])
def test_a_loop_over_the_rows_of_experts_names_what_runs(mix: Any) -> None:
    with pytest.raises(
        spmd.CaptureError, match=r"(?s)grouped_mm \(docs/experts\.md\).*test_expert_forms\.py:\d+ in model"
    ):
        verified(Loops(mix), {"dp": 2}, **ALONE)


@pytest.mark.parametrize("experts", ["*.experts.*", nn.Sequential, None])
def test_a_list_of_experts_is_not_split_by_expert(experts: Any) -> None:
    message = "4 modules of model.experts, .* stack them .* docs/experts.md" if experts else "nn.ModuleList are no such"
    with pytest.raises(spmd.PlacementError, match=message):
        verified(Loops(weighed), {"ep": 2}, experts=experts, **OVER_BATCH)
