"""A program that ends while the update of its last call is pending. Its arguments are the rank and a folder."""

import atexit
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def write() -> None:
    """Write the parameters, once spmd has finished: what is registered first runs last."""
    torch.save([parameter.detach() for parameter in model.parameters()], folder / f"rank-{rank}.pt")


rank, folder = int(sys.argv[1]), Path(sys.argv[2])
atexit.register(write)

import spmd  # noqa: E402
from spmd.ranks import local_ranks  # noqa: E402
from tests.harness.cases import MLP  # noqa: E402

local_ranks._host = lambda: f"host {rank}"
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
case = MLP(sizes=(5, 3), rows=4)
torch.manual_seed(0)
model, optimizer = case.build()
step = spmd.compile(case.step, parallel_mode=spmd.DataParallel(defer_updates=True))
for k in range(2):
    step(model, optimizer, *case.part(rank, k))
