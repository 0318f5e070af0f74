"""What compiling costs: seconds per stage, nodes and memory for a GPT with AdamW on many ranks that are not there.

    python benchmarks/compiler.py [--depths 6 12 24 48] [--worlds 8 1024] [--plans fully_shard tensor_parallel]

A process per measurement, on a fake group: rank 0 compiles the whole step, optimizer state included, and does not run
it. Seconds are of CPU, on one core, so that other work on the machine does not count, and exclusive: they add up to the
total. Memory is the most that the process had resident, and what it had before (torch, mostly): nobody writes to the
model's tensors. The first plan is FSDP's, the second Megatron's on a 2-D mesh (128 x 8 for 1,024 ranks). ``--smoke``
measures one tiny model, in this process.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import passes
import spmd
from examples.gpt import GPT, Config

ROOT = Path(__file__).parent.parent
PLANS = ("fully_shard", "tensor_parallel")


@dataclass(frozen=True)
class Setting:
    """What is compiled, and for how many ranks."""

    depth: int
    world: int
    plan: str = "fully_shard"
    width: int = 1024
    heads: int = 16
    time: int = 128


@dataclass
class Stopwatch:
    """Seconds of CPU by stage, exclusive: what an inner stage takes does not count for the outer one."""

    seconds: Counter[str] = field(default_factory=Counter)
    _inner: list[float] = field(default_factory=lambda: [0.0])

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time counted as ``stage``."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.process_time() - start
                self.seconds[stage] += took - self._inner.pop()
                self._inner[-1] += took

        return run

    def watch(self, stage: str, owner: Any, name: str) -> None:
        """Count every call of ``owner.name`` from now on as ``stage``."""
        setattr(owner, name, self.timed(stage, getattr(owner, name)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A language model's step."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state(setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step, in memory that nobody has written to."""
    with torch.device("meta"):
        model = GPT(Config(setting.width, setting.depth, setting.heads, setting.time, vocabulary=8 * setting.width))
    model = model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        averages = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **averages}
    return model, optimizer


def mode(setting: Setting) -> spmd.ParallelMode:
    """``tensor_parallel``: Megatron's placements over the inner axis of a 2-D mesh, 128 x 8 for 1,024 ranks."""
    if setting.plan != "tensor_parallel":
        return spmd.DataParallel("fully_shard")
    inner = 8 if setting.world >= 64 else 2
    mesh = init_device_mesh("cpu", (setting.world // inner, inner), mesh_dim_names=("dp", "tp"))
    by_column, by_row = {"tp": Shard(0)}, {"tp": Shard(1)}
    params = {"*.qkv.weight": by_column, "*.up.weight": by_column, "*.out.weight": by_row, "*.down.weight": by_row}
    return spmd.DTensorExpand(mesh=mesh, params=params)


def watch_stages(stopwatch: Stopwatch) -> None:
    """Name the stages of a compile."""
    from passes import runner
    from spmd import step
    from spmd.capture import make_program

    stopwatch.watch("capture: trace", make_program.Trace, "graph_module")
    stopwatch.watch("capture: make functional", make_program, "_functional")
    stopwatch.watch("capture: the rest", step, "capture")
    stopwatch.watch("partition", spmd.PlannedMode, "partition")
    stopwatch.watch("split live state", step, "prepare")
    for each in passes.default():
        stopwatch.watch(f"pass {type(each).__name__}", type(each), "rewrite")
    stopwatch.watch("check after each pass", runner, "check_program")
    stopwatch.watch("passes: the rest", passes, "run")
    stopwatch.watch("lower", step, "lower")


def measure(setting: Setting) -> dict[str, Any]:
    """Compile once in this process: ``seconds`` by stage, ``nodes`` after capture, partition and passes, ``bytes``."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.world)
    model, optimizer = state(setting)
    x = torch.zeros(1, setting.time, dtype=torch.int64)
    step = spmd.compile(parallel_mode=mode(setting))(train_step)
    call = step._dispatch.fit((model, optimizer, x, x), {}).call
    before, stopwatch = resident(), Stopwatch()
    watch_stages(stopwatch)
    start = time.perf_counter()
    compiled = stopwatch.timed("all the rest", step._compile_on_all_ranks)(call)
    wall = time.perf_counter() - start
    dist.destroy_process_group()
    return {
        "setting": asdict(setting),
        "seconds": dict(stopwatch.seconds),
        "total": sum(stopwatch.seconds.values()),
        "wall": wall,
        "nodes": {
            "captured": len(compiled.captured.program.graph.nodes),
            "partitioned": len(compiled.partitioned.graph.nodes),
            "final": len(compiled.program.graph.nodes),
        },
        "bytes": {"before": before, "peak": resident()},
    }


def resident() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_apart(setting: Setting) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(asdict(setting))]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def table(plan: str, found: list[dict[str, Any]]) -> Table:
    """A column for each measurement."""
    shown = Table(title=f"{plan}, width {found[0]['setting']['width']}, AdamW: seconds")
    shown.add_column("stage")
    for each in found:
        shown.add_column(f"{each['setting']['depth']} layers\n{each['setting']['world']:,} ranks", justify="right")
    for stage in found[-1]["seconds"]:
        shown.add_row(stage, *(f"{each['seconds'].get(stage, 0):.2f}" for each in found))
    shown.add_section()
    shown.add_row("total", *(f"{each['total']:.2f}" for each in found), style="bold")
    shown.add_row("total, by the clock", *(f"{each['wall']:.2f}" for each in found))
    shown.add_row("total for a layer", *(f"{each['total'] / each['setting']['depth']:.2f}" for each in found))
    for stage in found[-1]["nodes"]:
        shown.add_row(f"nodes, {stage}", *(f"{each['nodes'][stage]:,}" for each in found))
    for name in found[-1]["bytes"]:
        shown.add_row(f"GB, {name}", *(f"{each['bytes'][name] / 1e9:.2f}" for each in found))
    return shown


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 1024], help="the last for each depth")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--smoke", action="store_true", help="one tiny model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Setting(**options.one))))
        return
    if options.smoke:
        options.depths, options.worlds, options.plans, options.width = [1], [8], ["fully_shard"], 64
    *others, world = options.worlds
    places = [(min(options.depths), other) for other in others] + [(depth, world) for depth in options.depths]
    everything = []
    for plan in options.plans:
        settings = [Setting(depth, ranks, plan, options.width) for depth, ranks in places]
        found = [measure(setting) if options.smoke else measure_apart(setting) for setting in settings]
        Console().print(table(plan, found))
        everything += found
    if options.json:
        options.json.write_text(json.dumps(everything, indent=2))


if __name__ == "__main__":
    main()
