"""Models in the dtypes that people train in: kernels for these are others than for fp64, and lie and round otherwise.

What is compared is the change of each parameter, in units of the plain step's: an update that is missing, or of
another gradient, is a difference of about 1, and rounding is far below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd

pytestmark = pytest.mark.usefixtures("alone")
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class Recurrent(nn.Module):
    """The outputs of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, 8) -> (rows, length, 16)."""
        out: Tensor = self.cells(x)[0]
        return out


def images(kernel: int, norm: Callable[[], nn.Module]) -> nn.Module:
    """Convolutions around a norm, with their channels last."""
    layers = (
        nn.Conv2d(8, 8, kernel, bias=False),
        norm(),
        nn.Tanh(),
        nn.Conv2d(8, 8, kernel),
    )  # the norm takes a bias off
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(8, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 8)), (16, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 40, dropout=0.0, batch_first=True), (4, 5, 8)),
    "recurrent": (Recurrent, (4, 5, 8)),
    "images": (lambda: images(3, lambda: nn.GroupNorm(2, 8)), (16, 8, 7, 7)),
    "images, 1 x 1": (lambda: images(1, lambda: nn.BatchNorm2d(8)), (16, 8, 5, 5)),
}


CASES = [(name, dtype, "SGD") for name in MODELS for dtype in (torch.float32, torch.bfloat16)]
CASES += [("layers", dtype, "AdamW") for dtype in ROUNDING] + [("images", torch.bfloat16, "AdamW")]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    out = model(x).float()
    loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def changes(made: Callable[[], nn.Module], x: Tensor, optimizer: str, call: Any) -> list[Tensor]:
    """By how much three steps change each parameter."""
    torch.manual_seed(0)
    model = made().to(x.dtype)
    before = copy.deepcopy(model)
    given: dict[str, Any] = {"lr": 0.05} | ({"eps": 1e-3} if optimizer == "AdamW" else {})
    updates = getattr(torch.optim, optimizer)(model.parameters(), **given)
    for _ in range(3):
        call(model, updates, x)
    return [(new - old).detach().float() for new, old in zip(model.parameters(), before.parameters(), strict=True)]


@pytest.mark.parametrize(
    ("name", "dtype", "optimizer"),
    # Their ops in bfloat16, where less rounding is hidden, and float32 by other layers, in every run.
    [pytest.param(*c, marks=[pytest.mark.exhaustive] * (c[:2] == ("recurrent", torch.float32))) for c in CASES],
    ids=str,
)
def test_a_step_changes_what_the_plain_one_changes(name: str, dtype: torch.dtype, optimizer: str) -> None:
    made, shape = MODELS[name]
    x = torch.randn(shape).to(dtype)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    pairs = zip(*(changes(made, x, optimizer, each) for each in (spmd.compile(step), step)), strict=True)
    off = [float((ours - plain).norm() / plain.norm()) for ours, plain in pairs]
    assert max(off) < ROUNDING[dtype], off
