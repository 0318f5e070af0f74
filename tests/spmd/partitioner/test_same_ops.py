"""Ranks have the same ops, whether their parts have several rows, one or none.

No pass may decide by what only one rank sees: a single row is contiguous in any order of its dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from tests.harness.cases import make_optimizer, mlp
from tests.harness.fake import fake_world

pytestmark = pytest.mark.slow

F64 = torch.float64
WORLD = 4


class Attention(nn.Module):
    """Tokens, self-attention, a norm, and a head of as many classes as there are tokens."""

    def __init__(self, tokens: int = 5, width: int = 6) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(tokens, width), nn.LayerNorm(width)
        self.mix, self.head = nn.Linear(width, 3 * width), nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embed(x.long() % 5))
        q, k, v = self.mix(hidden).view(*x.shape, 2, 9).transpose(1, 2).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(mixed.transpose(1, 2).reshape(*x.shape, 6))


class Turned(nn.Module):
    """Dims are swapped, merged and split; elementwise ops between them keep the strides of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x[..., None].expand(*x.shape, 3)).transpose(0, 2).tanh()
        turned = (hidden + hidden.exp()).permute(1, 2, 0).contiguous().relu().mT.reshape(-1, x.shape[1])
        return self.down(F.pad(turned, (0, 3 - x.shape[1])) if x.shape[1] < 3 else turned[:, :3])


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(4, 7, 1, 3),
    "attention": Attention,
    "turned": Turned,
    "images": images,
}
SPLIT = {"*": Shard(0)}
MODES: dict[str, Callable[..., Any]] = {
    "replicate": lambda **options: spmd.DataParallel("replicate", **options),
    "fully_shard": lambda **options: spmd.DataParallel("fully_shard", **options),
    "parameters split": lambda **options: spmd.DTensorExpand(params=SPLIT, **options),
}


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """All ranks have all rows; they compute with a part each, some of them with none."""
    loss = model(spmd.constrain(x, Shard(0))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def ops_of(rank: int, mode: str, model: str, rows: int, optimizer: str) -> list[str]:
    """The ops of the program after all passes."""
    torch.manual_seed(0)
    module = MODELS[model]().to(F64)
    updates = make_optimizer(optimizer, module.parameters())
    with fake_world(WORLD, rank):
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        compiled = spmd.compile(parallel_mode=MODES[mode](mesh=mesh, inputs={"x": {}}))(step)
        compiled(module, updates, torch.randn(rows, 4, dtype=F64))
    return [str(node.target) for node in compiled.program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("model, rows, mode, optimizer", [
    ("mlp", 3, "fully_shard", "SGD momentum"),
    ("attention", 3, "parameters split", "SGD"),
    ("turned", 5, "fully_shard", "SGD"),
    ("images", 5, "replicate", "SGD"),
    pytest.param("mlp", 3, "parameters split", "AdamW", marks=pytest.mark.exhaustive),
    pytest.param("attention", 3, "replicate", "SGD", marks=pytest.mark.exhaustive),
    pytest.param("turned", 5, "replicate", "SGD", marks=pytest.mark.exhaustive),
    pytest.param("images", 5, "parameters split", "SGD", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_ranks_of_two_rows_one_and_none_have_the_same_ops(model: str, rows: int, mode: str, optimizer: str) -> None:
    two_rows, one, none = [ops_of(rank, mode, model, rows, optimizer) for rank in (0, 2, 3)]
    assert two_rows == one == none
