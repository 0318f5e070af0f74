"""LoRA on real models: blocks annotated with ``fully_shard``, a bf16 policy, a frozen base that is ignored, in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import spmd
from tests.harness.pool import Ranks

from .catalog import ENTRIES
from .zoo import Entry

TEN = ("GPT2", "Llama", "Qwen3", "Mistral", "Gemma2", "Bert", "Roberta", "T5", "OPT", "ModernBert")
USUAL = ("GPT2",)
STEPS = 4


class Adapter(nn.Module):
    """A linear layer that stays as it is, plus a product of two narrow matrices that are trained (LoRA)."""

    def __init__(self, base: nn.Module, rank: int = 3) -> None:
        super().__init__()
        inputs, outputs = (base.nx, base.nf) if hasattr(base, "nf") else (base.in_features, base.out_features)
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)  # type: ignore[arg-type,operator]
        self.up = nn.Parameter(torch.randn(outputs, rank) / 10)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()  # type: ignore[no-any-return]


def adapted(entry: Entry, policy: spmd.MixedPrecisionPolicy) -> nn.Module:
    """The model with an adapter around each linear layer of its blocks, and its annotations."""
    model = entry.build().float().to(torch.bfloat16).requires_grad_(False)
    base = list(model.parameters())
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    blocks = [block for each in lists for block in each if any(True for _ in block.parameters())]
    for block in blocks:
        for module in [*block.modules()]:
            for name, child in [*module.named_children()]:
                is_linear = isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"
                if is_linear and name != "wo":  # T5 looks at the weight of that one
                    setattr(module, name, Adapter(child))
    for block in blocks:
        spmd.fully_shard(block, mp_policy=policy, ignored_params=base)
    return spmd.fully_shard(model, mp_policy=policy, ignored_params=base)


def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss.float()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass
class Seen:
    """The losses, what the adapters were and became, and what communicated in which dtype."""

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    base: set[tuple[Any, bool]]
    traffic: set[tuple[str, str, str]]


def batch_of(entry: Entry, rank: int, k: int) -> dict[str, Tensor]:
    batch = entry.batch(torch.Generator().manual_seed(100 * k + rank))
    return {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in batch.items()}


def train(rank: int, world: int, name: str, parts: int) -> Seen:
    """Train on this rank's part; a single rank on those of ``parts`` ranks put together."""
    entry = next(entry for entry in ENTRIES if entry.name == name)
    torch.manual_seed(0)
    model = adapted(entry, spmd.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    before, compiled, losses = values(model), spmd.compile(step), []
    for k in range(STEPS):
        mine = range(parts) if world == 1 else [rank]
        drawn = [batch_of(entry, each, k) for each in mine]
        losses.append(float(compiled(model, optimizer, {key: torch.cat([x[key] for x in drawn]) for key in drawn[0]})))
    base = {(p.dtype, isinstance(p, DTensor)) for p in model.parameters() if not p.requires_grad}
    traffic = {(t.kind, t.role, t.dtype) for t in compiled.report().traffic if t.role in ("parameter", "gradient")}
    return Seen(losses, before, values(model), base, traffic)


def values(model: nn.Module) -> dict[str, Tensor]:
    trained = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in trained}


def norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", TEN if metafunc.config.getoption("exhaustive") else USUAL)


def test_adapters_train_as_on_one_process(ranks: Ranks, name: str) -> None:
    """Rounding is that of bf16: 3% of the updates at most, in OPT. A gradient of one rank alone is off by half."""
    (alone,), together = ranks.run(1, train, name, 2), ranks.run(2, train, name, 2)
    for seen in together:
        assert seen.base == {(torch.bfloat16, False)}
        assert seen.traffic == {
            ("all_gather", "parameter", "bfloat16"), ("reduce_scatter", "gradient", "float32"),
        }  # fmt: skip
        torch.testing.assert_close(torch.tensor(seen.losses), torch.tensor(alone.losses), rtol=2**-6, atol=0)
        updates = {key: alone.after[key] - start for key, start in alone.before.items()}
        errors = [seen.after[key] - value for key, value in alone.after.items()]
        assert all(torch.equal(seen.before[key], value) for key, value in alone.before.items())
        assert all(update.abs().max() > 0 for update in updates.values())
        assert norm(errors) < 2**-4 * norm(list(updates.values()))
