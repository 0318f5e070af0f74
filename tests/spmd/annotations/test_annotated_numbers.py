"""Annotated models compute what the plain step computes on one process with the whole batch: strategy x nesting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from tests.harness.cases import make_optimizer
from tests.harness.oracle import Case, all_unequal, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks


class Net(nn.Module):
    """An embedding tied to the head, a batch norm and two blocks, of sizes that two, three and four do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.norm = nn.BatchNorm1d(7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(2))
        self.head = nn.Linear(7, 11)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)  # type: ignore[no-any-return]


def per_block(model: Net, **options: Any) -> None:
    for module in (*model.blocks, model):
        spmd.fully_shard(module, **options)


def hybrid(model: Net) -> None:
    per_block(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))


def replicate_inside(model: Net) -> None:
    spmd.fully_shard(model)
    spmd.replicate([model.blocks[0], model.norm])
    spmd.fully_shard(model.blocks[0][2])


def shard_inside(model: Net) -> None:
    spmd.replicate(model)
    spmd.fully_shard([*model.blocks])
    spmd.replicate(model.blocks[1][0])


def last_dim(model: Net) -> None:
    per_block(model, shard_placement_fn=lambda p: Shard(p.ndim - 1), reshard_after_forward=True)


def head_first(model: Net) -> None:
    """The tied weight belongs to the head, and the embedding is gathered in a unit of its own bias only."""
    spmd.fully_shard(model.head)
    spmd.fully_shard(model.embed)
    per_block(model, reshard_after_forward=False)


def parts(model: Net) -> None:
    spmd.fully_shard(model.blocks[1])


STRATEGIES: dict[str, Callable[[Net], None]] = {
    "root resharded not": per_block,
    "all resharded": lambda model: per_block(model, reshard_after_forward=True),
    "kept by two": lambda model: per_block(model, reshard_after_forward=2),
    "none resharded": lambda model: per_block(model, reshard_after_forward=False),
    "one unit": spmd.fully_shard,  # type: ignore[dict-item]
    "replicate": spmd.replicate,  # type: ignore[dict-item]
    "hybrid": hybrid,
    "replicate inside": replicate_inside,
    "shard inside": shard_inside,
    "last dim": last_dim,
    "shared": head_first,
    "parts": parts,
}


@dataclass(frozen=True)
class Annotated(Case):
    """Labels for tokens, with a mean loss."""

    strategy: str = "one unit"
    optimizer: str = "SGD"

    def build(self) -> tuple[Any, ...]:
        """The annotated model and its optimizer; on one process annotations have no effect."""
        model = Net().double()
        if torch.distributed.is_initialized() or self.strategy != "hybrid":
            STRATEGIES[self.strategy](model)
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """Tokens and labels, (6,) each."""
        random = random_generator(rank, step)
        return tuple(torch.randint(0, 11, (6,), generator=random) for _ in range(2))

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, update."""
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def differences(rank: int, world: int, case: Annotated) -> list[str]:
    """The plain step has annotations that make no groups: gloo lost a connection of some, on a busy machine."""
    _, got = compiled_run(rank, case, 5)
    return all_unequal(plain_run(replace(case, strategy="one unit"), world, 5), got, rank, world)


ROWS = [
    (strategy, optimizer, 4 if strategy in ("hybrid", "kept by two") else world)
    for strategy in STRATEGIES
    for optimizer, world in (("SGD", 2), ("AdamW", 2), ("SGD momentum", 3), ("Adam", 3))
]
HELD = ("all resharded", "one unit")  # by "last dim", and by the other strategies whose root is one unit
IN_TURN = [ROWS[4 * k + (k == 0)] for k, strategy in enumerate(STRATEGIES) if strategy not in HELD]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Optimizers and worlds take turns; ``--exhaustive`` runs all combinations."""
    if "strategy" in metafunc.fixturenames:
        rows = ROWS if metafunc.config.getoption("--exhaustive") else IN_TURN
        metafunc.parametrize("strategy, optimizer, world", rows)


def test_numbers_are_those_of_the_plain_step(ranks: Ranks, strategy: str, optimizer: str, world: int) -> None:
    assert ranks.run(world, differences, Annotated(strategy, optimizer)) == [[]] * world


def ignored_state(rank: int, world: int) -> list[float]:
    """Ignored state that differs between the ranks, after a step."""
    torch.manual_seed(0)
    model = Net().double()
    model.norm.requires_grad_(False)
    model.eval()
    with torch.no_grad():
        model.norm.weight.fill_(float(rank))
        model.norm.running_mean.fill_(float(rank))
        model.head.bias.fill_(float(rank))
    mode = spmd.DataParallel("fully_shard", ignored_modules=[model.norm])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    spmd.compile(Annotated.step, parallel_mode=mode)(model, optimizer, *Annotated().part(rank, 0))
    seen = (model.norm.weight, model.norm.running_mean, model.head.bias.full_tensor())  # type: ignore[operator]
    return [float(tensor.detach().mean()) for tensor in seen]


def test_what_is_ignored_is_not_made_equal(ranks: Ranks) -> None:
    assert ranks.run(2, ignored_state) == [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
