"""Imported once, by the server that forks the ranks: compile two steps, so that no rank pays for what is slow at first.

The first compile of a process takes four times as long as a later one, as torch imports, builds and caches on demand.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch.distributed.tensor import debug
from torch.hub import tqdm

import spmd
from spmd.cache.surroundings import functions, surroundings

from .backend import take_backend
from .cases import MLP
from .fake import fake_world
from .memory import spare_the_collector
from .oracle import compiled_run


def _warm_up() -> None:
    """Compile on a fake world; what is wrong with that is for the tests to say."""
    tqdm.monitor_interval = 0  # torch.fx has a progress bar, and its thread would not live on in a fork
    torch.set_num_threads(1)
    for style in ("fully_shard", "replicate"):
        with suppress(Exception), fake_world(2):
            mode = spmd.DataParallel(parallel_style=style)
            compiled_run(0, MLP(optimizer="AdamW"), 1, parallel_mode=mode)
    surroundings()  # ranks compare digests of our files and of torch's functions, of which a fake world asks for none
    functions()
    debug._clear_sharding_prop_cache()  # it keeps meshes, and would give every rank those of the fake rank 0


take_backend()
spare_the_collector()  # before a compile, which looks once whether that was done: in every fork that takes 60 ms
if not torch.backends.cuda.is_built():  # autograd would start threads for it, which do not live on in a fork either
    _warm_up()
spare_the_collector()
