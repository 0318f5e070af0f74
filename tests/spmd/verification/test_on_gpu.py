"""Ranks simulated on one GPU: their programs, run by its kernels, compute what the plain step computes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import spmd
from examples.gpt import GPT, Config

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TWO: dict[str, int] = {"dp": 2}
SEQUENCE: dict[str, Any] = {"axes": {"batch": "dp", "sequence": "cp"}}
STAGES: dict[str, Any] = {"axes": {"stages": "pp"}, "stages": ["blocks.1"], "micro_batches": 2}
EXPERTS = 8


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Mixture(nn.Module):
    """Two of eight experts for each row, by grouped products over sorted rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 64, 128) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, 128, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        experts, order = chosen.flatten().sort(stable=True)
        ends = experts.bincount(minlength=EXPERTS).cumsum(0).int()
        hidden = F.silu(torch._grouped_mm(x[order // 2], self.up, ends))
        out = torch._grouped_mm(hidden, self.down, ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, out)


def optimized(model: nn.Module, *batch: Tensor) -> tuple[Any, ...]:
    return model, torch.optim.AdamW(model.parameters(), fused=True), *batch


def gpt(dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x = torch.randint(256, (4, 65), device=DEVICE)
    model = GPT(Config(width=64, layers=2, heads=2, context=64)).to(DEVICE, dtype)
    return optimized(model, x[:, :-1].contiguous(), x[:, 1:].contiguous())


def mixture_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def verified(of: Callable[..., Any], arguments: tuple[Any, ...], mesh: dict[str, int], options: dict[str, Any]) -> None:
    compiled = spmd.compile(of, parallel_mode=spmd.DataParallel(**options))
    verdict = spmd.verify(compiled, *arguments, world=2, mesh=mesh)
    assert verdict, str(verdict)


GATHERS = ("once", "each")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mesh, options", [
    (TWO, {}),
    (TWO, {"parallel_style": "fully_shard"}),
    *((TWO, {"parallel_style": "fully_shard", "micro_batches": 2, "gather_parameters": each}) for each in GATHERS),
    (TWO, {"shard_optimizer": True}),
    ({"pp": 2}, STAGES),
], ids=str)  # fmt: skip
def test_a_gpt_agrees(mesh: dict[str, int], options: dict[str, Any], dtype: torch.dtype) -> None:
    """One in fp32 is verified in fp64."""
    verified(step, gpt(dtype), mesh, options)


KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
FORMS: list[dict[str, Any]] = [
    *({"attention": form, "balance": balance} for form in ("gather", "ring") for balance in (True, False)),
    {"attention": "heads"},
]


@pytest.mark.parametrize("backend", KERNELS, ids=str)
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_attention_over_a_split_sequence_agrees(options: dict[str, Any], backend: SDPBackend) -> None:
    model, _, *batch = gpt(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)  # of AdamW a step is smaller than a bit of a weight
    with sdpa_kernel(backend):
        verified(step, (model, optimizer, *batch), {"dp": 1, "cp": 2}, {**SEQUENCE, **options})


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_experts_agree(style: str) -> None:
    torch.manual_seed(0)
    model, batch = Mixture().to(DEVICE, torch.bfloat16), torch.randn(2, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    options = {"parallel_style": style, "axes": {"batch": "ep", "experts": "ep"}, "experts": ["*.up", "*.down"]}
    verified(mixture_step, optimized(model, *batch), {"ep": 2}, options)
