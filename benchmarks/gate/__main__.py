"""Is B slower than A? Each figure by itself, in pairs of fresh processes, beside whatever else the machine does.

    make gate BASE=v1.0                                         this checkout beside a commit, in ten minutes
    make gate A="--style replicate" B="--style fully_shard"     two options, spellings or systems of this checkout
    make gate BASE=v1.0 QUICK=1                                 in one minute

    python -m benchmarks.gate [--base COMMIT] [--a OPTIONS] [--b OPTIONS] [--seconds 600] [--network 500mbit] [--line]

Options of an arm: --style, --mode NAME=VALUE, --compile NAME=VALUE, --system NAME, --clears last first,
--watch PATTERN STATISTICS, --slower SHARE;
``--a --help`` lists them. Two ranks, each bound to a core, train a small GPT with default options by "fully_shard".

step        the time of a step that nothing disturbed, and the CPU time of all ranks; gradients cleared last, or first
compile     wall and CPU time of both first calls
warm start  the same of the first call of a step that the cache has
import      CPU time of the import of spmd, without what both arms import of torch and others
memory      the peak of a rank's resident set, above that of a rank that has joined its group; of all ranks together

"slower": all of the 99% interval of B / A is above 1.01. "not slower": all of it is below 1.02. Else the gate cannot
tell, and estimates how many pairs would. The exit code is 1 where a figure is slower, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from ..peers.models import SMOKE, WORKLOADS, Config, Workload
from ..peers.network import NoNetworkError, connect
from ..peers.team import SystemFailedError
from .arms import arm, checkouts, described
from .disturb import disturbance
from .figures import figures
from .pairs import PARTS, Bench, Sample, explore, pairs
from .preload import common, preload
from .table import line, plain, rows, table
from .verdicts import LEAST

SMALL = Workload("width64x2", Config(width=64, layers=2, context=64))
SMALLEST = Workload("width64x1", Config(width=64, layers=1, context=64))
MODELS = {each.name: each for each in (SMALL, SMALLEST, *WORKLOADS, SMOKE)}


def main(given: Sequence[str]) -> int:
    """Measure and print. Returns 1 if a figure is slower, 130 after Ctrl-C."""
    options = parse(given)
    signal.signal(signal.SIGTERM, _stop)
    try:
        found = rows(figures(options.arms, options.figures), measured(options))
    except (NoNetworkError, SystemFailedError, ValueError) as refused:
        raise SystemExit(f"gate: {refused}") from None
    except KeyboardInterrupt:
        return 130
    if options.line:
        print(line(*names(options), found))
    else:
        a, b = names(options)
        title = f"A: {a}\nB: {b}\n{options.model}, {options.network}, {found[0].verdict.pairs} pairs"
        Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table(title, found))
    if options.json:
        options.json.write_text(json.dumps(plain(found)))
    return int(any(row.verdict.slower for row in found))


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", metavar="COMMIT", help="what A is of; B is this checkout as it is now")
    parser.add_argument("--a", default="", metavar="OPTIONS", help="of arm A, in one text")
    parser.add_argument("--b", default="", metavar="OPTIONS", help="of arm B")
    parser.add_argument("--seconds", type=float, default=600, help="for all of it (%(default)s); five pairs at least")
    parser.add_argument("--pairs", type=int, help="this number of pairs, however long they take")
    parser.add_argument("--figures", nargs="+", choices=PARTS, default=PARTS, help="by default all")
    parser.add_argument("--model", choices=MODELS, default=SMALL.name, help="%(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="%(default)s")
    parser.add_argument("--network", default="loopback", help="or the rate of a link between two hosts")
    parser.add_argument("--beside", type=float, default=0.0, metavar="SHARE", help="keep a core busy: 0.5 is half")
    parser.add_argument("--line", action="store_true", help="print one line, for the notes of a release")
    parser.add_argument("--json", type=Path, help="also write all pairs and the verdicts to this file")
    options = parser.parse_args(given)
    if platform.system() != "Linux":
        parser.error(f"this benchmark reads Linux's /proc, and this is {platform.system()}")
    if not 0 <= options.beside <= 1:
        parser.error(f"--beside is a share of the time, from 0 to 1, and this is {options.beside:g}")
    if not (options.base or options.a or options.b):
        parser.error("expected --base, or --a and --b: what is to be compared?")
    options.arms = arm("A", options.a), arm("B", options.b)
    if len(options.arms[0].clears) != len(options.arms[1].clears):
        parser.error("expected arms that clear gradients in the same number of spellings")
    return options


def measured(options: argparse.Namespace) -> list[dict[str, Sample]]:
    """Measure pairs until the time is over, five at least: for each arm by name, its sample."""
    end, found = time.monotonic() + options.seconds, []
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(Console(stderr=True).status("both arms once, unmeasured"))
        bench = prepare(options, stack)
        steps, began = warm_up(bench), time.monotonic()
        stack.enter_context(disturbance(options.beside))
        for pair in pairs(bench, steps):
            found.append(pair)
            now = time.monotonic()
            enough = len(found) >= LEAST and now + (now - began) / len(found) > end
            if len(found) == options.pairs or (enough and not options.pairs):
                break
            status.update(f"{len(found)} pairs, {max(0, end - now):.0f} s left")
    return found


def prepare(options: argparse.Namespace, stack: contextlib.ExitStack) -> Bench:
    """The arms with their checkouts, the network, and a folder; all are removed with the context."""
    arms = options.arms
    if options.base:
        base, here = stack.enter_context(checkouts(options.base))
        arms = replace(arms[0], source=base), replace(arms[1], source=here)
    network = stack.enter_context(connect(options.network))
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return Bench(arms, MODELS[options.model], network, folder, options.figures, options.ranks)


def warm_up(bench: Bench) -> int:
    """Run each arm once, and import here what both import of others. Returns the number of steps in a lap."""
    same_source = bench.arms[0].source == bench.arms[1].source
    a = b = explore(bench, bench.arms[0])
    if not same_source or "warm" in bench.parts:
        b = explore(bench, bench.arms[1])
    preload(common(a.imported, b.imported))
    if "spmd" in sys.modules and not (same_source and "import" not in bench.parts):
        raise ValueError("expected a process that has not imported spmd, which each arm does, but this one has")
    return a.steps


def names(options: argparse.Namespace) -> tuple[str, str]:
    """What the arms are, for people."""
    a, b = (text or "default options" for text in (options.a, options.b))
    if not options.base:
        return a, b
    return f"{described(options.base)} ({a})", f"this checkout ({b})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
