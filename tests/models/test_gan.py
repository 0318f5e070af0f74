"""A GAN: two convolutional networks with batch norms, two optimizers, and a loss for each in one step."""

from __future__ import annotations

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

LATENT = 6


def generator() -> nn.Sequential:
    """(batch, LATENT, 1, 1) to images of (batch, 3, 8, 8)."""
    return nn.Sequential(
        *(nn.ConvTranspose2d(LATENT, 8, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1), nn.Tanh()),
    )


def discriminator() -> nn.Sequential:
    """Images to a score each."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(4, 8, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2)),
        *(nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 1, 2)), nn.Flatten()),
    )


@dataclass(frozen=True)
class Game(MLP):
    """The discriminator learns from real and made images, then the generator from its scores for the made ones."""

    rows: int = ROWS

    def build(self) -> tuple[Any, ...]:
        nets = nn.ModuleDict({"made": generator(), "seen": discriminator()}).double()
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=1e-2) for name, net in nets.items()}
        return nets, optimizers

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        images = torch.randn(self.rows, 3, 8, 8, generator=random, dtype=torch.float64)
        return images, torch.randn(self.rows, LATENT, 1, 1, generator=random, dtype=torch.float64)

    @staticmethod
    def step(nets: nn.ModuleDict, optimizers: dict[str, Any], real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        made = nets["made"](noise)
        optimizers["seen"].zero_grad()
        scores = nets["seen"](real), nets["seen"](made.detach())
        seen_loss = F.binary_cross_entropy_with_logits(scores[0], torch.ones_like(scores[0]))
        seen_loss = seen_loss + F.binary_cross_entropy_with_logits(scores[1], torch.zeros_like(scores[1]))
        seen_loss.backward()
        optimizers["seen"].step()
        optimizers["made"].zero_grad()
        scores_after = nets["seen"](made)
        made_loss = F.binary_cross_entropy_with_logits(scores_after, torch.ones_like(scores_after))
        made_loss.backward()
        optimizers["made"].step()
        return {"seen": seen_loss, "made": made_loss}


def test_a_gan(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    for style in in_one_style(request, "replicate"):
        assert_trains_in_place(ranks, Game(), style)
