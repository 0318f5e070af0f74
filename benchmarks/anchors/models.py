"""Transformers by their dims, two blocks of each, with the kernels that the frameworks of published runs launch.

Equal blocks are captured once: a plan counts them as often as the model has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import spmd
from spmd.planning.capture import partitioned, sections
from spmd.planning.kernels import Section


@dataclass(frozen=True)
class Dims:
    """Sizes of one model, as ``local_experts`` of its experts are on a rank; ``arch``: gpt, mpt or llama.

    ``flash``: attention is one kernel; else scores are written, normalized, and read again.
    """

    arch: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    experts: int = 0
    top_k: int = 0
    local_experts: int = 0
    flash: bool = True

    @property
    def has_biases(self) -> bool:
        """Whether linear layers and norms have biases."""
        return self.arch == "gpt"

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward network is gated, positions are rotated, and norms are RMSNorm."""
        return self.arch == "llama"

    def norm(self) -> nn.Module:
        """The norm in front of a part of a block."""
        return nn.RMSNorm(self.hidden) if self.is_gated else nn.LayerNorm(self.hidden, bias=self.has_biases)

    def linear(self, inner: int, outer: int) -> nn.Linear:
        """A linear layer of a block."""
        return nn.Linear(inner, outer, bias=self.has_biases)


class Attention(nn.Module):
    """Causal attention with as many keys and values as ``kv_heads``."""

    table: Tensor

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.qkv = dims.linear(dims.hidden, (dims.heads + 2 * dims.kv_heads) * dims.head_dim)
        self.out = dims.linear(dims.heads * dims.head_dim, dims.hidden)
        self.register_buffer("table", torch.ones(dims.context, dims.head_dim // 2))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (rows, tokens, hidden)."""
        dims = self.dims
        shared = dims.heads // dims.kv_heads  # queries of a key
        grouped = self.qkv(x).unflatten(-1, (-1, shared + 2, dims.head_dim)).transpose(1, 2)
        q, k, v = grouped[:, :, :, :shared], grouped[:, :, :, shared], grouped[:, :, :, shared + 1]
        q = q.transpose(2, 3).flatten(1, 2)
        if dims.is_gated:
            q, k = (self._rotated(each) for each in (q, k))
        if shared > 1:
            k, v = (each.repeat_interleave(shared, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if dims.flash else self._attended(q, k, v)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _rotated(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        table = self.table[: x.shape[2]]
        return torch.cat([one * table - other * table, other * table + one * table], -1)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3)) * self.dims.head_dim**-0.5
        scores = scores.masked_fill(self.table[:1, :1] == 0, -1e4).softmax(-1)  # as long as a mask of all keys takes
        return (scores * scores) @ v  # the product takes as long as the dropout that is there


class MLP(nn.Module):
    """The feed-forward network."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.up, self.down = dims.linear(dims.hidden, dims.ffn), dims.linear(dims.ffn, dims.hidden)
        self.gate = dims.linear(dims.hidden, dims.ffn) if dims.is_gated else None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (rows, tokens, hidden)."""
        wide = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(wide)
        return out


class Experts(nn.Module):
    """A rank's experts with an equal share of the tokens each; the exchange of tokens is the plan's."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims, count = dims, dims.local_experts
        self.router = nn.Linear(dims.hidden, dims.experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(count, dims.hidden, dims.ffn)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(count, dims.ffn, dims.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (rows, tokens, hidden)."""
        dims = self.dims
        weights = self.router(x).softmax(-1)[..., : dims.top_k].unsqueeze(-1)
        sent = x.unsqueeze(2) * torch.ones_like(weights)
        grouped = sent.reshape(sent.shape[0], dims.local_experts, -1, dims.hidden).transpose(0, 1).flatten(1, 2)
        made = (F.silu(grouped @ self.gate) * (grouped @ self.up)) @ self.down
        back = made.unflatten(1, (x.shape[0], -1)).transpose(0, 1).reshape(sent.shape)
        return (back * weights).sum(2)


class Block(nn.Module):
    """Attention, then a feed-forward network or experts, each after a norm."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.norm1, self.attention = dims.norm(), Attention(dims)
        self.norm2, self.mlp = dims.norm(), Experts(dims) if dims.experts else MLP(dims)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (rows, tokens, hidden)."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Model(nn.Module):
    """Tokens in, scores out, by two blocks."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.tokens = nn.Embedding(dims.vocab, dims.hidden)
        self.positions = None if dims.is_gated else nn.Embedding(dims.context, dims.hidden)
        self.blocks = nn.ModuleList(Block(dims) for _ in range(2))
        self.norm, self.head = dims.norm(), nn.Linear(dims.hidden, dims.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: (rows, tokens)."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def train_step(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    """Forward and backward of one micro-batch; a plan adds the update by the bytes of state."""
    loss = F.cross_entropy(model(text).flatten(0, 1).float(), following.flatten())
    loss.backward()
    return loss


def placements(dims: Dims) -> dict[str, Any]:
    """Megatron's: columns of what widens, rows of what narrows, and the vocabulary."""
    wide = ["*.qkv", "*.tokens", "*.head", *([] if dims.experts else ["*.up"])]
    wide += ["*.gate"] if dims.is_gated and not dims.experts else []
    narrow = ["*.out", *([] if dims.experts else ["*.down"])]
    named = {f"{name}.weight": {"tp": Shard(0)} for name in wide} | {f"{n}.weight": {"tp": Shard(1)} for n in narrow}
    biases = ["*.qkv", "*.up"] if dims.has_biases else []
    return named | {f"{name}.bias": {"tp": Shard(0)} for name in biases}


@cache
def workload(dims: Dims, tensor: int, tokens: int, layers: int) -> tuple[list[Section], list[Section]]:
    """The sections of a model on ``tensor`` ranks with so many tokens in a row: op by op, and with fused islands."""
    plain, fused = _two(dims, tensor, tokens)
    return [_counted(each, dims, layers) for each in plain], [_counted(each, dims, layers) for each in fused]


def _counted(section: Section, dims: Dims, layers: int) -> Section:
    if section.count == 1:
        return section
    return replace(section, count=layers, expert_parameters=3.0 * dims.local_experts * dims.hidden * dims.ffn)


@cache
def _two(dims: Dims, tensor: int, tokens: int) -> tuple[list[Section], list[Section]]:
    """The same with two blocks."""
    with torch.device("meta"):
        model = Model(dims).bfloat16()
    text = torch.empty(1, tokens, dtype=torch.long)
    named = placements(dims) if tensor > 1 else None

    def mode(mesh: DeviceMesh) -> spmd.DataParallel:
        return spmd.DataParallel("replicate", mesh=mesh, params=named)

    local = partitioned(spmd.compile(train_step), mode, (model, text, text), {}, {"dp": 2, "tp": tensor})
    return sections(local, fused=False), sections(local, fused=True)
