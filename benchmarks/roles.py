"""Sequences, experts and stages over two ranks, beside one rank that has the whole batch, in one run.

    python -m benchmarks.roles [sequences experts stages] [--network 500mbit] [--rounds 5] [--json out.json]

All systems of a part live in the same two processes of one core each, and take steps in turn; on one rank the first
process computes alone. Their losses are those of one rank, or the part fails. A speedup is over one rank, by medians.
Cores share a memory and perhaps more: "one rank, twice at once" is its step on both cores at the same time, and the
speedup of that, for twice the work, is the most that two ranks can have on this machine. ``--network``: a rate, at
which two hosts that are made for the run are connected; this machine's loopback by default.

sequences    a GPT of 256 x 4, causal, 2 x 2,048 tokens: attention by gathered keys, a ring, heads; without balance
             (nothing of torch is beside: its context_parallel has no attention of the CPU, also in 2.13, and raises
             "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered")
experts      a Mixtral of 256 x 4 from transformers, 8 experts, top 2, 8 x 128 tokens; and torch's FSDP2, per layer
stages       a GPT of 256 x 8, 8 micro-batches of 1 x 128 tokens, 1f1b, zb-h1, gpipe; torch's Schedule1F1B, same cut
             (its peak is counted in its first step, without parameters and optimizer, as ours is planned); and the same
             tokens by fully_shard. A rank's bubble is the part of the step in which it does not compute: as measured,
             1 - work / (2 x step), where the work is that of one rank at once with another, as simulated, and as the
             formula has it, (stages - 1) / (micro-batches + stages - 1)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spmd
from examples.gpt import GPT, Config

from .peers.network import Network, NoNetworkError, connect
from .peers.spellings import train_step

FIRST, RANKS = 3, 2  # steps whose losses are compared
ALONE, AT_ONCE, TORCH = "one rank", "one rank, twice at once", "torch, Schedule1F1B"
SEQUENCE: dict[str, Any] = {"axes": {"sequence": "x"}}
STAGES: dict[str, Any] = {"axes": {"stages": "x"}, "stages": ["blocks.4"], "micro_batches": 8}

Step = Callable[[], float | None]  # one step; returns the loss on ranks that know it
Planned = Callable[[], tuple[int, float]]  # the peak of values in bytes, and the bubble; 0 where they are not known


def gpt(layers: int, width: int, context: int) -> GPT:
    """A GPT over bytes."""
    return GPT(Config(width=width, layers=layers, heads=8, context=context))


class Mixtral(nn.Module):
    """Logits of the model of transformers; its experts are grouped products of sorted rows."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4, "vocab_size": 256}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": context}
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
        self.inner = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts)).train()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each token."""
        return self.inner(input_ids=x, use_cache=False).logits


PARTS: dict[str, tuple[Callable[[int, int], nn.Module], tuple[int, int], dict[str, dict[str, Any]]]] = {
    "sequences": (partial(gpt, 4), (2, 2048), {
        "gather": {**SEQUENCE, "attention": "gather"},
        "ring": {**SEQUENCE, "attention": "ring"},
        "heads": {**SEQUENCE, "attention": "heads"},
        "gather, not balanced": {**SEQUENCE, "attention": "gather", "balance": False},
    }),
    "experts": (Mixtral, (8, 128), {
        "experts": {"axes": {"batch": "x", "experts": "x"}},
        "replicate": {},
        "fully_shard": {"parallel_style": "fully_shard"},
    }),
    "stages": (partial(gpt, 8), (8, 128), {
        "1f1b": {**STAGES, "schedule": "1f1b"},
        "zb-h1": {**STAGES, "schedule": "zb-h1"},
        "gpipe": {**STAGES, "schedule": "gpipe"},
        "fully_shard": {"parallel_style": "fully_shard"},
    }),
}  # fmt: skip


def main() -> None:
    """Run the parts, print their tables, write the figures."""
    options = parse(sys.argv[1:])
    try:
        with connect(options.network) as network:
            found = {name: measure(name, network, options) for name in options.parts or PARTS}
    except NoNetworkError as missing:
        raise SystemExit(str(missing)) from None
    for name, systems in found.items():
        table, one = Table(title=f"{name}, {options.network}"), systems[ALONE]
        headings = ["system", "ms/step", "min - max", "speedup", "peak MB of values"]
        bubbles = bubbles_of(systems) if name == "stages" else {}
        headings += ["bubble: measured", "simulated", "formula"] if bubbles else []
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "system" else "right")
        for system, figures in systems.items():
            ms, peak = figures["ms"], figures["peak"]
            work = RANKS if system == AT_ONCE else 1
            table.add_row(
                system,
                f"{statistics.median(ms):.0f}",
                f"{min(ms):.0f} - {max(ms):.0f}",
                f"{work * statistics.median(one['ms']) / statistics.median(ms):.2f}",
                f"{peak / 1e6:.0f}" if peak else "",
                *(f"{each:.1%}" if each is not None else "" for each in bubbles.get(system, ())),
            )
        Console(highlight=False).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def bubbles_of(systems: dict[str, Any]) -> dict[str, tuple[float | None, ...]]:
    """The bubbles of each pipeline: as measured, as simulated where it is ours, and by the formula."""
    work, count = statistics.median(systems[AT_ONCE]["ms"]), STAGES["micro_batches"]
    waits = {"zb-h1": (RANKS - 1) / 3}  # in micro-batches; forward, input and weight gradients take a third each
    found = {}
    for system, figures in systems.items():
        if figures["bubble"] or system == TORCH:
            wait = waits.get(system, RANKS - 1)
            measured = 1 - work / (RANKS * statistics.median(figures["ms"]))
            found[system] = measured, figures["bubble"] or None, wait / (count + wait)
    return found


def parse(given: list[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--network", default="loopback", help="%(default)s, or the rate of a link between two hosts")
    parser.add_argument("--rounds", type=int, default=5, help="%(default)s")
    parser.add_argument("--smoke", action="store_true", help="16 tokens, a width of 32, one mode")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(given)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there are {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    return options


def measure(part: str, network: Network, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of each system of a part, from two fresh processes."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (part, network, options.rounds, options.smoke, f"{folder}/store", theirs)
        ranks = [spawn.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        theirs.close()
        try:
            return ours.recv()  # type: ignore[no-any-return]
        except EOFError:
            raise SystemExit(f"{part} failed: see above") from None
        finally:
            for each in ranks:
                each.join()


def run_rank(rank: int, part: str, network: Network, rounds: int, smoke: bool, store: str, answers: Connection) -> None:
    """The life of one rank: all systems take their first steps, then steps in turn."""
    network.enter(rank)
    torch.set_num_threads(1)
    timeout = timedelta(minutes=10)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timeout)
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("one", "x"))
    build, (rows, tokens), modes = PARTS[part]
    width, tokens, most = (32, 16, 1) if smoke else (256, tokens, len(modes))
    torch.manual_seed(1)
    x, y = torch.randint(256, (rows, tokens)), torch.randint(256, (rows, tokens))
    modes = {name: modes[name] for name in [*modes][:most]}
    systems = steps_of(partial(build, width, tokens), modes, rank, mesh, x, y)
    found: dict[str, Any] = {}
    for name, (step, planned) in systems.items():
        losses = [step() if rank == 0 or name != ALONE else None for _ in range(FIRST)]
        if name == ALONE:
            dist.broadcast_object_list(losses)
        if name == AT_ONCE:
            losses = [None]  # of later steps than those of one rank
        peak, bubble = planned()
        found[name] = {"losses": losses, "ms": [], "peak": peak, "bubble": bubble}
        expected = found[ALONE]["losses"]
        if None not in losses and any(abs(a / b - 1) > 1e-3 for a, b in zip(losses, expected, strict=True)):
            raise AssertionError(f"{name} has losses {losses}, one rank {expected}")
    for _ in range(rounds):
        for name, (step, _) in systems.items():
            dist.barrier()
            begin = time.perf_counter()
            if rank == 0 or name != ALONE:
                step()
            dist.barrier()
            found[name]["ms"].append(1000 * (time.perf_counter() - begin))
    if rank == 0:
        answers.send(found)
    answers.close()
    dist.barrier()
    dist.destroy_process_group()


def steps_of(
    build: Callable[[], nn.Module], modes: dict[str, dict[str, Any]], rank: int, mesh: DeviceMesh, x: Tensor, y: Tensor
) -> dict[str, tuple[Step, Planned]]:
    """A step of each system, and what tells the peak of its values and the bubble."""
    has_stages = "1f1b" in modes
    alone = {"micro_batches": 8} if has_stages else {}
    found = {ALONE: ours(build, x, y, mesh["one"], alone)}
    found[AT_ONCE] = found[ALONE]
    for name, options in modes.items():
        splits = not {"sequence", "stages"} & options.get("axes", {}).keys()
        mine = [each.chunk(RANKS)[rank] if splits else each for each in (x, y)]
        found[name] = ours(build, *mine, mesh["x"], options)
    if "experts" in modes:
        mine = [each.chunk(RANKS)[rank] for each in (x, y)]
        for name, reshard in (("torch, FSDP2", True), ("torch, FSDP2, kept whole", False)):
            torch.manual_seed(0)
            found[name] = fsdp(build(), mesh["x"], reshard, *mine), lambda: (0, 0.0)
    if has_stages:
        torch.manual_seed(0)
        found[TORCH] = schedule_1f1b(build(), rank, x, y)
    return found


def ours(
    build: Callable[[], nn.Module], x: Tensor, y: Tensor, mesh: DeviceMesh, options: dict[str, Any]
) -> tuple[Step, Planned]:
    """A compiled step under a mode."""
    torch.manual_seed(0)
    model = build()
    optimizer = AdamW(model.parameters(), fused=True)
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(mesh=mesh, **options))

    def planned() -> tuple[int, float]:
        if step.program is None:
            return 0, 0.0
        report = step.report()
        roles = report.memory["cpu"]
        kept = sum(roles.roles[each] for each in ("parameters", "optimizer state"))
        return roles.peak - kept, report.bubble

    return lambda: float(step(model, optimizer, x, y)), planned


def fsdp(model: Any, mesh: DeviceMesh, reshard: bool, x: Tensor, y: Tensor) -> Step:
    """Torch's own: each layer is gathered and reduced by itself, the rest with the root. ``reshard``: after forward."""
    for each in (*model.inner.model.layers, model):
        fully_shard(each, mesh=mesh, reshard_after_forward=reshard)
    optimizer = AdamW(model.parameters(), fused=True)

    def step() -> float:
        loss = train_step(model, optimizer, x, y).detach()
        dist.all_reduce(loss)
        return float(loss) / RANKS

    return step


def schedule_1f1b(model: Any, rank: int, x: Tensor, y: Tensor) -> tuple[Step, Planned]:
    """The same cut by hand, by torch's own pipeline; the optimizer outside, as it has it."""

    def first(tokens: Tensor) -> Tensor:
        hidden = model.bytes(tokens) + model.positions(torch.arange(tokens.shape[1]))
        for block in model.blocks[:4]:
            hidden = block(hidden)
        return hidden

    def second(hidden: Tensor) -> Tensor:
        for block in model.blocks[4:]:
            hidden = block(hidden)
        return model.head(model.norm(hidden))  # type: ignore[no-any-return]

    part = _Part(first, [model.bytes, model.positions, *model.blocks[:4]]) if rank == 0 else None
    part = part or _Part(second, [*model.blocks[4:], model.norm, model.head])
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 8, loss_fn=lambda out, goal: F.cross_entropy(out.flatten(0, 1), goal.flatten()))
    optimizer, live = AdamW(part.parameters(), fused=True), _Live()

    def step() -> float | None:
        losses: list[Tensor] = []
        with nullcontext() if live.peak else live:  # in the first step, which makes the buffers of messages, too
            schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return None if rank == 0 else torch.stack(losses).mean().item()

    return step, lambda: (live.peak, 0.0)


class _Live(TorchDispatchMode):
    """Counts the bytes of what ops make, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in known | self.known:
                self._count(each.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        pointer, size = storage.data_ptr(), storage.nbytes()
        self.known.add(pointer)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, pointer, size)

    def _free(self, pointer: int, size: int) -> None:
        self.known.discard(pointer)
        self.now -= size


class _Part(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor], modules: list[nn.Module]) -> None:
        super().__init__()
        self.run, self.modules_of = run, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


if __name__ == "__main__":
    main()
