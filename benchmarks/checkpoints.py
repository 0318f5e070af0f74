"""Time and memory of saving and loading shards, beside plain torch.distributed.checkpoint (DCP).

    torchrun --standalone --nproc-per-node 2 benchmarks/checkpoints.py [--width 512] [--layers 6] [--json out.json]

A model of linear layers with the state of Adam, fully sharded. Seconds are the median over rounds, on the slowest rank;
memory is what a process holds at most during a call, above what it held before, on the largest rank.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn

import spmd


def resident() -> int:
    """Bytes of memory that is not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(call: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds of a call, and the most MB that it added, over all ranks."""
    seconds, peaks = [], []
    for _ in range(rounds):
        dist.barrier()
        before, seen, done = resident(), [resident()], threading.Event()

        def watch(seen: list[int] = seen, done: threading.Event = done) -> None:
            while not done.wait(0.001):
                seen.append(resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
        done.set()
        watcher.join()
        peaks.append((max(seen) - before) / 1e6)
    worst = torch.tensor([statistics.median(seconds), max(peaks)])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst[0]), float(worst[1])


def make(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model, and an optimizer that has state."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(layers)]
        model = nn.Sequential(*blocks)
    spmd.materialize(model, spmd.DataParallel("fully_shard"))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table on the first rank."""
    parser = argparse.ArgumentParser(description="Checkpoints beside plain DCP.")
    for name, default in (("--width", 512), ("--layers", 6), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    rank = spmd.world().get_rank()
    model, optimizer = make(options.width, options.layers)
    folder = [tempfile.mkdtemp(prefix="checkpoints-")]
    dist.broadcast_object_list(folder)
    ours, theirs, out = Path(folder[0], "spmd"), Path(folder[0], "dcp"), Path(folder[0], "export")

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    calls: dict[str, Callable[[], Any]] = {
        "spmd.save": lambda: spmd.save(ours, model=model, optimizer=optimizer),
        "DCP save": lambda: dcp.save(state(), checkpoint_id=str(theirs)),
        "spmd.load": lambda: spmd.load(ours, model=model, optimizer=optimizer),
        "DCP load": lambda: dcp.load(state(), checkpoint_id=str(theirs)),
        "spmd.export": lambda: spmd.export(out, model),
    }
    found = {name: measure(call, options.rounds) for name, call in calls.items()}
    if rank == 0:
        shutil.rmtree(folder[0])
        show(found, 3 * sum(parameter.to_local().nbytes for parameter in model.parameters()) / 1e6)
        if options.json:
            options.json.write_text(json.dumps(found))
    dist.destroy_process_group()


def show(found: dict[str, tuple[float, float]], size: float) -> None:
    """Print the table."""
    table = Table("call", "seconds", "memory added, MB", title=f"{size:.0f} MB of state on each rank")
    for name, (seconds, peak) in found.items():
        table.add_row(name, f"{seconds:.3f}", f"{peak:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
