"""What ``spmd.Auto`` takes, beside all styles that it chooses from, in one run.

    python -m benchmarks.auto [--models width256x4] [--adapt] [--table costs.json] [--minutes 15] [--json out.json]

For each model of ``benchmarks.peers``, and four more, all systems live on two ranks of one core each, and take their
rounds in turn. A time is the median over rounds, of the slowest rank. "beside the best" is Auto's over that of the
fastest style: it ends with 1 where that is more than 1.1. A model's row is printed when it is found; each takes its
share of the minutes that are left, and at least three rounds. ``--table``: as ``python -m spmd calibrate`` writes it,
by default the built-in one. ``--smoke`` runs a tiny model in one style, and says nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import passes
import spmd
from examples.gpt import Config

from .peers.llama import Llama
from .peers.models import SMOKE, WORKLOADS, Model, Workload
from .peers.network import connect
from .peers.race import Pace, Result, race
from .peers.spellings import LAST, Spelling, TrainStep
from .peers.systems import REPLICATE, SHARD, System, ours

AUTO, WORST = "spmd.Auto", 1.1
MODELS = (
    *WORKLOADS,
    Workload("width128x24", Config(width=128, layers=24)),
    Workload("llama64x12", Config(width=64, layers=12), model=Llama),
    Workload("width512x6, a row", Config(width=512, layers=6), batch=1),  # little compute beside what is sent
    Workload("width64x12, 32 rows", Config(width=64, layers=12), batch=32),  # much of it
)


def auto(model: Model, spelling: Spelling = LAST, *, adapt: bool, table: Path | None) -> TrainStep:
    """The step in the style that ``spmd.Auto`` takes."""
    costs = {"table": passes.Table.read(table)} if table is not None else {}
    step = spmd.compile(parallel_mode=spmd.Auto(adapt=adapt, **costs))(spelling.step)
    return spelling.bind(step, model, torch.optim.AdamW(model.parameters()))


def systems(adapt: bool, table: Path | None) -> list[System]:
    """Auto, and the styles that it chooses from."""
    sharded = partial(ours, parallel_style="replicate", shard_optimizer=True)
    return [
        System(AUTO, REPLICATE, partial(auto, adapt=adapt, table=table), ours=True),
        System("replicate", REPLICATE, partial(ours, parallel_style="replicate"), ours=True),
        System("shard_optimizer", REPLICATE, sharded, ours=True),
        System("fully_shard", SHARD, partial(ours, parallel_style="fully_shard"), ours=True),
    ]


def measure(workload: Workload, options: argparse.Namespace, seconds: float) -> list[Result]:
    """The figures of all systems on one model, whose rounds begin within so many seconds."""
    pace = Pace(2, 1) if options.smoke else Pace(options.rounds, seconds=seconds)
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
    names = [each.name for each in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="by default all")
    parser.add_argument("--rounds", type=int, default=Pace.rounds, help="of each system at most (%(default)s)")
    parser.add_argument("--minutes", type=float, default=15, help="for all models together (%(default)s)")
    parser.add_argument("--adapt", action="store_true", help="let Auto adapt to what its first calls take")
    parser.add_argument("--table", type=Path, help="costs as python -m spmd calibrate writes them")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(given)


def main() -> int:
    """Run all models, print the table, write the figures."""
    options = parse(sys.argv[1:])
    workloads = [SMOKE] if options.smoke else [each for each in MODELS if each.name in options.models]
    ends, ms, beside, failed = time.perf_counter() + 60 * options.minutes, dict[str, Any](), dict[str, float](), []
    for k, workload in enumerate(workloads):
        found = measure(workload, options, (ends - time.perf_counter()) / (len(workloads) - k))
        times = ms[workload.name] = {each.system.name: 1e3 * each.median for each in found}
        best = min(t for system, t in times.items() if system != AUTO)
        beside[workload.name] = times[AUTO] / best
        if not k:
            print(f"{'ms a step, two ranks':24}", *(f"{name:>16}" for name in (*times, "beside the best")))
        figures = *(f"{each:.1f}" for each in times.values()), f"{beside[workload.name]:.2f}"
        print(f"{workload.name:24}", *(f"{each:>16}" for each in figures), flush=True)
        failed += [f"{each.system.name} on {workload.name}: {each.failed}" for each in found if each.failed]
    print("\n".join(failed), end="\n" if failed else "", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps({"ms": ms, "beside the best": beside}, indent=1))
    return int(bool(failed) or (not options.smoke and max(beside.values()) > WORST))


if __name__ == "__main__":
    sys.exit(main())
