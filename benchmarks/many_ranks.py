"""The estimated step of a Llama-like model on hundreds of H100s, compiled here on fake ranks; nothing of it runs.

    python -m benchmarks.many_ranks [--ranks 512] [--layers 32] [--width 4096] [--tokens 8192]
    python -m benchmarks.many_ranks --ranks 1024 --width 1024 --experts 64 [--form sorted]

One GPU's share of a ``fully_shard`` step is compiled by the published figures of an H100 and of what connects eight of
them in a host and the hosts. What is printed follows from those figures: no GPU was measured. The parameters are never
written to, so that 8 billion of them take address space and no memory.

With ``--experts`` the same net is compiled a second time, in which a mixture of so many takes the place of each feed
forward network, split over groups of 8 ranks.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

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


class Feed(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, width * 7 // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(width * 7 // 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (rows, tokens, width)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention, then a gated feed-forward network of 3.5 times the width, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width)
        self.feed: nn.Module = Feed(width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (rows, tokens, width)."""
        x = x + self.attention(self.before_attention(x))
        out: Tensor = x + self.feed(self.before_feed(x))
        return out


class Mixture(nn.Module):
    """Two of many experts for each token: by rows that are sorted by expert, or by places in each row of the batch."""

    def __init__(self, width: int, experts: int, form: str) -> None:
        super().__init__()
        self.form, self.router = form, nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, width))
        self.down = nn.Parameter(torch.empty(experts, width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (rows, tokens, width)."""
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return self.by_place(x, weights, chosen) if self.form == "capacity" else self.sorted(x, weights, chosen)

    def sorted(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Grouped products of rows."""
        flat, (experts, order) = x.flatten(0, 1), chosen.flatten().sort()
        ends = experts.bincount(minlength=len(self.up)).cumsum(0).int()
        hidden = F.silu(torch._grouped_mm(flat[order // 2], self.up, offs=ends))
        out = torch._grouped_mm(hidden, self.down, offs=ends) * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, order // 2, out).view_as(x)

    def by_place(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Products with ones: each expert has places for twice its share of the tokens of each row."""
        experts, capacity = len(self.up), max(4 * x.shape[1] // len(self.up), 1)
        hot = F.one_hot(chosen, experts).sum(2)
        place = F.one_hot((hot.cumsum(1) - 1).clamp(0, capacity - 1), capacity) * hot.unsqueeze(-1)
        sent = place.to(x.dtype)  # (rows, tokens, experts, places)
        hidden = F.silu(torch.einsum("ebcd,edf->ebcf", torch.einsum("btec,btd->ebcd", sent, x), self.up))
        back = torch.einsum("btec,ebcd->btd", sent, torch.einsum("ebcf,efd->ebcd", hidden, self.down))
        return back * weights.sum(-1, keepdim=True)


def llama(layers: int, width: int, experts: int = 0, form: str = "sorted") -> nn.Module:
    """The model in bfloat16; its parameters are not initialized."""
    with torch.device("meta"):
        blocks = [Block(width) for _ in range(layers)]
        for block in blocks if experts else ():
            block.feed = Mixture(width, experts, form)
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


EXPERTS: dict[str, Any] = {"axes": {"batch": ("dp", "ep"), "experts": "ep"}}
GROUP = 8  # ranks that have all experts


def main() -> None:
    """Compile one step, or that of a mixture, too, and print the estimates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 512), ("layers", 32), ("width", 4096), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, default=0, help="of a mixture that is compiled beside it")
    parser.add_argument("--form", choices=("sorted", "capacity"), default="sorted", help="of the mixture")
    options = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
    seconds = compiled(options, "", init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp",)))
    if options.experts:
        shape = (options.ranks // GROUP, GROUP)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        ratio = compiled(options, f" of {options.experts} experts, {options.form}", mesh, **EXPERTS) / seconds
        print(f"compiling the mixture took {ratio:.2f} times the seconds of the processor")
    dist.destroy_process_group()


def compiled(options: argparse.Namespace, kind: str, mesh: DeviceMesh, **roles: Any) -> float:
    """Compile one step, and print its estimate; returns the seconds of the processor that this takes."""
    names = mesh.mesh_dim_names or ()
    axes = [passes.Axis(name, size, str(k)) for k, (name, size) in enumerate(zip(names, mesh.shape, strict=True))]
    table = passes.published("H100", passes.Mesh(tuple(axes)))
    mode = spmd.DataParallel("fully_shard", mesh=mesh, **roles)
    step = spmd.compile(parallel_mode=mode, passes=passes.default(table=table), cache="off")(train_step)
    model = llama(options.layers, options.width, options.experts if kind else 0, options.form)
    text = torch.zeros(1, options.tokens, dtype=torch.long)
    start = time.process_time()
    given = step.runner.read((model, torch.optim.AdamW(model.parameters(), foreach=True), text, text), {})
    program = step.runner.prepare(given).compiled.program
    seconds = time.process_time() - start
    found = passes.estimate(program, table, with_memory=False)
    assert found is not None
    print(f"{options.layers} layers{kind} of width {options.width}, {options.tokens} tokens a rank, ", end="")
    print(f"{options.ranks} H100s:")
    print(f"compiled in {seconds:.0f} s of the processor, {len(found.transfers)} collectives")
    print(f"estimated step {found.seconds * 1e3:.0f} ms, of which {found.exposed * 1e3:.1f} ms", end=" ")
    print(f"({found.exposed / found.seconds:.1%}) are exposed communication")
    return seconds


if __name__ == "__main__":
    main()
