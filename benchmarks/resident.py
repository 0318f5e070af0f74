"""Resident memory of a rank's whole life, as ``top`` shows it, with compiling, graphs and pages that malloc keeps.

    python -m benchmarks.resident [--systems 'DDP*' 'spmd*'] [--model width512x6] [--batch 2] [--json out.json]

Each rank is a process of its own, one system after the other, with the same imports. MB of 10^6 bytes, of rank 0:

idle         a rank that has imported everything, joined its group and made an optimizer
peak         the most that was ever resident, above idle
later        what is resident after the last step, above idle
shared       of that, memory that ranks of the host share: each counts its own and what it reads of others
planned      the peak of the values of a step, as the report of spmd plans it

It depends neither on the speed of the machine nor on its load.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from .peers.memory import status
from .peers.models import SMOKE, WORKLOADS, RandomBatches, Workload, build
from .peers.systems import SYSTEMS, System

COLUMNS = ("idle", "peak", "later", "shared", "planned")


@dataclass(frozen=True)
class Resident:
    """The figures of a system, in bytes; ``planned`` is 0 for peers."""

    system: str
    idle: int
    peak: int
    later: int
    shared: int
    planned: int
    loss: float


def main() -> None:
    """Measure the systems, print the table, and write the figures."""
    options = parse(sys.argv[1:])
    workload = SMOKE if options.smoke else next(each for each in WORKLOADS if each.name == options.model)
    workload = replace(workload, batch=options.batch)
    found = [measure(each, workload, options) for each in chosen(options.systems)]
    table = Table(title=f"{workload.name}, {options.ranks} ranks, a batch of {workload.batch} each: resident MB")
    for heading in ("system", *COLUMNS):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for each in found:
        figures = {name: getattr(each, name) for name in COLUMNS}
        table.add_row(each.system, *(f"{value / 1e6:,.0f}" if value else "" for value in figures.values()))
    Console(highlight=False).print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2))


def parse(given: list[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resident", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", default=["*"], metavar="PATTERN", help="by name: 'DDP*' 'spmd*'")
    parser.add_argument("--model", choices=[each.name for each in WORKLOADS], default="width512x6")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="%(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="%(default)s")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--json", type=Path, help="also write the figures, in bytes, to this file")
    options = parser.parse_args(given)
    if platform.system() != "Linux":
        parser.error(f"this benchmark reads Linux's /proc, and this is {platform.system()}")
    if not chosen(options.systems):
        parser.error(f"--systems {' '.join(options.systems)} names none of: {'; '.join(each.name for each in SYSTEMS)}")
    return options


def chosen(patterns: list[str]) -> list[System]:
    """The systems that communicate, and need no compiler for C++, by name."""
    found = [each for each in SYSTEMS if each.communicates and not each.needs_compiler]
    return [each for each in found if any(fnmatch.fnmatch(each.name, pattern) for pattern in patterns)]


def measure(system: System, workload: Workload, options: argparse.Namespace) -> Resident:
    """Run one system in fresh processes; returns the figures of rank 0."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (system, workload, options.ranks, options.steps, f"{folder}/store", theirs)
        ranks = [spawn.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(options.ranks)]
        for each in ranks:
            each.start()
        theirs.close()
        try:
            found = Resident(**ours.recv())
        except EOFError:
            raise SystemExit(f"{system.name} failed: see above") from None
        finally:
            for each in ranks:
                each.join()
    return found


def run_rank(
    rank: int, system: System, workload: Workload, ranks: int, steps: int, store: str, answers: Connection
) -> None:
    """The life of one rank."""
    torch.set_num_threads(1)
    timeout = timedelta(minutes=15)  # ranks compile at different speeds
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout)
    torch.optim.AdamW([torch.zeros(1)])  # imports Dynamo
    dist.barrier()
    device, idle = torch.device("cpu"), status("VmRSS")
    batches = RandomBatches(workload, ranks, rank, ranks, device)
    step = system.make(build(workload, device))
    loss = [step(*batches.draw()).item() for _ in range(steps)][-1]
    if rank == 0:
        report = getattr(getattr(step, "func", None), "report", None)
        planned = report().memory["cpu"].peak if system.ours and report is not None else 0
        peak, later = status("VmHWM") - idle, status("VmRSS") - idle
        answers.send(asdict(Resident(system.name, idle, peak, later, status("RssShmem"), planned, loss)))
    answers.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
