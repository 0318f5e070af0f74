"""Race spmd against DDP and FSDP2 in one run: a table, and JSON.

    python -m benchmarks.peers [--networks loopback 2gbit] [--models width64x12] [--json out.json]     (or: make bench)

The losses of every system are first compared with those of the whole batch on one device; a system that differs fails.
Then all take their rounds in turn. A time is the median over rounds, and that of the slowest rank in a round. Each rank
has one core; a network given as a rate connects two hosts that are made for the run. spmd has its default options. The
step has three spellings: gradients are cleared last, first (they outlive the call), or kept for two calls, of which the
second updates.

ms/step                the median time of a step
min - max              of all rounds
over floor             ms beyond the fastest step without communication
speedup                over the fastest peer that distributes parameters the same way
peak MB                tensors, and the buffers of the communication backend
MB received            counted by the kernel on one rank's connections
first 4, s             seconds of the first four steps, compiling included; ``--cold`` gives Inductor an empty cache

The second table divides a step into compute, ops that copy, CPU time of the backend's threads, and idle time.
With ``--exposed``, each chosen system of spmd also runs with its collectives replaced by local copies of the same size.
What it takes longer than that is exposed communication: a third table.
``--smoke`` runs a tiny model without torch.compile.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

from .models import SMOKE, WORKLOADS, Workload
from .network import Network, NoNetworkError, connect
from .race import Pace, race
from .spellings import CLEARS
from .systems import SYSTEMS, System
from .table import exposing, plain, spending, table

CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def main() -> int:
    """Run the races. Returns 130 after Ctrl-C, 1 if spmd failed."""
    options = parse()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
            races = run(options, Path(folder))
    except KeyboardInterrupt:
        CONSOLE.print("\nStopped; all processes and networks of this run are removed.")
        return 130
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(options), "races": races}, indent=2))
    ours = [each for found in races for each in found["systems"] if each["system"].startswith("spmd")]
    return int(any(each["failed"] for each in ours))


def _stop(number: int, frame: object) -> NoReturn:
    """Interrupt the run, and ignore further signals while it is taken down."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def parse() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--networks", nargs="+", default=["loopback", "2gbit"], help="loopback, or rates of a link")
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="by default all")
    parser.add_argument("--systems", nargs="+", default=["*"], metavar="PATTERN", help="by name: 'DDP*' 'spmd*'")
    parser.add_argument("--clears", nargs="+", choices=CLEARS, default=[*CLEARS], help="gradients, by default all")
    parser.add_argument("--exposed", action="store_true", help="also run spmd with stand-ins for its collectives")
    parser.add_argument("--rounds", type=int, default=Pace.rounds, help="of each system (%(default)s)")
    parser.add_argument("--steps", type=int, default=Pace.steps, help="of each system in a round (%(default)s)")
    parser.add_argument("--ranks", type=int, help="by default 2, or the number of GPUs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--smoke", action="store_true", help="one tiny model on loopback, without torch.compile")
    parser.add_argument("--cold", action="store_true", help="let torch.compile find nothing in its cache")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if platform.system() != "Linux":
        parser.error(f"this benchmark reads Linux's /proc and TCP_INFO, and this is {platform.system()}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use, and there is none: leave it out")
    options.chosen = chosen(options)
    if not options.chosen:
        parser.error(f"--systems {' '.join(options.systems)} names none of: {'; '.join(each.name for each in SYSTEMS)}")
    return settle(options)


def chosen(options: argparse.Namespace) -> list[System]:
    """The systems that match ``--systems``."""
    found = [each for each in SYSTEMS if any(fnmatch.fnmatch(each.name, pattern) for pattern in options.systems)]
    found = [each for each in found if not (options.smoke and each.needs_compiler)]
    return found + [each.without_collectives() for each in found if each.ours and options.exposed]


def settle(options: argparse.Namespace) -> argparse.Namespace:
    """Complete the options from each other."""
    options.workloads = [workload for workload in WORKLOADS if workload.name in options.models]
    if options.device == "cuda":
        options.networks = ["loopback"]  # GPUs of one machine have links of their own
    if options.smoke:
        options.workloads, options.networks, options.rounds, options.steps = [SMOKE], ["loopback"], 2, 1
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    return options


def run(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all races, except on networks that cannot be made here."""
    races = []
    for name in options.networks:
        try:
            with connect(name) as network:
                races += [
                    run_race(options, network, workload, clears, folder)
                    for workload in options.workloads
                    for clears in options.clears
                ]
        except NoNetworkError as missing:
            CONSOLE.print(f"skipped {name}: {missing}")
    return races


def run_race(
    options: argparse.Namespace, network: Network, workload: Workload, clears: str, folder: Path
) -> dict[str, Any]:
    """Run one race, print its tables and return it as plain data."""
    batch = f"{options.ranks} ranks, a batch of {workload.batch} x {workload.config.context} each"
    title = f"{workload.name} on {network.name}: {batch}, gradients cleared {clears}"
    with CONSOLE.status(title) as status, tempfile.TemporaryDirectory(dir=folder) as stores:
        results = race(
            workload,
            network,
            options.chosen,
            Pace(options.rounds, options.steps),
            ranks=options.ranks,
            device=options.device,
            folder=Path(stores),
            cold=options.cold,
            clears=clears,
            report=lambda what: status.update(f"{title}: {what}"),
        )
    CONSOLE.print(table(title, results, counts_wire=options.device == "cpu"))
    if options.device == "cpu":
        CONSOLE.print(spending(results))
    if (longer := exposing(results)) is not None:
        CONSOLE.print(longer)
    busy = os.getloadavg()[0]
    if busy > os.cpu_count() + 1:
        CONSOLE.print(f"this machine is busy (load {busy:.0f} on {os.cpu_count()} cores): these times are not reliable")
    return {"network": network.name, "model": workload.name, "clears": clears, "load": busy, "systems": plain(results)}


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """The machine and the options of the run."""
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "ranks": options.ranks,
        "rounds": options.rounds,
        "steps": options.steps,
    }


if __name__ == "__main__":
    sys.exit(main())
