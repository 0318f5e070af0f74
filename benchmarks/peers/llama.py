"""A model as Llama: RMSNorm, rotary embeddings and SwiGLU, which leave much to compute between matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import Config


class RMSNorm(nn.Module):
    """Divide by the root of the mean square, and scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """``x``, normed along its last dim."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Causal self-attention, of queries and keys that are rotated by their positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.out = (nn.Linear(config.width, config.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` is (batch, time, width)."""
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    """Attention and a gated MLP, each with a norm and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, hidden = config.width, config.width * 8 // 3 // 16 * 16
        self.norm1, self.attention, self.norm2 = RMSNorm(width), Attention(config), RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` is (batch, time, width)."""
        x = x + self.attention(self.norm1(x), cos, sin)
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Bytes (batch, time) in, a score for each possible next byte (batch, time, vocabulary) out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        size = config.width // config.heads
        rates = 10_000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(config.context), rates).repeat(1, 2)  # (time, size of a head)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = self.bytes(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))
