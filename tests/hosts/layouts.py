"""Trainings on two hosts: the mesh of each, the options of its mode, and what it trains.

The ranks of the first host are the first half of all: an axis that is the first of two crosses from host to host, and
the second stays inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import spmd
from tests.harness import experts
from tests.harness.cases import MLP
from tests.harness.oracle import Case, Snapshot, all_unequal, snapshot
from tests.spmd.modes import test_sequence

CALLS = 4
SMALL = MLP(sizes=(6, 8, 4), rows=8, optimizer="SGD momentum")
BY_ADAMW = MLP(sizes=(6, 9, 5), rows=8, optimizer="AdamW")  # the sizes of the last layer divide by no number of ranks


@dataclass(frozen=True)
class Tokens(Case):
    """A transformer whose sequences are split; all ranks pass them whole."""

    def build(self) -> tuple[Any, ...]:
        """The model and SGD with momentum."""
        return test_sequence.arguments(8, 4, rows=2)[:2]

    def part(self, rank: int, step: int) -> tuple[Tensor]:
        """Numbers of tokens, (2, 8)."""
        return (torch.randint(13, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank)),)

    step = staticmethod(test_sequence.train)


@dataclass(frozen=True)
class Layout:
    """A mesh, the mode's other options, and the training. ``batch``: the axes along which each rank has rows."""

    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    case: Case = SMALL
    batch: tuple[str, ...] = ("dp",)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())

    def mode(self) -> spmd.DataParallel:
        """The mode, on this rank."""
        mesh = init_device_mesh("cpu", tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh))
        return spmd.DataParallel(mesh=mesh, **self.options)

    def part_of(self, rank: int) -> int:
        """The part of the batch that a rank has."""
        part = 0
        for name, place in zip(self.mesh, torch.unravel_index(torch.tensor(rank), (*self.mesh.values(),)), strict=True):
            part = part * self.mesh[name] + int(place) if name in self.batch else part
        return part


FULLY = {"parallel_style": "fully_shard"}
KEPT = {**FULLY, "reshard_after_forward": False}
OPTIMIZER = {"shard_optimizer": True}
OUTER_SHARDS = {"axes": {"batch": ("shard", "replicate"), "shard": "shard"}}
SPLIT = {"params": {"model.0.*": {"tp": Shard(0)}, "model.2.weight": {"tp": Shard(1)}}}
STAGES = {"axes": {"stages": "pp", "batch": "dp"}, "micro_batches": 2}
EXPERTS = {"axes": {"batch": "dp", "experts": "dp"}}
HOSTS, HYBRID = {"dp": 2}, {"replicate": 2, "shard": 2}
BOTH = ("replicate", "shard")

LAYOUTS = {
    # One rank on each host.
    "replicate": Layout(HOSTS),
    "fully_shard": Layout(HOSTS, FULLY, BY_ADAMW),
    "kept whole": Layout(HOSTS, KEPT),
    "shard_optimizer": Layout(HOSTS, OPTIMIZER, BY_ADAMW),
    "tensor": Layout({"tp": 2}, {"axes": {"tensor": "tp"}, **SPLIT}, BY_ADAMW),
    "stages, 1f1b": Layout({"pp": 2}, {"axes": {"stages": "pp"}, "micro_batches": 2}, BY_ADAMW),
    "stages, zb-h1": Layout({"pp": 2}, {"axes": {"stages": "pp"}, "micro_batches": 4, "schedule": "zb-h1"}),
    "experts": Layout(HOSTS, {**FULLY, **EXPERTS}, experts.Training("ends")),
    "experts, by number": Layout(HOSTS, EXPERTS, experts.Training("numbers")),
    "sequence, ring": Layout({"cp": 2}, {"axes": {"sequence": "cp"}, "attention": "ring", **FULLY}, Tokens(), ()),
    "sequence, gathered": Layout({"cp": 2}, {"axes": {"sequence": "cp"}, "attention": "gather"}, Tokens(), ()),
    "sequence, by heads": Layout({"cp": 2}, {"axes": {"sequence": "cp"}, "attention": "heads"}, Tokens(), ()),
    "micro-batches": Layout(HOSTS, {"micro_batches": 2}, BY_ADAMW),
    "micro-batches, each reduced": Layout(HOSTS, {**FULLY, "micro_batches": 2, "reduce_gradients": "each"}),
    "equal bits": Layout(HOSTS, {"bits": "same", "micro_batches": 2}, BY_ADAMW),
    "deferred": Layout(HOSTS, {"defer_updates": True}),
    "deferred, fully_shard": Layout(HOSTS, {**FULLY, "defer_updates": True}, BY_ADAMW),
    # Two ranks on each host.
    "replicate, four": Layout({"dp": 4}, {}, BY_ADAMW),
    "fully_shard, four": Layout({"dp": 4}, FULLY),
    "kept whole, four": Layout({"dp": 4}, KEPT, BY_ADAMW),
    "shard_optimizer, four": Layout({"dp": 4}, OPTIMIZER),
    "replicate over hosts, shard inside": Layout(HYBRID, FULLY, BY_ADAMW, BOTH),
    "shard over hosts, replicate inside": Layout({"shard": 2, "replicate": 2}, {**FULLY, **OUTER_SHARDS}, SMALL, BOTH),
    "tensor inside": Layout({"dp": 2, "tp": 2}, {**FULLY, **SPLIT}),
    "tensor over hosts": Layout({"tp": 2, "dp": 2}, {"axes": {"batch": "dp", "tensor": "tp"}, **SPLIT}, BY_ADAMW),
    "stages over hosts": Layout({"pp": 2, "dp": 2}, {**STAGES, **FULLY}, BY_ADAMW),
    "stages inside": Layout({"dp": 2, "pp": 2}, {**STAGES, "schedule": "gpipe"}),
    "equal bits, hybrid": Layout(HYBRID, {**FULLY, "bits": "same"}, SMALL, BOTH),
    "deferred, hybrid": Layout(HYBRID, {**FULLY, "defer_updates": True}, SMALL, BOTH),
}

# In every run each style has one rank on each host, or two, and either optimizer; these have the others.
# Nor need what is deferred or has equal bits have a hybrid mesh: each of the three is there by itself.
REST = ("kept whole, four", "fully_shard", "shard_optimizer, four", "replicate, four")
REST += ("equal bits, hybrid", "deferred, hybrid")


@dataclass(frozen=True)
class Trained:
    """What differs from the plain step; whether the ranks of each axis share memory; bytes from the other host."""

    differences: list[str]
    shared: list[bool]
    received: int
    was_pending: bool


def trained(rank: int, world: int, name: str) -> Trained:
    """A job: compare the results of each call with the plain step's, and all state after the last."""
    layout = LAYOUTS[name]
    parts = [layout.part_of(other) for other in range(world)]
    batches = [[layout.case.part(part, call) for part in sorted(set(parts))] for call in range(CALLS)]
    expected, _ = _run(layout, layout.case.step, [layout.case.whole(each) for each in batches])
    before = _received()
    step = spmd.compile(layout.case.step, parallel_mode=layout.mode())
    got, was_pending = _run(layout, step, [each[parts[rank]] for each in batches])
    differ = all_unequal(expected, got, parts[rank], len(set(parts)), layout.case.rtol, layout.case.atol)
    return Trained(differ, [axis.shared for axis in step.program.mesh.axes], _received() - before, was_pending)


def _run(layout: Layout, step: Any, batches: list[tuple[Any, ...]]) -> tuple[list[Snapshot], bool]:
    """Results of each call, then all state; and whether an update was pending before that."""
    torch.manual_seed(0)
    objects = layout.case.build()
    results = [snapshot(step(*objects, *batch), ()) for batch in batches]
    deferred = step._dispatch.programs.deferred() if isinstance(step, spmd.CompiledStep) else []
    was_pending = any(each.has_pending for each in deferred)
    return [*results, snapshot(None, objects)], was_pending  # a look at state ends the update


def _received() -> int:
    """Bytes that have come to this host from the other."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.strip().startswith("eth0:"))
