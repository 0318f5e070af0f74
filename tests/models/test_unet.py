"""A diffusion U-Net: convolutions, group norms, attention over pixels, resampling, skips, a timestep for each image.

The noise is an argument, so that the plain step has the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.cases import MLP
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks

from .examine import assert_trains_in_place, in_one_style
from .zoo import ROWS

WIDTH = 4
STEPS = 50  # of diffusion


class Residual(nn.Module):
    """Two convolutions, shifted by the embedding of the timestep between them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(2, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(2, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.shift = nn.Linear(4 * WIDTH, 2 * after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.shift(time)[:, :, None, None].chunk(2, dim=1)
        return self.second(self.first(x) * (1 + scale) + shift) + self.skip(x)


class Attention(nn.Module):
    """Each pixel attends to all pixels of its image."""

    def __init__(self, channels: int, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(2, channels), heads
        self.into, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        qkv = self.into(self.norm(x)).reshape(n, 3, self.heads, c // self.heads, h * w)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.transpose(-1, -2).reshape(n, c, h, w))


class UNet(nn.Module):
    """One level down by a strided convolution, one by pooling; up by nearest and by transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        one, two, four = WIDTH, 2 * WIDTH, 4 * WIDTH
        self.time = nn.Sequential(nn.Linear(WIDTH, four), nn.SiLU(), nn.Linear(four, four))
        self.classes = nn.Embedding(3, four)
        self.into, self.out = nn.Conv2d(3, one, 3, padding=1), nn.Conv2d(one, 3, 3, padding=1)
        self.down = nn.ModuleList([Residual(one, one), Residual(two, two)])
        self.narrow = nn.ModuleList([nn.Conv2d(one, two, 3, stride=2, padding=1), nn.AvgPool2d(2)])
        self.middle = nn.ModuleList([Residual(two, four), Residual(four, two)])
        self.attention = Attention(four)
        self.widen = nn.ModuleList([nn.Upsample(scale_factor=2), nn.ConvTranspose2d(two, one, 2, stride=2)])
        self.up = nn.ModuleList([Residual(four, two), Residual(two, one)])

    def forward(self, x: Tensor, timestep: Tensor, classes: Tensor) -> Tensor:
        time = self.time(embedded(timestep)) + self.classes(classes)
        x, skips = self.into(x), []
        for block, narrow in zip(self.down, self.narrow, strict=True):
            x = block(x, time)
            skips.append(x)
            x = narrow(x)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for block, widen in zip(self.up, self.widen, strict=True):
            x = block(torch.cat([widen(x), skips.pop()], dim=1), time)
        return self.out(F.silu(x))


def embedded(timestep: Tensor) -> Tensor:
    """Sines and cosines of the timestep: (batch,) to (batch, WIDTH)."""
    half = WIDTH // 2
    rates = torch.exp(-math.log(1e4) * torch.arange(half, dtype=torch.float64) / half)
    angles = timestep[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


@dataclass(frozen=True)
class Diffusion(MLP):
    """The noise that was added to images is guessed; steps that matter less weigh less."""

    rows: int = ROWS

    def build(self) -> tuple[Any, ...]:
        model = UNet().double()
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        images, noise = torch.randn(2, self.rows, 3, 8, 8, generator=random, dtype=torch.float64)
        timestep = torch.randint(STEPS, (self.rows,), generator=random)
        return images, noise, timestep, torch.randint(3, (self.rows,), generator=random)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, images: Tensor, noise: Tensor, timestep: Tensor, classes: Tensor) -> Any:
        signal = torch.linspace(0.99, 0.01, STEPS, dtype=torch.float64).cumprod(0)[timestep][:, None, None, None]
        guess = model(signal.sqrt() * images + (1 - signal).sqrt() * noise, timestep, classes)
        loss = (F.mse_loss(guess, noise, reduction="none") * (signal / (1 - signal)).clamp(max=5)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss


def test_a_diffusion_unet(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    for style in in_one_style(request, "fully_shard"):
        assert_trains_in_place(ranks, Diffusion(), style)
