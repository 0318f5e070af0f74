"""Memory of a rank's whole life, compiling, graphs and pages that malloc keeps included, in three rulers.

    python -m benchmarks.resident [--systems 'DDP*' 'spmd*'] [--model width512x6] [--clears first] [--json out.json]

Each rank is a process of its own, one system after the other, with the same imports. MB of 10^6 bytes of rank 0, above
an idle rank, which has imported everything, joined its group and made an optimizer:

VmHWM        the most that was ever resident, as ``top`` shows it: pages that ranks share count in each
PSS          the most by proportional set size, in which a page of n processes counts as an n-th; read from another
             process each 5 ms
cgroup       the most that the kernel charged a control group of the ranks for, by ranks: what a container's limit sees;
             empty where no group can be made
later        PSS after the last step, of which:
parameters, gradients, optimizer    this rank's parts
planned      the peak of the values of a step, these and what other ranks read included, as the report of spmd plans it
rest         what is in ``later`` beside the plan (of peers, beside the three): what compiling left behind, and free
             memory that malloc keeps
idle         PSS of the idle rank

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
from torch import Tensor

from .peers.control_group import ControlGroup, control_group
from .peers.memory import held, pss, status
from .peers.models import SMOKE, WORKLOADS, RandomBatches, Workload, build
from .peers.spellings import CLEARS, BoundStep
from .peers.systems import SYSTEMS, System

KINDS = ("parameters", "gradients", "optimizer")
COLUMNS = ("VmHWM", "PSS", "cgroup", "later", *KINDS, "planned", "rest", "idle")
EVERY = 0.005  # seconds between two looks at a rank


@dataclass
class Resident:
    """The figures of a system, in bytes, by their columns; 0 where there is none."""

    system: str
    bytes: dict[str, int]
    loss: float


def main() -> None:
    """Measure the systems, print a table for each spelling, and write the figures."""
    options = parse(sys.argv[1:])
    workload = SMOKE if options.smoke else next(each for each in WORKLOADS if each.name == options.model)
    workload = replace(workload, batch=options.batch)
    found = {clears: [measure(each, workload, clears, options) for each in options.chosen] for clears in options.clears}
    for clears, rows in found.items():
        batch = f"{options.ranks} ranks, a batch of {workload.batch} each"
        table = Table(title=f"{workload.name}, {batch}, gradients cleared {clears}, MB")
        for heading in ("system", *COLUMNS):
            table.add_column(heading, justify="left" if heading == "system" else "right")
        for each in rows:
            figures = (each.bytes[name] for name in COLUMNS)
            table.add_row(each.system, *(f"{value / 1e6:,.0f}" if value else "" for value in figures))
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    if options.json:
        plain = {clears: [asdict(each) for each in rows] for clears, rows in found.items()}
        options.json.write_text(json.dumps(plain, indent=2))


def parse(given: list[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resident", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", default=["*"], metavar="PATTERN", help="by name: 'DDP*' 'spmd*'")
    parser.add_argument("--model", choices=[each.name for each in WORKLOADS], default="width512x6")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank (%(default)s)")
    parser.add_argument("--clears", nargs="+", choices=CLEARS, default=["last", "first"], help="gradients (last first)")
    parser.add_argument("--steps", type=int, default=8, help="%(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="%(default)s")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--json", type=Path, help="also write the figures, in bytes, to this file")
    options = parser.parse_args(given)
    if platform.system() != "Linux":
        parser.error(f"this benchmark reads Linux's /proc, and this is {platform.system()}")
    options.chosen = chosen(options.systems)
    if not options.chosen:
        parser.error(f"--systems {' '.join(options.systems)} names none of: {'; '.join(each.name for each in SYSTEMS)}")
    return options


def chosen(patterns: list[str]) -> list[System]:
    """The systems that communicate, and need no compiler for C++, by name."""
    found = [each for each in SYSTEMS if each.communicates and not each.needs_compiler]
    return [each for each in found if any(fnmatch.fnmatch(each.name, pattern) for pattern in patterns)]


def measure(system: System, workload: Workload, clears: str, options: argparse.Namespace) -> Resident:
    """Run one system in fresh processes; returns the figures of rank 0."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, control_group() as group:
        life = Life(system, workload, clears, options.ranks, options.steps, f"{folder}/store", group)
        ranks = [spawn.Process(target=life.run, args=(rank, theirs), daemon=True) for rank in range(options.ranks)]
        for each in ranks:
            each.start()
        theirs.close()
        try:
            idle, most = ours.recv(), 0
            while not ours.poll(EVERY):
                most = max(most, pss(ranks[0].pid))
            found = ours.recv()
        except (EOFError, FileNotFoundError, ProcessLookupError):
            raise SystemExit(f"{system.name} failed: see above") from None
        finally:
            for each in ranks:
                each.join()
        found.bytes |= {"idle": idle, "PSS": max(most - idle, found.bytes["later"])}
        found.bytes["cgroup"] = group.peak() // options.ranks if group is not None else 0
    return found


@dataclass(frozen=True)
class Life:
    """What the ranks of a system do, each in a process of its own."""

    system: System
    workload: Workload
    clears: str
    ranks: int
    steps: int
    store: str
    group: ControlGroup | None

    def run(self, rank: int, answers: Connection) -> None:
        """Join, train and answer: when idle with its PSS, at its end with its figures."""
        torch.set_num_threads(1)
        timeout = timedelta(minutes=15)  # ranks compile at different speeds
        store = dist.FileStore(self.store, self.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.ranks, timeout=timeout)
        torch.optim.AdamW([torch.zeros(1)])  # imports Dynamo
        if self.group is not None:
            self.group.enter()
        dist.barrier()
        if rank == 0:
            idle, resident = pss(), status("VmRSS")
            answers.send(idle)
        dist.barrier()
        device, spelling = torch.device("cpu"), CLEARS[self.clears]
        batches = RandomBatches(self.workload, self.ranks, rank, self.ranks, device)
        step = self.system.make(build(self.workload, device), spelling)
        loss = [step(*batches.draw()).item() for _ in range(self.steps)][-1]
        dist.barrier()
        if rank == 0:
            figures = {"VmHWM": status("VmHWM") - resident, "later": pss() - idle} | in_use(step)
            figures["rest"] = figures["later"] - (figures["planned"] or sum(figures[name] for name in KINDS))
            answers.send(Resident(self.system.name, figures, loss))
        answers.close()
        dist.barrier()
        dist.destroy_process_group()


def in_use(step: BoundStep) -> dict[str, int]:
    """Bytes of what the step holds on this rank, and of what a plan says."""
    parameters = list(step.model.parameters())
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    kinds = (parameters, [each.grad for each in parameters], [each for each in states if isinstance(each, Tensor)])
    report = getattr(step.step, "report", None)
    planned = sum(each.peak for each in report().memory.values()) if report is not None else 0
    return {name: held(each) for name, each in zip(KINDS, kinds, strict=True)} | {"planned": planned}


if __name__ == "__main__":
    main()
