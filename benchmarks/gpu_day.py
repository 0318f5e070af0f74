"""The first hour on a GPU, as one command of ten minutes at most: tests, a race of one rank, estimates and offload.

    python -m benchmarks.gpu_day [--out gpu_day] [--parts tests steps ...] [--models gpt1024x4] [--seconds 540]

It writes OUT.json and OUT.html. All systems of a race train one model in one process, in turn; their losses are first
compared with those of the plain step.

tests        those marked for a GPU
steps        ms of a step and of the host in it, device memory, seconds of the first steps: torch.compile, DDP and FSDP2
             of one rank, and ours
estimates    what a step was estimated to take beside what it took
offload      a step whose parameters and optimizer state live in the memory of the host
stages       two stages of a pipeline, as ranks that are simulated, since NCCL takes one rank of a GPU: by each schedule
             their programs run beside the plain step, and are compared with it

``--smoke`` runs tiny models on the CPU, where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.optim import AdamW

import passes
import spmd
from examples.gpt import Config

from .peers.llama import Llama
from .peers.models import SMOKE, RandomBatches, Workload, build
from .peers.spellings import CLEARS, LAST, BoundStep, Spelling, TrainStep, train_step
from .peers.systems import compiled, compiled_ddp, eager, fsdp

WORKLOADS = (
    Workload("gpt256x4", Config(width=256, layers=4)),  # bound by launches
    Workload("gpt1024x4", Config(width=1024, layers=4, heads=16, context=1024), batch=8),
    Workload("llama1024x4", Config(width=1024, layers=4, heads=16, context=1024), batch=8, model=Llama),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2}  # of a loss, relative: fp32 products are TF32
FIRST, ROUNDS, SECONDS = 6, 5, 0.2  # steps whose losses are compared; rounds, and seconds of a round


def reduce_overhead(model: Any, spelling: Spelling = LAST) -> TrainStep:
    """Forward and backward by ``torch.compile`` as CUDA graphs."""

    def one_iteration(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return spelling.step(*args).clone()

    fused = AdamW(model.parameters(), fused=True)
    return spelling.bind(one_iteration, torch.compile(model, mode="reduce-overhead"), fused)


def ours(model: Any, spelling: Spelling = LAST, offload_policy: Any = None, **options: Any) -> BoundStep:
    """spmd, with an optimizer whose counters are on the device; ``options`` are those of ``compile``."""
    mode = spmd.DataParallel(offload_policy=offload_policy)
    fused = AdamW(model.parameters(), fused=True)
    return spelling.bind(spmd.compile(spelling.step, parallel_mode=mode, **options), model, fused)


SYSTEMS: dict[str, Callable[[Any, Spelling], TrainStep]] = {
    "eager": eager,
    "torch.compile, fused AdamW": compiled,
    "torch.compile, CUDA graphs, fused AdamW": reduce_overhead,
    "DDP, compiled, fused AdamW": compiled_ddp,
    "FSDP2 per block, compiled, fused AdamW": partial(fsdp, compile_blocks=True),
    "spmd": ours,
    "spmd, CUDA graphs": partial(ours, cuda_graphs=True),
    "spmd, inductor": partial(ours, backend="inductor"),
    "spmd, inductor, CUDA graphs": partial(ours, backend="inductor", cuda_graphs=True),
}


@dataclass
class Row:
    """The figures of a system; ``failed``: why it has none."""

    system: str
    losses: list[float] = field(default_factory=list)
    first: float = 0.0  # seconds of the first steps, compiling included
    ms: list[float] = field(default_factory=list)  # of a step, by round
    host: list[float] = field(default_factory=list)  # of these, what the host takes until the call returns
    mb: float = 0.0  # of device memory, the most at a time, state included
    failed: str = ""


@dataclass
class Day:
    """What a run has found. ``end``: when it has to stop."""

    device: torch.device
    smoke: bool
    end: float
    found: dict[str, Any] = field(default_factory=dict)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def peak(self, row: Row) -> Iterator[None]:
        """Note the most memory that the body has at a time, beside what there was before it."""
        if self.device.type != "cuda":
            yield
            return
        gc.collect()  # what is freed later would count as less
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        row.mb = (torch.cuda.max_memory_allocated() - before) / 1e6


def main() -> int:
    """Run the parts, print their tables, and write the files. Returns 1 if a part, or a system of ours, failed."""
    options = parse(sys.argv[1:])
    day = Day(torch.device("cpu" if options.smoke else "cuda"), options.smoke, time.monotonic() + options.seconds)
    console = Console(record=True, width=140, highlight=False)
    with one_rank(day.device):
        for part in options.parts:
            try:
                PARTS[part](day, options, console)
            except Exception:
                day.found[part] = {"failed": traceback.format_exc()}
                console.print(f"{part} failed:\n{traceback.format_exc()}", markup=False)
            Path(f"{options.out}.json").write_text(json.dumps(about(day) | day.found, indent=1))
            console.save_html(f"{options.out}.html", clear=False)
    parts = [each for each in day.found.values() if isinstance(each, dict)]
    rows = [row for race in day.found.get("steps", {}).values() if isinstance(race, list) for row in race]
    rows += [row | {"system": "spmd"} for row in day.found.get("stages", []) if isinstance(row, dict)]
    has_failed = any(row["failed"] for row in rows if row["system"].startswith("spmd"))
    return int(has_failed or any(each.get("failed") or each.get("code") for each in parts))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="gpu_day", help="where to write OUT.json and OUT.html")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--models", nargs="+", default=[each.name for each in WORKLOADS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS])
    parser.add_argument("--clears", nargs="+", choices=CLEARS, default=["last", "first"], help="gradients")
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing after these")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    return parser.parse_args(arguments)


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of one rank, which DDP and FSDP2 need."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def about(day: Day) -> dict[str, Any]:
    """The machine and the versions."""
    device = torch.cuda.get_device_name() if day.device.type == "cuda" else "cpu"
    return {"device": device, "torch": torch.__version__, "spmd": spmd.__version__, "smoke": day.smoke}


def tests(day: Day, options: argparse.Namespace, console: Console) -> None:
    """Run the tests that are marked for a GPU."""
    chosen = ["-m", "gpu", "tests"] if not day.smoke else ["-m", "gpu", "tests/spmd/test_gpu.py"]
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", *chosen], capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    day.found["tests"] = {"last": lines[-1] if lines else "", "code": run.returncode}
    console.print("\n".join(lines[-1:] if run.returncode == 0 else lines[-60:]), markup=False)


def steps(day: Day, options: argparse.Namespace, console: Console) -> None:
    """Race all systems on each model, in each dtype and spelling."""
    torch.set_float32_matmul_precision("high")
    chosen = [SMOKE] if day.smoke else [each for each in WORKLOADS if each.name in options.models]
    for workload, dtype, clears in itertools.product(chosen, options.dtypes, options.clears):
        if time.monotonic() < day.end:
            systems = {name: partial(SYSTEMS[name], spelling=CLEARS[clears]) for name in options.systems}
            rows, name = race(day, workload, dtype, systems), f"{workload.name} {dtype}, cleared {clears}"
            day.found.setdefault("steps", {})[name] = [asdict(row) for row in rows]
            console.print(table(name, rows))


def race(day: Day, workload: Workload, dtype: str, systems: dict[str, Callable[[Any], TrainStep]]) -> list[Row]:
    """The rows of one race."""
    rows = [Row(name) for name in systems]
    running: list[tuple[Row, Callable[[], Any]]] = []
    for row, make in zip(rows, systems.values(), strict=True):
        try:
            with day.peak(row):
                running.append((row, start(day, workload, dtype, make, row)))
        except Exception as error:
            row.failed = f"{type(error).__name__}: {error}"[:2000]
            gc.collect()
    for row in rows[1:]:
        off = [abs(one / other - 1) for one, other in zip(row.losses, rows[0].losses, strict=False)]
        if max(off, default=0.0) > TOLERANCES[dtype]:
            row.failed = f"its losses {row.losses} are not those of the plain step, {rows[0].losses}"
    for _ in range(1 if day.smoke else ROUNDS):
        for row, step in running:
            note(day, row, step)
    return rows


def start(day: Day, workload: Workload, dtype: str, make: Callable[[Any], TrainStep], row: Row) -> Callable[[], Any]:
    """Run the first steps of a system; returns a function that runs one more."""
    model = build(workload, day.device).to(DTYPES[dtype])
    batches = RandomBatches(workload, 1, 0, 1, day.device)
    begin = time.perf_counter()
    train = make(model)
    row.losses = [train(*batches.draw()).item() for _ in range(FIRST)]
    row.first = time.perf_counter() - begin
    return lambda: train(*batches.draw())


def note(day: Day, row: Row, step: Callable[[], Any]) -> float:
    """Note milliseconds of a step, of as many as take some time, in the device and in the host."""
    count, least = 1, 0.0 if day.smoke else SECONDS
    while True:
        day.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        host = time.perf_counter() - begin
        day.synchronize()
        took = time.perf_counter() - begin
        if took >= least:
            row.ms.append(1000 * took / count)
            row.host.append(1000 * host / count)
            return row.ms[-1]
        count = max(2 * count, int(count * least / took))


def table(title: str, rows: list[Row]) -> Table:
    """The rows as a table."""
    drawn = Table("system", "ms", "min - max", "host, ms", "MB", f"first {FIRST}, s", title=title)
    for row in rows:
        if row.failed or not row.ms:
            drawn.add_row(row.system, row.failed)
            continue
        spread = f"{min(row.ms):.2f} - {max(row.ms):.2f}"
        drawn.add_row(
            row.system,
            f"{statistics.median(row.ms):.2f}",
            spread,
            f"{min(row.host):.2f}",
            f"{row.mb:.0f}",
            f"{row.first:.1f}",
        )
    return drawn


def estimates(day: Day, options: argparse.Namespace, console: Console) -> None:
    """Estimate a step of ours, by the built-in table, beside its time."""
    drawn = Table("model", "estimated, ms", "measured, ms", title="estimates")
    for workload in [SMOKE] if day.smoke else WORKLOADS:
        for dtype in DTYPES:
            model = build(workload, day.device).to(DTYPES[dtype])
            train, batches = ours(model), RandomBatches(workload, 1, 0, 1, day.device)
            for _ in range(3):
                train(*batches.draw())
            program = train.step.program
            found = passes.estimate(program)
            took, name = note(day, Row("spmd"), partial(_next, train, batches)) / 1000, f"{workload.name} {dtype}"
            figures = {"estimated": found and found.seconds, "measured": took}
            day.found.setdefault("estimates", {})[name] = figures
            drawn.add_row(name, f"{1000 * found.seconds:.2f}" if found else "none", f"{1000 * took:.2f}")
    console.print(drawn)


def _next(train: TrainStep, batches: RandomBatches) -> Any:
    return train(*batches.draw())


def offload(day: Day, options: argparse.Namespace, console: Console) -> None:
    """A step with parameters and state on the device, and with both on the host."""
    if day.device.type != "cuda":
        day.found["offload"] = {"skipped": "no GPU"}
        return
    workload = WORKLOADS[1]
    policies = {"on the device": None, "on the host, pinned": spmd.OffloadPolicy()}
    rows = [_offloaded(day, workload, name, policy) for name, policy in policies.items()]
    day.found["offload"] = [asdict(row) for row in rows]
    console.print(table(f"offload, {workload.name}, fp32", rows))


def _offloaded(day: Day, workload: Workload, name: str, policy: spmd.OffloadPolicy | None) -> Row:
    """The row of one policy. What it made is freed at its end, or the next row would seem to take no memory."""
    row = Row(name)
    where = torch.device("cpu") if policy else day.device
    with day.peak(row):
        model, batches = build(workload, where), RandomBatches(workload, 1, 0, 1, day.device)
        train = ours(model, offload_policy=policy)
        begin = time.perf_counter()
        row.losses = [train(*batches.draw()).item() for _ in range(FIRST)]
        row.first = time.perf_counter() - begin
    for _ in range(3):
        note(day, row, partial(_next, train, batches))
    return row


def stages(day: Day, options: argparse.Namespace, console: Console) -> None:
    """Verify two ranks of a pipeline."""
    workload, drawn = SMOKE if day.smoke else WORKLOADS[0], Table("schedule", "", "s", title="stages")
    schedules: dict[str, dict[str, Any]] = {"1f1b": {}, "gpipe": {}, "zb-h1": {}, "interleaved": {"virtual_stages": 2}}
    for schedule in [*schedules][: 1 if day.smoke else None]:
        mode = {"axes": {"stages": "pp"}, "micro_batches": 4, "schedule": schedule, **schedules[schedule]}
        model, batch = build(workload, day.device), RandomBatches(workload, 1, 0, 1, day.device).draw()
        step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(**mode))
        begin = time.perf_counter()
        verdict = spmd.verify(step, model, AdamW(model.parameters()), *batch, world=2, mesh={"pp": 2})
        took, failed = time.perf_counter() - begin, "" if verdict else str(verdict)
        day.found.setdefault("stages", []).append({"schedule": schedule, "seconds": took, "failed": failed})
        drawn.add_row(schedule, failed or "as the plain step", f"{took:.1f}")
    console.print(drawn)


PARTS = {"tests": tests, "steps": steps, "estimates": estimates, "offload": offload, "stages": stages}

if __name__ == "__main__":
    sys.exit(main())
