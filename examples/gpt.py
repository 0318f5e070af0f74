"""A small GPT over bytes: pre-norm blocks of causal attention and an MLP, plain ``torch.nn``, nothing about ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a model."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128  # the longest sequence
    vocabulary: int = 256  # a byte is a token
    tied: bool = False  # read bytes and write bytes with one matrix

    def __post_init__(self) -> None:
        """Raise ``ValueError`` where the sizes do not fit."""
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} does not divide into {self.heads} heads")


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        # Heads first, then q, k and v of each: consecutive rows of the weight belong to one head, so that a rank with
        # a part of the rows has whole heads.
        qkv = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).transpose(1, 3)
        y = F.scaled_dot_product_attention(*qkv.unbind(1), is_causal=True)  # (batch, heads, time, width / heads)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers and a GELU, for each position alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP, each with a norm and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm2, self.mlp = nn.LayerNorm(config.width), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes (batch, time) in, a score for each possible next byte (batch, time, vocabulary) out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.initialize()
        if config.tied:
            self.head.weight = self.bytes.weight

    def initialize(self) -> None:
        """Small weights as in GPT-2; what is added to the residual stream shrinks with the number of additions."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.layers) if into_residual else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int, generator: torch.Generator, temperature: float = 0.8) -> bytes:
        """Continue ``prompt`` by ``count`` bytes, one at a time."""
        device = self.head.weight.device
        text = torch.tensor([list(prompt)], device=device)
        for _ in range(count):
            scores = self(text[:, -self.config.context :])[0, -1].float() / temperature
            drawn = torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator)
            text = torch.cat([text, drawn[None].to(device)], dim=1)
        return bytes(text[0].tolist())
