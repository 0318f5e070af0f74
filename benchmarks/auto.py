"""What ``spmd.Auto`` takes, beside all styles that it chooses from, in one run.

    python -m benchmarks.auto [--models width256x4] [--adapt] [--table costs.json] [--rounds 15] [--json out.json]

For each model of ``benchmarks.peers`` all systems live on two ranks of one core each, and take their rounds in turn. A
time is the median over rounds, of the slowest rank. "beside the best" is Auto's over that of the fastest style: it ends
with 1 where that is more than 1.1. ``--table``: as ``python -m spmd calibrate`` writes it, by default the built-in one.
``--smoke`` runs a tiny model in one style, and says nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as Shown

import passes
import spmd

from .peers.models import SMOKE, WORKLOADS, Model, Workload, train_step
from .peers.network import connect
from .peers.race import Pace, Result, race
from .peers.systems import REPLICATE, SHARD, System, TrainStep, ours

AUTO, WORST = "spmd.Auto", 1.1


def auto(model: Model, *, adapt: bool, table: Path | None) -> TrainStep:
    """The step in the style that ``spmd.Auto`` takes."""
    costs = {"table": passes.Table.read(table)} if table is not None else {}
    step = spmd.compile(parallel_mode=spmd.Auto(adapt=adapt, **costs), keep_freed_memory=True)(train_step)
    return partial(step, model, torch.optim.AdamW(model.parameters()))


def systems(adapt: bool, table: Path | None) -> list[System]:
    """Auto, and the styles that it chooses from."""
    sharded = partial(ours, parallel_style="replicate", shard_optimizer=True)
    return [
        System(AUTO, REPLICATE, partial(auto, adapt=adapt, table=table), ours=True),
        System("replicate", REPLICATE, partial(ours, parallel_style="replicate"), ours=True),
        System("shard_optimizer", REPLICATE, sharded, ours=True),
        System("fully_shard", SHARD, partial(ours, parallel_style="fully_shard"), ours=True),
    ]


def measure(workload: Workload, options: argparse.Namespace) -> list[Result]:
    """The figures of all systems on one model."""
    pace = Pace(2, 1) if options.smoke else Pace(options.rounds)
    with connect("loopback") as network, tempfile.TemporaryDirectory() as folder:
        return race(
            workload,
            network,
            systems(options.adapt, options.table)[: 2 if options.smoke else None],
            pace,
            ranks=2,
            device="cpu",
            folder=Path(folder),
            cold=False,
            report=lambda what: print(f"{workload.name}: {what}", file=sys.stderr),
        )


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.auto", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [each.name for each in WORKLOADS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="by default all")
    parser.add_argument("--rounds", type=int, default=Pace.rounds, help="of each system (%(default)s)")
    parser.add_argument("--adapt", action="store_true", help="let Auto adapt to what its first calls take")
    parser.add_argument("--table", type=Path, help="costs as python -m spmd calibrate writes them")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(given)


def main() -> int:
    """Run all models, print the table, write the figures."""
    options = parse(sys.argv[1:])
    workloads = [SMOKE] if options.smoke else [each for each in WORKLOADS if each.name in options.models]
    found = {each.name: measure(each, options) for each in workloads}
    failed = [
        f"{each.system.name} on {name}: {each.failed}" for name, all_ in found.items() for each in all_ if each.failed
    ]
    ms = {name: {each.system.name: 1e3 * each.median for each in run} for name, run in found.items()}
    beside = {name: times[AUTO] / min(t for system, t in times.items() if system != AUTO) for name, times in ms.items()}
    shown = Shown(title="ms a step, two ranks")
    for heading in ("model", *next(iter(ms.values())), "beside the best"):
        shown.add_column(heading, justify="left" if heading == "model" else "right")
    for name, times in ms.items():
        shown.add_row(name, *(f"{each:.1f}" for each in times.values()), f"{beside[name]:.2f}")
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(shown)
    print("\n".join(failed), end="\n" if failed else "", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps({"ms": ms, "beside the best": beside}, indent=1))
    return int(bool(failed) or (not options.smoke and max(beside.values()) > WORST))


if __name__ == "__main__":
    sys.exit(main())
