"""Programs of simulated ranks that are compiled once, for many wrong passes to be put into their pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import passes
import spmd
from passes import Pass, Program
from spmd.call.rng import random_state_kept
from spmd.options import Options
from spmd.ranks.differences import rounding_of
from spmd.verification.compared_stages import RankPrograms, after_each, kept, stages_of
from spmd.verification.copies import Subject
from spmd.verification.peer import Peer
from spmd.verification.rank import SimulatedRank
from spmd.verification.tracer import Guilty, Tracer
from spmd.verification.values import Values, by_name
from spmd.verification.verifier import PlainStep
from spmd.verification.world import simulated_world

Edit = Callable[[Program], int]


class Net(nn.Module):
    """A tanh layer, dropped and recomputed in backward where that is asked for, a norm, and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 4)
        self.dropout = dropout

    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.up(x)), self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.dropout else self.hidden(x)
        return self.head(self.norm(hidden))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass(frozen=True)
class Prepared:
    """The programs of all ranks for one call, and what they read."""

    captured: Program
    programs: Sequence[RankPrograms]
    inputs: Sequence[Values]
    options: Options

    def guilty(self, pipeline: Sequence[Pass] | None = None) -> Guilty | None:
        """The stage that is wrong with these passes; None where all are right."""
        programs = list(self.programs)
        if pipeline is not None:
            each = [(program, after_each(program.transformed, pipeline)) for program in programs]
            programs = [RankPrograms(p.partitioned, p.transformed, after, final) for p, (after, final) in each]
        tracer = Tracer(self.captured, [each.transformed for each in programs], self.inputs, rounding_of([]))
        return tracer.first_guilty(stages_of(programs, pipeline or self.options.pipeline, self.options))


@dataclass(frozen=True)
class Mutant(Pass):
    """A wrong pass."""

    edit: Edit
    keeps_order: ClassVar[bool] = True

    def rewrite(self, program: Program) -> int:
        edits = self.edit(program)
        assert edits, "the mutant found nothing to make wrong"
        return edits


def mutated(edit: Edit, after: type[Pass] | None = None) -> list[Pass]:
    """A wrong pass, behind all of the default ones as far as ``after``."""
    pipeline = list(passes.default())
    where = 0 if after is None else 1 + next(k for k, each in enumerate(pipeline) if type(each) is after)
    return [*pipeline[:where], Mutant(edit)]


MODES: dict[str, tuple[dict[str, Any], int, dict[str, int] | None, float]] = {
    "replicate": ({}, 2, None, 0.0),
    "fully_shard": ({"parallel_style": "fully_shard"}, 2, None, 0.0),
    "odd": ({"parallel_style": "fully_shard"}, 3, None, 0.0),
    "zero": ({"shard_optimizer": True}, 2, None, 0.0),
    "dropout": ({}, 2, None, 0.5),
    "tensor": ({"params": {"*.up.*": {"tp": Shard(0)}}}, 4, {"dp": 2, "tp": 2}, 0.0),
    "hybrid": ({"parallel_style": "fully_shard"}, 4, {"replicate": 2, "shard": 2}, 0.0),
}


@cache
def prepared(name: str) -> Prepared:
    """The second call of a step with Adam, which has state by then."""
    mode, world, mesh, dropout = MODES[name]
    return prepare(mode, world, mesh, dropout)


def prepare(
    mode: dict[str, Any],
    world: int = 2,
    mesh: dict[str, int] | None = None,
    dropout: float = 0.0,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    pipeline: Sequence[Pass] | None = None,
) -> Prepared:
    """The second call of a step, in a mode and through a pipeline."""
    torch.manual_seed(0)
    model = Net(dropout).double()
    held = optimizer(model.parameters(), lr=0.1)
    x, y = torch.randn(48, 6, dtype=torch.float64), torch.randint(4, (48,))
    y[:11] = -100  # ranks count unequal numbers of targets
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    held.step()
    held.zero_grad()
    compiled = spmd.compile(train_step, parallel_mode=spmd.DataParallel(**mode), passes=pipeline)
    subject = Subject.of(compiled, (model, held, x, y), {})
    plain = PlainStep.of(subject)
    with random_state_kept(), simulated_world(world, mesh, "cpu") as device_mesh:
        first = SimulatedRank(subject, subject.copied(in_double=False), 0, device_mesh)
        ranks = [first, *(Peer(first, number, kept(plain.state())) for number in range(1, world))]
        given = [rank.prepare() for rank in ranks]
        inputs = [kept(by_name(rank.program, each)) for rank, each in zip(ranks, given, strict=True)]
        return Prepared(first.compiled.captured.program, [rank.programs for rank in ranks], inputs, first.step.options)
