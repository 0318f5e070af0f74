"""The estimated step of a Llama-like model on hundreds of H100s, compiled here on fake ranks; nothing of it runs.

    python -m benchmarks.many_ranks [--ranks 512] [--layers 32] [--width 4096] [--tokens 8192]

One GPU's share of a ``fully_shard`` step is compiled by the published figures of an H100 and of what connects eight of
them in a host and the hosts. What is printed follows from those figures: no GPU was measured. The parameters are never
written to, so that 8 billion of them take address space and no memory.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import passes
import spmd

VOCABULARY, HEAD = 32_000, 128  # tokens; features of an attention head


class Attention(nn.Module):
    """Grouped-query attention: a key and a value for four queries."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (rows, tokens, width)."""
        split = [each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        query, key, value = split[0], *(each.repeat_interleave(4, 1) for each in split[1:])
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a gated feed-forward network of 3.5 times the width, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width)
        self.gate, self.up = (nn.Linear(width, width * 7 // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(width * 7 // 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (rows, tokens, width)."""
        x = x + self.attention(self.before_attention(x))
        normed = self.before_feed(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


def llama(layers: int, width: int) -> nn.Module:
    """The model in bfloat16; its parameters are not initialized."""
    with torch.device("meta"):
        blocks = (Block(width) for _ in range(layers))
        head = nn.Linear(width, VOCABULARY, bias=False)
        model = nn.Sequential(nn.Embedding(VOCABULARY, width), nn.Sequential(*blocks), nn.RMSNorm(width), head)
    return model.bfloat16().to_empty(device="cpu")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, following: Tensor) -> Tensor:
    """``text``, ``following``: (rows, tokens)."""
    loss = F.cross_entropy(model(text).flatten(0, 1).float(), following.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def main() -> None:
    """Compile one step, and print its estimate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 512), ("layers", 32), ("width", 4096), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=options.ranks, store=dist.HashStore())
    table = passes.published("H100", passes.Mesh((passes.Axis("dp", options.ranks, "0"),)))
    step = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"), passes=passes.default(table=table))(train_step)
    model = llama(options.layers, options.width)
    text = torch.zeros(1, options.tokens, dtype=torch.long)
    start = time.perf_counter()
    given = step.read((model, torch.optim.AdamW(model.parameters(), foreach=True), text, text), {})
    program = step.prepare(given).compiled.program
    seconds = time.perf_counter() - start
    found = passes.estimate(program, table, with_memory=False)
    assert found is not None
    print(f"{options.layers} layers of width {options.width}, {options.tokens} tokens a rank, {options.ranks} H100s:")
    print(f"compiled in {seconds:.0f} s, {len(found.transfers)} collectives")
    print(f"estimated step {found.seconds * 1e3:.0f} ms, of which {found.exposed * 1e3:.1f} ms", end=" ")
    print(f"({found.exposed / found.seconds:.1%}) are exposed communication")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
