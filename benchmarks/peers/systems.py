"""The systems that race: each makes a train step from a model.

A new option of spmd is a new line in ``SYSTEMS``. spmd is compared with the fastest peer of the same family. Peers get
the options that make them fastest: a fused optimizer, graphs, views instead of copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import spmd

from .models import Model
from .spellings import LAST, Spelling, TrainStep
from .stand_ins import with_stand_ins

FLOOR, REPLICATE, SHARD, KEEP = "no communication", "replicate", "fully_shard", "fully_shard, kept whole"
STAND_INS = "local stand-ins"


@dataclass(frozen=True)
class System:
    """A line of the table. ``make`` makes the train step, in a spelling, from this process's copy of the model.

    ``stands_for``: the system whose program this one runs with stand-ins for its collectives.
    """

    name: str
    family: str
    make: Callable[[Model, Spelling], TrainStep]
    ours: bool = False
    needs_compiler: bool = False  # on the CPU, torch.compile calls a C++ compiler
    stands_for: str = ""

    @property
    def communicates(self) -> bool:
        """Whether its ranks need a process group."""
        return self.family != FLOOR

    @property
    def trains_on_the_whole_batch(self) -> bool:
        """Whether its losses are those of all ranks together."""
        return self.family not in (FLOOR, STAND_INS)

    def without_collectives(self) -> System:
        """This system of spmd, with stand-ins for its collectives."""
        make = functools.partial(self.make, gm_transformation=with_stand_ins)
        return System(f"{self.name}, local stand-ins", STAND_INS, make, ours=True, stands_for=self.name)


def eager(model: Model, spelling: Spelling = LAST) -> TrainStep:
    """The plain step."""
    return spelling.bind(spelling.step, model, AdamW(model.parameters()))


def compiled(model: Model, spelling: Spelling = LAST) -> TrainStep:
    """Forward and backward by ``torch.compile``."""
    return spelling.bind(spelling.step, torch.compile(model), AdamW(model.parameters(), fused=True))


def ddp(model: Model, spelling: Spelling = LAST) -> TrainStep:
    """DDP with its default options."""
    return spelling.bind(spelling.step, DistributedDataParallel(model), AdamW(model.parameters()))


def tuned_ddp(model: Model, spelling: Spelling = LAST) -> TrainStep:
    """DDP with the options that avoid copies and the search for unused parameters."""
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    return spelling.bind(spelling.step, replica, AdamW(model.parameters(), fused=True))


def compiled_ddp(model: Model, spelling: Spelling = LAST) -> TrainStep:
    """DDP around a compiled model, which torch splits at the ends of buckets."""
    replica: nn.Module = torch.compile(DistributedDataParallel(model, gradient_as_bucket_view=True))
    return spelling.bind(spelling.step, replica, AdamW(model.parameters(), fused=True))


def fsdp(
    model: Model, spelling: Spelling = LAST, *, compile_blocks: bool = False, reshard: bool | None = None
) -> TrainStep:
    """FSDP2: each block is gathered and reduced on its own, the rest with the root. ``reshard``: after forward."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (torch.distributed.get_world_size(),))
    for block in model.blocks:
        if compile_blocks:
            block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return spelling.bind(spelling.step, model, AdamW(model.parameters(), fused=True))


def ours(
    model: Model,
    spelling: Spelling = LAST,
    *,
    gm_transformation: Callable[[Any], Any] | None = None,
    backend: Literal["aten", "inductor"] = "aten",
    **options: Any,
) -> TrainStep:
    """spmd: the whole step as one program. ``options`` are those of ``DataParallel``."""
    mode = spmd.DataParallel(**options)
    step = spmd.compile(None, gm_transformation, mode, backend=backend)(spelling.step)
    return spelling.bind(step, model, AdamW(model.parameters()))


SYSTEMS = (
    System("no communication, eager", FLOOR, eager),
    System("no communication, compiled, fused AdamW", FLOOR, compiled, needs_compiler=True),
    System("DDP", REPLICATE, ddp),
    System("DDP, bucket views, static graph, fused AdamW", REPLICATE, tuned_ddp),
    System("DDP, compiled, fused AdamW", REPLICATE, compiled_ddp, needs_compiler=True),
    System("spmd, replicate", REPLICATE, functools.partial(ours, parallel_style="replicate"), ours=True),
    System(
        "spmd, replicate, inductor",
        REPLICATE,
        functools.partial(ours, parallel_style="replicate", backend="inductor"),
        ours=True,
        needs_compiler=True,
    ),
    System(
        "spmd, replicate, sharded update",
        REPLICATE,
        functools.partial(ours, parallel_style="replicate", shard_optimizer=True),
        ours=True,
    ),
    System("FSDP2 per block, fused AdamW", SHARD, fsdp),
    System(
        "FSDP2 per block, compiled, fused AdamW",
        SHARD,
        functools.partial(fsdp, compile_blocks=True),
        needs_compiler=True,
    ),
    System("spmd, fully_shard", SHARD, functools.partial(ours, parallel_style="fully_shard"), ours=True),
    System(
        "spmd, fully_shard, inductor",
        SHARD,
        functools.partial(ours, parallel_style="fully_shard", backend="inductor"),
        ours=True,
        needs_compiler=True,
    ),
    System("FSDP2 per block, kept whole, fused AdamW", KEEP, functools.partial(fsdp, reshard=False)),
    System(
        "FSDP2 per block, kept whole, compiled, fused AdamW",
        KEEP,
        functools.partial(fsdp, compile_blocks=True, reshard=False),
        needs_compiler=True,
    ),
    System(
        "spmd, fully_shard, kept whole",
        KEEP,
        functools.partial(ours, parallel_style="fully_shard", reshard_after_forward=False),
        ours=True,
    ),
)
REFERENCE = System("the whole batch on one device", FLOOR, eager)
