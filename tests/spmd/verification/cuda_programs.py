"""Final programs of simulated ranks for CUDA, with inputs on the CPU: what streams and events are tried on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import passes
import spmd
from passes import Program
from passes.memory.recomputable import Recomputable
from passes.schedule.streams import StreamProgram, assign_streams
from spmd.call.rng import random_state_kept
from spmd.ranks.simulated import Simulated, standing_for
from spmd.verification.compared_stages import inputs_for, kept
from spmd.verification.copies import Subject
from spmd.verification.peer import mesh_of
from spmd.verification.rank import SimulatedRank
from spmd.verification.values import Values, by_name
from spmd.verification.wholes import part_of
from spmd.verification.world import simulated_world
from tests.harness.on_cuda import OnCuda

WORLD = 2


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


OFFLOAD = spmd.OffloadPolicy()
MODES: dict[str, dict[str, Any]] = {
    "replicate": {},
    "fully_shard": {"parallel_style": "fully_shard", "reshard_after_forward": True},
    "offload": {"parallel_style": "fully_shard", "offload_policy": OFFLOAD},
    "offload replicated": {"offload_policy": OFFLOAD},
    "sharded optimizer": {"shard_optimizer": True},
    "offloaded activations": {"parallel_style": "fully_shard"},
}  # fmt: skip


@dataclass(frozen=True)
class OnRanks:
    """The final program of each rank, and what it reads."""

    programs: Sequence[Program]
    streams: Sequence[StreamProgram]
    values: Sequence[Values]

    def inputs(self) -> list[list[Any]]:
        """Fresh inputs of each rank."""
        return [inputs_for(program, values) for program, values in zip(self.programs, self.values, strict=True)]


@cache
def captured() -> tuple[Program, Values]:
    """The program of a step with SGD and momentum before it is partitioned, and all of what it reads."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
    subject = Subject.of(spmd.compile(train_step, passes=()), (model, optimizer, x, y), {})
    with random_state_kept(), simulated_world(WORLD, None, "cpu") as device_mesh:
        rank = SimulatedRank(subject, subject.copied(in_double=False), 0, device_mesh)
        given = rank.prepare()
        values = kept(by_name(rank.program, given))
    return rank.compiled.captured.program, values | {"x": x, "y": y}


@cache
def for_cuda(name: str) -> OnRanks:
    """The programs of a mode, with buckets as small as they get."""
    program, wholes = captured()
    with random_state_kept(), simulated_world(WORLD, None, "cpu") as device_mesh:
        mode = OnCuda(**MODES[name], mesh=device_mesh)
        local = [_partitioned(mode, program, rank) for rank in range(WORLD)]
        final = [passes.run(each, _pipeline(name, each)) for each in local]
    values = [_parts(each, wholes) for each in local]
    return OnRanks(final, [assign_streams(each) for each in final], values)


def _pipeline(name: str, program: Program) -> tuple[passes.Pass, ...]:
    """The default passes; also one that lets all that forward keeps wait in host memory."""
    pipeline = passes.default(bucket_bytes=1)
    if name != "offloaded activations":
        return pipeline
    place = next(k for k, each in enumerate(pipeline) if isinstance(each, passes.FormUnits))
    kept = Recomputable(passes.run(program, pipeline[:place])).kept
    return (*pipeline[:place], passes.Recompute(offloaded=tuple(op.name for op in kept)), *pipeline[place:])


def _partitioned(mode: OnCuda, program: Program, rank: int) -> Program:
    """The program of one rank of a mesh whose ranks are on hosts of their own, with NCCL."""
    axes = tuple(replace(axis, backend="nccl", shared=False, gathers="gathers of dp") for axis in program.mesh.axes)
    with standing_for(Simulated(rank, "nccl", shared=False)):
        return mode.partition(replace(program, mesh=mesh_of(replace(program.mesh, axes=axes), (rank,))))


def _parts(program: Program, wholes: Values) -> Values:
    """What one rank has of all inputs."""
    return {
        each.name: part_of(value, each.placement, program.mesh).clone() if isinstance(value, Tensor) else value
        for each in program.inputs
        for value in [wholes[each.name]]
    }
