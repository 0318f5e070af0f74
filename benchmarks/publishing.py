"""What it costs to publish weights while training goes on, beside saves, and what a reader needs.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.publishing [--width 512] [--layers 6] [--json out.json]

A GPT of that size with 4 x 128 bytes on each rank, ``--style fully_shard`` or ``replicate``. A round has ``--steps``
steps without, as many with ``spmd.publish`` after each, and as many of which the first is followed by
``spmd.save(wait=False)``. Seconds are the median over rounds, on the slowest rank: of a step, of the call, until a
version or a checkpoint is complete; of reading a version into a whole model. Memory: MB that a rank shares in the end,
and those of its part of the parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor

import spmd
from benchmarks.checkpoints import train_step
from examples.gpt import GPT, Config


def slowest(seconds: float) -> float:
    """The most over all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return slowest(time.perf_counter() - start)


def measure(width: int, layers: int, style: str, steps: int, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds and MB by what they are of."""
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(style))  # type: ignore[arg-type]
    config = Config(width=width, layers=layers, heads=8)
    model, reader_model = GPT(config), GPT(config)
    x = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(4):
        step(model, optimizer, x)
    calls = dict[str, list[float]]()

    def note(name: str, seconds: float) -> None:
        calls.setdefault(name, []).append(seconds)

    def train(after: Callable[[int], object]) -> None:
        for k in range(steps):
            step(model, optimizer, x)
            after(k)

    def publish(k: int) -> None:
        start = time.perf_counter()
        spmd.publish(model, to=folder.name)
        note("the call of spmd.publish", time.perf_counter() - start)

    def save(k: int) -> None:
        if k == 0:
            spmd.save(folder, model=model, wait=False)

    spmd.publish(model, to=folder.name).wait()
    reader = spmd.subscribe(folder.name)
    for _ in range(rounds + 1):  # of which the first is not counted
        note("a step", timed(lambda: train(lambda k: None)) / steps)
        note("a step with spmd.publish", timed(lambda: train(publish)) / steps)
        note("a step, of which one with spmd.save(wait=False)", timed(lambda: train(save)) / steps)
        spmd.save(folder, model=model)  # waits for that
        note("spmd.publish until it is complete", timed(lambda: spmd.publish(model, to=folder.name).wait()))
        note("spmd.save until it is complete", timed(lambda: spmd.save(folder, model=model)))
        note("Subscription.load", timed(lambda: reader.load(reader_model)))
    skipped = {name: len(each) // (rounds + 1) for name, each in calls.items()}
    found = {name: slowest(statistics.median(each[skipped[name] :])) for name, each in calls.items()}
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    found["MB of parameters of a rank"] = slowest(sum(each.nbytes for each in locals_) / 1e6)
    own = f"-{dist.get_rank()}-"
    shared = [each for each in (Path("/dev/shm") / folder.name).iterdir() if own in each.name]
    found["MB of its segments"] = slowest(sum(each.stat().st_size for each in shared) / 1e6)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--style", choices=["fully_shard", "replicate"], default="fully_shard")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo")
    names = [tempfile.mkdtemp(prefix="publishing-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        sizes = options.width, options.layers, options.style, options.steps, options.rounds
        found = measure(*sizes, Path(names[0]))
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(names[0], ignore_errors=True)
    if dist.get_rank() == 0:
        table = Table("", "", title=f"{options.style}, {dist.get_world_size()} ranks, {os.cpu_count()} cores")
        for name, value in found.items():
            table.add_row(name, f"{value:.1f} MB" if name.startswith("MB") else f"{value * 1000:.1f} ms")
        Console().print(table)
        if options.json is not None:
            options.json.write_text(json.dumps(found))
    if is_ours:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
