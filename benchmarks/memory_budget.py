"""Steps with a budget of memory beside the same steps without one: peak memory, time, and numbers.

    python -m benchmarks.memory_budget [--models GPT BERT] [--styles replicate fully_shard] [--share 0.6] [--rounds 7]

For each model two ranks compile its step without a budget. Two others compile it with ``--share`` of what that step was
measured to need, and then without, and run both in turn, on equal batches, with dropout where a model has it. Losses,
parameters and buffers must be the same bits after all rounds. Memory is measured of what a process compiles first.

wants                  MB of a rank without a budget: planned for values, and measured
graphs                 of those measured, MB of the graphs of the program
fitted                 MB with the budget, likewise
used                   measured MB with the budget over the budget
time                   of a step with the budget over one without; the median over rounds, of the slowest rank
again                  ops that backward computes again

What is measured is the peak of resident memory that no other process can have, above the same process before the model
was made, and what other ranks can read of this one. That counts state, activations, the graphs of the programs, and
what ops need while they run. Each rank has one core. ``--smoke`` runs one tiny model.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

import spmd
from examples.gpt import GPT, Config

RANKS = 2
STEPS = 2  # in a round
DROPOUT = 0.1
TEXT = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}

Batch = dict[str, Tensor]


class ScoredGPT(GPT):
    """The example GPT with its loss."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean over all bytes."""
        return F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten())


class ResidualMLP(nn.Module):
    """Blocks of two linear layers with a norm and dropout."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(DROPOUT),
                nn.Linear(4 * width, width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), labels)


class ResidualConvolutions(nn.Module):
    """Blocks of two convolutions with batch norms, on images that stay as large."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


@dataclass(frozen=True)
class Workload:
    """A model, and what makes a rank's batch of it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


def _transformer(name: str, **config: Any) -> nn.Module:
    """A model of transformers from its config, with the dropout that its config has by default."""
    import transformers

    cls = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class(**config))
    return model.train()


def _text(rows: int, length: int, random: torch.Generator) -> Batch:
    ids = torch.randint(8, 256, (rows, length), generator=random)
    return {"input_ids": ids, "labels": ids}


def _rows(shape: tuple[int, ...], name: str, classes: int, random: torch.Generator) -> Batch:
    return {
        name: torch.randn(shape, generator=random),
        "labels": torch.randint(classes, shape[:1], generator=random),
    }


_GPT2 = {"vocab_size": 512, "n_embd": 128, "n_layer": 5, "n_head": 4, "n_positions": 128}
_T5 = {"vocab_size": 512, "d_model": 128, "d_kv": 32, "d_ff": 384, "num_layers": 3, "num_heads": 4}
_VIT = {key: TEXT[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
_NOISY = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
_STAGES = {"hidden_sizes": [32, 64], "depths": [2, 3], "num_stages": 2, "drop_path_rate": DROPOUT}

WORKLOADS = (
    Workload("GPT", partial(ScoredGPT, Config(width=192, layers=5)), partial(_text, 32, 128)),
    Workload("deep GPT", partial(ScoredGPT, Config(width=64, layers=8)), partial(_text, 32, 128)),
    Workload("GPT2", partial(_transformer, "GPT2LMHeadModel", **_GPT2), partial(_text, 16, 128)),
    Workload(
        "Llama",
        partial(_transformer, "LlamaForCausalLM", num_key_value_heads=2, **TEXT),
        partial(_text, 16, 128),
    ),
    Workload("BERT", partial(_transformer, "BertForMaskedLM", **TEXT), partial(_text, 16, 128)),
    Workload(
        "T5",
        partial(_transformer, "T5ForConditionalGeneration", decoder_start_token_id=0, **_T5),
        partial(_text, 16, 96),
    ),
    Workload(
        "ViT",
        partial(
            _transformer, "ViTForImageClassification", image_size=64, patch_size=8, num_labels=10, **_VIT, **_NOISY
        ),
        partial(_rows, (96, 3, 64, 64), "pixel_values", 10),
    ),
    Workload("MLP", partial(ResidualMLP, 128, 6), partial(_rows, (4096, 128), "x", 10)),
    Workload("batch norms", partial(ResidualConvolutions, 16, 12), partial(_rows, (96, 3, 32, 32), "x", 10)),
    Workload(
        "ConvNext",
        partial(_transformer, "ConvNextForImageClassification", num_labels=10, **_STAGES),
        partial(_rows, (48, 3, 128, 128), "pixel_values", 10),
    ),
)
SMOKE = Workload("smoke", partial(ResidualMLP, 16, 4), partial(_rows, (12_000, 16), "x", 10))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """Forward, backward, update; the loss is the model's own."""
    found: Any = model(**batch)
    loss: Tensor = found if isinstance(found, Tensor) else found.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass
class Training:
    """One model and its step, with what was measured of it."""

    workload: Workload
    style: str
    memory: int | None
    losses: list[float] = field(default_factory=list)
    held: int = 0  # bytes, measured between calls
    peak: int = 0  # and in one
    seconds: list[float] = field(default_factory=list)  # of a step, by round, of this rank
    compile_seconds: float = 0.0

    def start(self) -> None:
        """Make the model, compile, and measure the peak of calls that do not compile."""
        idle = idle_bytes()
        torch.manual_seed(0)
        self.model = self.workload.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        mode = spmd.DataParallel(self.style)  # type: ignore[arg-type]
        self.step = spmd.compile(train_step, parallel_mode=mode, memory=self.memory)
        self.random = torch.Generator().manual_seed(1 + dist.get_rank())
        spmd.seed(7)  # of dropout
        begin = time.perf_counter()
        self.call()
        self.compile_seconds = time.perf_counter() - begin
        self.call()  # some models change a setting in their first forward, which compiles once more
        self.held = idle_bytes() - idle + self.readable
        self.peak = _largest(peak_bytes(self.call) - idle + self.readable)
        self.drawn = spmd.rng_state()

    def call(self) -> None:
        """One step."""
        self.losses.append(self.step(self.model, self.optimizer, self.workload.batch(self.random)).item())

    def round(self) -> None:
        """Some steps, with their time."""
        batches = [self.workload.batch(self.random) for _ in range(STEPS)]
        spmd.set_rng_state(self.drawn)
        dist.barrier()
        begin = time.perf_counter()
        found = [self.step(self.model, self.optimizer, batch) for batch in batches]
        self.seconds.append((time.perf_counter() - begin) / STEPS)
        self.losses += [loss.item() for loss in found]
        self.drawn = spmd.rng_state()

    def wants(self) -> dict[str, int]:
        """The bytes of the plan, of the arena in it and of what is allocated beside it, and those measured."""
        plans = self.step.report().memory.values()
        planned = {name: sum(getattr(plan, name) for plan in plans) for name in ("peak", "arena", "allocated")}
        graphs = _largest(self.held - planned["peak"] + planned["allocated"])
        return {name: _largest(size) for name, size in planned.items()} | {"graphs": graphs, "measured": self.peak}

    @property
    def readable(self) -> int:
        """The bytes that other ranks can read."""
        return sum(plan.arena for space, plan in self.step.report().memory.items() if "shared" in space)

    @property
    def again(self) -> int:
        """The ops that backward computes again."""
        program = self.step.program
        assert program is not None
        return sum("recompute_of" in node.meta for node in program.graph.nodes)

    def state(self) -> list[Tensor]:
        """This rank's part of all parameters and buffers."""
        values = [*self.model.parameters(), *self.model.buffers()]
        return [value.to_local() if isinstance(value, DTensor) else value for value in map(torch.detach, values)]


def measure_plain(workload: Workload, style: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the step without a budget; returns the budget that follows."""
    plain = Training(workload, style, None)
    plain.start()
    return plain.wants() | {"budget": round(options.share * plain.peak), "compile": plain.compile_seconds}


def measure_fitted(workload: Workload, style: str, options: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Measure memory with the budget, and time beside a step without."""
    fitted, plain = Training(workload, style, budget), Training(workload, style, None)
    try:
        fitted.start()
    except spmd.MemoryBudgetError as refused:
        return {"refused": str(refused)}
    row = {f"fitted_{name}": value for name, value in fitted.wants().items()}
    plain.start()
    for number in range(options.rounds):
        for each in (plain, fitted) if number % 2 else (fitted, plain):
            each.round()
    ratios = [_slowest(b) / _slowest(a) for a, b in zip(plain.seconds, fitted.seconds, strict=True)]
    return row | {
        "time": statistics.median(ratios),
        "least_time": min(ratios),
        "most_time": max(ratios),
        "seconds": statistics.median(plain.seconds),
        "again": fitted.again,
        "equal": _all_equal(plain, fitted),
        "compile_fitted": fitted.compile_seconds,
        "note": next(note for note in fitted.step.program.notes if note.startswith("memory: ")),  # type: ignore[union-attr]
    }


def _all_equal(one: Training, other: Training) -> bool:
    """Whether losses, parameters and buffers are the same bits on all ranks."""
    equal = one.losses == other.losses and all(map(torch.equal, one.state(), other.state()))
    return _largest(int(not equal)) == 0


def _largest(value: int) -> int:
    """The largest of all ranks."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def idle_bytes() -> int:
    """The memory of this process that no other one can have, without what malloc keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("RssAnon")


def peak_bytes(run: Callable[[], object]) -> int:
    """The most of that while ``run`` runs."""
    idle_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    run()
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def run_rank(rank: int, measure: Callable[..., dict[str, Any]], workload: Workload, folder: str) -> None:
    """One rank: measure, and write what was found."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    workload.build()  # imports what the model needs
    Training(SMOKE, "replicate", 1 << 30).start()  # imports what compiling imports
    found = measure()
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def on_fresh_ranks(measure: Callable[..., dict[str, Any]], workload: Workload, *args: Any) -> dict[str, Any]:
    """Measure on ranks that have compiled nothing like it."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            run_rank, (partial(measure, workload, *args), workload, folder), nprocs=RANKS, start_method="fork"
        )
        found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
        return found


def row_of(workload: Workload, style: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    row = {"model": workload.name, "style": style} | on_fresh_ranks(measure_plain, workload, style, options)
    row |= on_fresh_ranks(measure_fitted, workload, style, options, row["budget"])
    print(json.dumps(row), flush=True)
    return row


def workloads(options: argparse.Namespace) -> list[Workload]:
    """The models to run."""
    return [SMOKE] if options.smoke else [each for each in WORKLOADS if each.name in options.models]


def table_of(rows: list[dict[str, Any]], share: float) -> Table:
    """The rows, in MB."""
    shown = Table(title=f"a budget of {share:.0%} of what a step wants, {RANKS} ranks")
    for heading in ("model", "style"):
        shown.add_column(heading)
    for heading in ("wants", "graphs", "budget", "fitted", "used", "time", "again", "bits"):
        shown.add_column(heading, justify="right")
    for row in rows:
        wants, graphs, budget = f"{mega(row['peak'])}, {mega(row['measured'])}", mega(row["graphs"]), row["budget"]
        start = [row["model"], row["style"], wants, graphs, mega(budget)]
        if "refused" in row:
            shown.add_row(*start, "refused", *[""] * 4)
            continue
        fitted = f"{mega(row['fitted_peak'])}, {mega(row['fitted_measured'])}"
        used, bits = f"{row['fitted_measured'] / budget:.3f}", "equal" if row["equal"] else "DIFFER"
        shown.add_row(*start, fitted, used, f"{row['time']:.2f}x", str(row["again"]), bits)
    return shown


def mega(size: int) -> str:
    """Bytes in MB."""
    return f"{size / 1e6:.1f}"


def parse() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in WORKLOADS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="by default all")
    parser.add_argument("--styles", nargs="+", choices=("replicate", "fully_shard"), default=["replicate"])
    parser.add_argument("--share", type=float, default=0.6, help="of what the step wants (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help=f"of {STEPS} steps (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="one tiny model, one round")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse()
    if options.smoke:
        options.rounds = 1
    rows = [row_of(workload, style, options) for workload in workloads(options) for style in options.styles]
    console = Console(width=140)
    console.print(table_of(rows, options.share))
    console.print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
