"""Time and memory of saving and loading shards, beside plain torch.distributed.checkpoint (DCP).

    torchrun --standalone --nproc-per-node 2 -m benchmarks.checkpoints [--width 512] [--layers 6] [--json out.json]

With ``--train``, what saves cost while training goes on, of a GPT of that size with 4 x 128 bytes on each rank: a save
by ``spmd.save(wait=False)``, ``--steps`` steps without, one by ``async_save`` of DCP, as many steps without, and so on.
What a save loses is the difference to the mean of the steps before and after, as a part of 20 steps, in which it is the
only one; the median over rounds, since the steps of a shared machine vary by more. ``--style replicate`` or
``fully_shard``.

A model of linear layers with the state of Adam, fully sharded. Seconds are the median over rounds, on the slowest rank;
memory is what a process holds at most during a call, above what it held before, on the largest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import spmd
from examples.gpt import GPT, Config


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


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """One step on bytes; each is to predict the next one."""
    loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(
    width: int, layers: int, rounds: int, style: Literal["replicate", "fully_shard"], steps: int, folder: Path
) -> None:
    """Print what a save of each kind costs: by how much it makes the steps slower than those before and after it."""
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(style))
    model = GPT(Config(width=width, layers=layers, heads=8))
    x = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(4):
        step(model, optimizer, x)
    group = dist.new_group(backend="gloo")  # of its thread

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def window(begin: Callable[[], Any]) -> torch.Tensor:
        """Seconds, those of the call, and of CPU, on the slowest rank."""
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        end = begin()
        called = time.perf_counter() - start
        for _ in range(steps):
            step(model, optimizer, x)
        if end is not None:
            end()
        found = torch.tensor([time.perf_counter() - start, called, time.process_time() - used])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found

    begins: dict[str, Callable[[], Any]] = {
        "spmd.save(wait=False)": lambda: spmd.save(folder / "spmd", model=model, optimizer=optimizer, wait=False).wait,
        "DCP async_save": lambda: (
            dcp.async_save(state(), checkpoint_id=str(folder / "dcp"), process_group=group).result
        ),
    }
    for begin in begins.values():  # the first ones are not counted
        window(begin)
    plain = [window(lambda: None)]
    found: dict[str, list[torch.Tensor]] = {name: [] for name in begins}
    for _ in range(rounds):
        for name, begin in begins.items():
            found[name].append(window(begin))
            plain.append(window(lambda: None))
    if dist.get_rank() == 0:
        show_losses(plain, found, steps, style)


def show_losses(plain: list[torch.Tensor], found: dict[str, list[torch.Tensor]], steps: int, style: str) -> None:
    """Print the table. Windows with saves, of each kind in turn, lie between the plain ones."""
    every = 20 / steps * torch.stack(plain).median(0).values  # of 20 steps
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    title = f"{style}: 20 steps take {every[0]:.2f} s, {every[2]:.2f} s of CPU; load {load}"
    table = Table("a save", "the call, s", "lost, s", "CPU, s", "lost of 20 steps, %", "quartiles", title=title)
    for k, (name, windows) in enumerate(found.items()):
        around = [(plain[n] + plain[n + 1]) / 2 for n in range(k, len(plain) - 1, len(found))]
        lost = torch.stack([each - other for each, other in zip(windows, around, strict=True)])
        low, middle, high = (100 * lost[:, 0] / every[0]).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        call = torch.stack(windows)[:, 1].median()
        seconds, _, used = lost.median(0).values.tolist()
        table.add_row(name, f"{call:.3f}", f"{seconds:.2f}", f"{used:.2f}", f"{middle:.1f}", f"{low:.1f} to {high:.1f}")
    Console(width=120).print(table)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table on the first rank."""
    parser = argparse.ArgumentParser(description="Checkpoints beside plain DCP.")
    for name, default in (("--width", 512), ("--layers", 6), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--style", default="replicate", choices=["replicate", "fully_shard"])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    rank = spmd.world().get_rank()
    folder = [tempfile.mkdtemp(prefix="checkpoints-")]
    dist.broadcast_object_list(folder)
    if options.train:
        train(options.width, options.layers, options.rounds, options.style, options.steps, Path(folder[0]))
        return end(rank, folder[0])
    model, optimizer = make(options.width, options.layers)
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
        show(found, 3 * sum(parameter.to_local().nbytes for parameter in model.parameters()) / 1e6)
        if options.json:
            options.json.write_text(json.dumps(found))
    end(rank, folder[0])


def end(rank: int, folder: str) -> None:
    """Remove what was written."""
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


def show(found: dict[str, tuple[float, float]], size: float) -> None:
    """Print the table."""
    table = Table("call", "seconds", "memory added, MB", title=f"{size:.0f} MB of state on each rank")
    for name, (seconds, peak) in found.items():
        table.add_row(name, f"{seconds:.3f}", f"{peak:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
