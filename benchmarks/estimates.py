"""Estimated and measured seconds of a step, side by side: GPTs on two ranks of this machine, by loopback.

    python -m benchmarks.estimates [--models width256x4 width64x12] [--styles replicate fully_shard] [--rounds 10]

The ranks first measure what this machine costs, as ``python -m spmd calibrate`` does, then compile each step, estimate
it by that table, and run it. Compute is measured anew before each round of steps. Each rank has a core of its own.
``--messages`` sends messages instead of using shared memory. ``--smoke`` runs one tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as RichTable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import start_processes
from torch.optim import AdamW

import passes
import spmd
from benchmarks.peers.models import SMOKE, WORKLOADS, RandomBatches, Workload, build
from benchmarks.peers.spellings import train_step
from spmd.cli.calibrate import SIZES, calibrate

STYLES = ("replicate", "fully_shard")
STEPS = 8  # in a round
ROUNDS = 3  # of measurements of compute, before each round of steps
RANKS = 2


def measure(
    workload: Workload, style: str, mesh: DeviceMesh, table: passes.Table, options: argparse.Namespace
) -> dict[str, Any]:
    """One row: what the step was estimated to take, and what it took on the slowest rank."""
    device = torch.device("cpu")
    model = build(workload, device)
    optimizer = AdamW(model.parameters())
    batches = RandomBatches(workload, RANKS, dist.get_rank(), RANKS, device)
    pipeline = None if not options.messages else messages_only()
    mode = spmd.DataParallel(style)
    step = spmd.compile(parallel_mode=mode, passes=pipeline)(train_step)
    for _ in range(4):
        step(model, optimizer, *batches.draw())
    program = step.program
    assert program is not None
    seconds, rates = list[float](), list[Mapping[str, float]]()
    for _ in range(options.rounds):  # in turn, since a machine that others use, too, is not always equally fast
        rates.append(calibrate(mesh, (), ROUNDS).compute)
        seconds.append(round_of(lambda: step(model, optimizer, *batches.draw())))
    compute = {name: statistics.median(each[name] for each in rates) for name in rates[0]}
    found = passes.estimate(program, replace(table, compute=compute))
    assert found is not None
    return {
        "model": workload.name,
        "style": style,
        "estimated": found.seconds,
        "compute": found.compute,
        "communication": found.communication,
        "exposed": found.exposed,
        "measured": statistics.median(seconds),
        "fastest": min(seconds),
    }


def messages_only() -> tuple[passes.Pass, ...]:
    """The default passes, with a table by which shared memory costs too much."""
    table = passes.default_passes.BUILT_IN
    links = tuple(replace(link, curves=_slow_shared(link)) for link in table.links)
    return passes.default(table=replace(table, links=links))


def _slow_shared(link: Any) -> dict[Any, Any]:
    return {
        (kind, algorithm): tuple(replace(p, seconds=p.seconds + (1e3 if algorithm == "shared" else 0)) for p in points)
        for (kind, algorithm), points in link.curves.items()
    }


def round_of(call: Any) -> float:
    """Seconds per step of one round, of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        call()
    took = torch.tensor((time.perf_counter() - start) / STEPS)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank: calibrate, then a row for each model and style."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    table = calibrate(mesh, SIZES[:1] if options.smoke else SIZES, 1 if options.smoke else 15)
    rows = [
        measure(workload, style, mesh, table, options) for workload in workloads(options) for style in options.styles
    ]
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps({"rows": rows, "compute": dict(table.compute)}))
    dist.destroy_process_group()


def workloads(options: argparse.Namespace) -> list[Workload]:
    """The models to run."""
    return [SMOKE] if options.smoke else [each for each in WORKLOADS if each.name in options.models]


def table_of(rows: list[dict[str, Any]]) -> RichTable:
    """The rows, in milliseconds, and the ratio of estimate and measurement."""
    shown = RichTable(title=f"one step on {RANKS} ranks, ms")
    for heading in ("model", "style"):
        shown.add_column(heading)
    columns = ("estimated", "exposed", "measured", "fastest")
    for heading in (*columns, "ratio"):
        shown.add_column(heading, justify="right")
    for row in rows:
        figures = (f"{row[name] * 1e3:.2f}" for name in columns)
        shown.add_row(row["model"], row["style"], *figures, f"{row['estimated'] / row['measured']:.2f}")
    return shown


def parse() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in WORKLOADS]
    parser.add_argument("--models", nargs="+", choices=names, default=names[:2], help="(%(default)s)")
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES), help="by default both")
    parser.add_argument("--rounds", type=int, default=10, help=f"of {STEPS} steps (%(default)s)")
    parser.add_argument("--messages", action="store_true", help="send messages, also between ranks of one host")
    parser.add_argument("--smoke", action="store_true", help="one tiny model, few rounds")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse()
    if options.smoke:
        options.rounds, options.styles = 1, ["fully_shard"]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, (options, folder), nprocs=RANKS, start_method="fork")
        found = json.loads(Path(folder, "rows").read_text())
    Console().print(table_of(found["rows"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
