"""Cost of compiling: seconds per stage, nodes and memory for large models with AdamW on many fake ranks.

    python -m benchmarks.compiler [--depths 6 12 24 48] [--worlds 8 1024] [--plans fully_shard tensor_parallel]
    python -m benchmarks.compiler --plans experts --depths 8 16 32 61

One process per measurement, on a fake process group: rank 0 compiles the whole step, optimizer state included, and does
not run it. Seconds are CPU time on one core, so that other work on the machine does not count, and exclusive: they add
up to the total. Memory is the peak of the resident set, and its size before (mostly torch): the model's tensors are
never written to. ``--smoke`` measures one tiny model, in this process.

The first plan is that style on a GPT; the second splits its products as Megatron-LM does, on a 2-D mesh (128 x 8 for
1,024 ranks). ``experts`` takes DeepSeek-V3 as ``transformers`` has it, with 256 experts over groups of 8 ranks in all
layers but the first three: the graph is that of the published model, whose layers are 61. Its width is 256, which
takes no node away.

The last line of a table is the exponent of a power law that is fitted to seconds and nodes: 1 is linear.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import resource
import statistics
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
from spmd.dispatch import Turn

ROOT = Path(__file__).parent.parent
WIDTHS = {"fully_shard": 1024, "tensor_parallel": 1024, "experts": 256}
GROUP = 8  # ranks of the inner axis: those that split products, or that have all experts


@dataclass(frozen=True)
class Setting:
    """One measurement: the model, the number of ranks and the plan."""

    depth: int
    world: int
    plan: str
    width: int
    heads: int = 16
    time: int = 128


@dataclass
class Stopwatch:
    """Seconds of CPU time by stage, exclusive: the time of an inner stage does not count for the outer one."""

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
        """Count every later call of ``owner.name`` as ``stage``."""
        setattr(owner, name, self.timed(stage, getattr(owner, name)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The train step of a language model."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Logits(nn.Module):
    """A model of transformers as a function of tokens alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (rows, time). The result: (rows, time, vocabulary)."""
        found: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return found


def gpt(setting: Setting) -> nn.Module:
    """The model of the first two plans."""
    return GPT(Config(setting.width, setting.depth, setting.heads, setting.time, vocabulary=8 * setting.width))


def deepseek(setting: Setting) -> nn.Module:
    """DeepSeek-V3 of a small width: numbers of experts, groups, choices and dense layers are those published."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    width, heads = setting.width, setting.heads
    head = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    config = DeepseekV3Config(
        hidden_size=width,
        vocab_size=8 * width,
        num_hidden_layers=setting.depth,
        first_k_dense_replace=min(3, setting.depth - 1),
        intermediate_size=3 * width,
        moe_intermediate_size=width // 2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=width // 4,
        kv_lora_rank=width // 4,
        experts_implementation="grouped_mm",
        **head,
    )
    return Logits(DeepseekV3ForCausalLM(config))


def state(setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer as after one step, in memory that was never written to."""
    with torch.device("meta"):
        model = (deepseek if setting.plan == "experts" else gpt)(setting)
    model = model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        averages = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **averages}
    return model, optimizer


def mode(setting: Setting) -> spmd.ParallelMode:
    """The plan's mode. ``tensor_parallel`` and ``experts`` have a 2-D mesh, 128 x 8 for 1,024 ranks."""
    if setting.plan == "fully_shard":
        return spmd.DataParallel("fully_shard")
    inner = GROUP if setting.world >= 64 else 2
    names = ("dp", "ep" if setting.plan == "experts" else "tp")
    mesh = init_device_mesh("cpu", (setting.world // inner, inner), mesh_dim_names=names)
    if setting.plan == "experts":
        return spmd.DataParallel("fully_shard", mesh=mesh, axes={"batch": names, "experts": "ep"})
    by_column, by_row = {"tp": Shard(0)}, {"tp": Shard(1)}
    params = {"*.qkv.weight": by_column, "*.up.weight": by_column, "*.out.weight": by_row, "*.down.weight": by_row}
    return spmd.DTensorExpand(mesh=mesh, params=params)


def watch_stages(stopwatch: Stopwatch) -> None:
    """Watch the functions that the stages of a compile consist of."""
    from passes import runner
    from spmd import capture_call, step_compiler
    from spmd.capture import make_program

    stopwatch.watch("capture: trace", make_program.Trace, "graph_module")
    stopwatch.watch("capture: make functional", make_program, "functionalize")
    stopwatch.watch("capture: the rest", capture_call, "capture")
    stopwatch.watch("partition", spmd.PlannedMode, "partition")
    stopwatch.watch("split live state", step_compiler, "prepare")
    for each in passes.default():
        stopwatch.watch(f"pass {type(each).__name__}", type(each), "rewrite")
    stopwatch.watch("check after each pass", runner, "check_program")
    stopwatch.watch("passes: the rest", passes, "run")
    stopwatch.watch("lower", step_compiler, "lower_step")


def measure(setting: Setting) -> dict[str, Any]:
    """Compile once in this process. Returns seconds by stage, nodes after capture, partition and passes, and memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.world)
    model, optimizer = state(setting)
    x = torch.zeros(1, setting.time, dtype=torch.int64)
    step = spmd.compile(parallel_mode=mode(setting), cache="off")(train_step)
    turn = Turn()
    step._dispatch.fit(turn, step._dispatch.read((model, optimizer, x, x), {}))
    before, stopwatch = resident(), Stopwatch()
    watch_stages(stopwatch)
    start = time.perf_counter()
    compiled = stopwatch.timed("all the rest", step._compiler.compile)(turn, turn.call, 1)
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
    """The peak of this process's resident set, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_apart(setting: Setting) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.compiler", "--one", json.dumps(asdict(setting))]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def table(plan: str, found: list[dict[str, Any]]) -> Table:
    """A table with a column for each measurement."""
    shown = Table(title=f"{plan}, width {found[0]['setting']['width']}, AdamW: seconds")
    shown.add_column("stage")
    for each in found:
        shown.add_column(f"{each['setting']['depth']} layers\n{each['setting']['world']:,} ranks", justify="right")
    for stage in found[-1]["seconds"]:
        shown.add_row(stage, *(f"{each['seconds'].get(stage, 0):.2f}" for each in found))
    shown.add_section()
    shown.add_row("total", *(f"{each['total']:.2f}" for each in found), style="bold")
    shown.add_row("total, wall clock", *(f"{each['wall']:.2f}" for each in found))
    shown.add_row("total per layer", *(f"{each['total'] / each['setting']['depth']:.2f}" for each in found))
    for stage in found[-1]["nodes"]:
        shown.add_row(f"nodes, {stage}", *(f"{each['nodes'][stage]:,}" for each in found))
    for name in found[-1]["bytes"]:
        shown.add_row(f"GB, {name}", *(f"{each['bytes'][name] / 1e9:.2f}" for each in found))
    return shown


def exponent(found: list[dict[str, Any]]) -> float | None:
    """The exponent of nodes in the seconds of different depths; None of fewer than two. 1: seconds are linear."""
    nodes, seconds = ([math.log(value) for value in each] for each in zip(*map(_nodes_and_seconds, found), strict=True))
    return statistics.linear_regression(nodes, seconds).slope if len(set(nodes)) > 1 else None


def _nodes_and_seconds(measured: dict[str, Any]) -> tuple[int, float]:
    return measured["nodes"]["final"], measured["total"]


def parse() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48], help="numbers of layers")
    parser.add_argument(
        "--worlds",
        type=int,
        nargs="+",
        default=[8, 1024],
        help="numbers of ranks; the last at all depths",
    )
    parser.add_argument(
        "--plans",
        nargs="+",
        choices=WIDTHS,
        default=["fully_shard", "tensor_parallel"],
        help="by default the first two",
    )
    parser.add_argument("--width", type=int, help="of the model (1024; of experts 256)")
    parser.add_argument("--smoke", action="store_true", help="measure one tiny model only")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse()
    if options.one:
        print(json.dumps(measure(Setting(**options.one))))
        return
    if options.smoke:
        options.depths, options.worlds, options.plans, options.width = [1], [8], ["fully_shard"], 64
    *others, world = options.worlds
    pairs = [(min(options.depths), other) for other in others] + [(depth, world) for depth in options.depths]
    everything = []
    for plan in options.plans:
        settings = [Setting(depth, ranks, plan, options.width or WIDTHS[plan]) for depth, ranks in pairs]
        found = [measure(setting) if options.smoke else measure_apart(setting) for setting in settings]
        Console().print(table(plan, found))
        slope = exponent([each for each in found if each["setting"]["world"] == world])
        if slope is not None:
            print(f"seconds grow with nodes to the power of {slope:.2f}")
        everything += found
    if options.json:
        options.json.write_text(json.dumps(everything, indent=2))


if __name__ == "__main__":
    main()
