"""Layers of torch.nn beyond the linear one, many to a model: sequences, tokens and images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.cases import MLP
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

LENGTH = 2  # of sequences: recurrent layers are unrolled


class Sequences(nn.Module):
    """Recurrent layers, attention with both kinds of mask, encoder and decoder layers, three kinds of embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 6, padding_idx=0)
        self.rare = nn.Embedding(5, 6, scale_grad_by_freq=True)
        self.bags = nn.ModuleList(nn.EmbeddingBag(5, 6, mode=mode) for mode in ("mean", "sum"))
        self.lstm, self.cell = nn.LSTM(6, 3, batch_first=True, bidirectional=True), nn.GRUCell(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, 12, dropout=0.0, batch_first=True), 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        causal = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
        x = self.tokens(tokens) + self.rare(tokens) + sum(bag(tokens) for bag in self.bags)[:, None]
        x = self.lstm(x)[0] + self.cell(x[:, 0])[:, None]
        padding = (tokens == 0) & (torch.arange(LENGTH) > 0)
        attended, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=causal)
        encoded = self.encoder(attended, src_mask=causal, is_causal=True)
        return self.decoder(x, encoded, tgt_mask=causal), weights


@dataclass(frozen=True)
class SequenceCase(MLP):
    rows: int = 4

    def build(self) -> tuple[Any, ...]:
        model = Sequences().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        tokens = torch.randint(5, (self.rows, LENGTH), generator=random)
        return tokens, torch.randn(self.rows, LENGTH, 6, generator=random, dtype=torch.float64)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        out, weights = model(x)
        loss = F.mse_loss(out, y) + weights.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Images(nn.Module):
    """Convolutions, norms, pools, and layers that move pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())
        self.up = nn.Sequential(nn.ConvTranspose2d(4, 4, 2, stride=2), nn.GroupNorm(2, 4), nn.PReLU(), nn.MaxPool2d(2))
        self.far = nn.Conv2d(4, 4, 3, dilation=2, padding="same", padding_mode="reflect", groups=2)
        self.line = nn.Sequential(nn.Conv1d(4, 4, 5, stride=2), nn.BatchNorm1d(4))
        self.bilinear = nn.Bilinear(6, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.far(self.up(self.into(x)))
        grid = F.affine_grid(0.8 * torch.eye(2, 3, dtype=h.dtype).expand(len(h), 2, 3), h.shape, align_corners=False)
        moved = F.grid_sample(h, grid, align_corners=False)
        scaled = F.interpolate(F.interpolate(moved, scale_factor=2, mode="bilinear"), size=6)
        pooled = F.adaptive_avg_pool2d(F.pad(scaled, (1, 1, 1, 1), mode="circular"), 3) + F.avg_pool2d(scaled, 2)
        patches = F.fold(F.unfold(scaled, 2, stride=2), (6, 6), 2, stride=2) + F.pixel_unshuffle(
            F.pixel_shuffle(scaled, 2), 2
        )
        line = torch.tanh(self.line(patches.flatten(2))[:, 0, :6])
        return self.bilinear(line, line.flip(1)) + F.instance_norm(pooled).square().mean((1, 2, 3))[:, None]


@dataclass(frozen=True)
class ImageCase(MLP):
    rows: int = 3

    def build(self) -> tuple[Any, ...]:
        model = Images().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        shapes = ((self.rows, 3, 6, 6), (self.rows, 2))
        return tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)


@dataclass(frozen=True)
class Evaluation(SequenceCase):
    """The layers' own fast paths for evaluation."""

    def build(self) -> tuple[Any, ...]:
        layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        return (nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval(),)

    @staticmethod
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        with torch.no_grad():
            return model(y), F.mse_loss(model(y), y)


@dataclass(frozen=True)
class OtherLayouts(MLP):
    """Gradients whose strides differ between kernels and torch's fakes, flattened next."""

    def build(self) -> tuple[Any, ...]:
        model = nn.Linear(6, 4).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        x = torch.randn(3, 5, 6, generator=random, dtype=torch.float64)
        return x, torch.randn(3, 4, 5, generator=random, dtype=torch.float64)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = x.new_zeros(())
        for function in (F.softplus, F.elu, F.hardtanh, F.hardswish, F.hardsigmoid):
            hidden = model(x.flatten(0, 1)).view(-1, 5, 4)
            loss = loss + (function(hidden).transpose(1, 2) * y).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


CASES: list[tuple[Case, str, int]] = [
    (SequenceCase(), "fully_shard", 2),
    (ImageCase(), "fully_shard", 2),
    (Evaluation(), "replicate", 2),
    (OtherLayouts(), "replicate", 2),
]


@pytest.mark.parametrize("case, style, world", CASES, ids=[type(case).__name__ for case, _, _ in CASES])
def test_layers_train_as_in_the_plain_step(ranks: Ranks, case: Case, style: str, world: int) -> None:
    assert_agrees(ranks, world, case, style)
