"""Train a small GPT on real text, byte by byte, with the whole step as one compiled program on every rank.

On two ranks of one machine, on one rank, and the options:

    spmd run -n 2 examples/train_gpt.py
    python examples/train_gpt.py
    python examples/train_gpt.py --help

On four ranks, as a mesh of two (data parallel) by two (tensor parallel):

    spmd run -n 4 examples/train_gpt.py --mesh 2x2 --tensor-parallel --sequence-parallel

A run that is killed goes on where it last saved, also on another number of ranks (with ``--batch`` such that the global
batch is the same); SIGTERM saves and ends it:

    spmd run -n 2 --max-restarts 3 examples/train_gpt.py --save-every 20 --resume

Hosts may leave and join a run, which goes on with the ranks that there are and with the same global batch; the same
command on each of them:

    spmd run -n 2 --nnodes 1:4 --rdzv-endpoint host0:29500 --max-restarts 9 examples/train_gpt.py --elastic --batch 64

The text is the source of Python's standard library unless ``--text`` names another. Every rank draws the same global
batch and takes its own rows of it: two ranks with a batch of 32 learn what one rank learns with a batch of 64.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import ctrl_c

if __name__ == "__main__":
    ctrl_c.end_on_ctrl_c()  # before torch is imported: Ctrl-C counts from the first moment

import gpt
import tensor_parallel
import text
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import spmd


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step, as for one device. Returns the loss in nats per byte."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss, without an update."""
    with torch.no_grad():
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main(arguments: list[str] | None = None) -> None:
    """Read, build, compile, train, and show the result."""
    options = parse(arguments)
    corpus = load(options)
    mesh, device = join(options)
    rank, ranks = (mesh.get_local_rank(0), mesh.size(0)) if mesh else (0, 1)  # among those that share out the batch
    console = Console(quiet=not is_first(), highlight=False)

    torch.manual_seed(options.seed)
    model = gpt.GPT(options.model).to(device, getattr(torch, options.dtype))

    if options.eager:
        step, loss_of = train_step, evaluate
    else:
        distribute = spmd.compile(parallel_mode=parallel_mode(options, mesh, model), dump=options.dump)
        step, loss_of = distribute(train_step), distribute(evaluate)

    def batches(data: bytes) -> Batches:
        rows = options.batch * (1 if options.elastic else ranks)
        return Batches(data, rows, options.context, rank, ranks, device, options.seed)

    console.print(summary(options, corpus, model, ranks), soft_wrap=True)
    before = held_out_bits(loss_of, model, batches(corpus.held_out), options.checks)
    console.print(f"held-out text before training: {before:.3f} bits per byte")

    # Made after the first compiled call, which in "fully_shard" replaces the parameters by each rank's shards.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(options.steps))
    drawn = batches(corpus.train)
    with Checkpoints(options, model=model, optimizer=optimizer, schedule=schedule, batches=drawn) as checkpoints:
        done = learn(step, model, optimizer, schedule, drawn, checkpoints, options, console)
        if done < options.steps:
            console.print(f"ended by SIGTERM after step {done}, saved in {options.checkpoints}", soft_wrap=True)
            leave()
            return checkpoints.end()
    after = held_out_bits(loss_of, model, batches(corpus.held_out), options.checks)

    table = text.table_bits(corpus)
    console.print(f"\nheld-out text, bits per byte: {before:.3f} before, [bold]{after:.3f}[/bold] after training")
    console.print(f"to compare: 8.000 for a uniform guess, {table:.3f} for a table of byte frequencies")
    show_sample(model, options, console)
    if not options.eager:
        console.print(step.report())
        console.print(f"the graphs of every stage: {Path(options.dump).resolve()}", soft_wrap=True)
    leave()


def leave() -> None:
    """End the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def parallel_mode(options: argparse.Namespace, mesh: DeviceMesh | None, model: gpt.GPT) -> spmd.DataParallel:
    """Data parallel over the first axis of the mesh, and, if asked, tensor parallel over the second."""
    shard = options.shard_optimizer
    if not options.tensor_parallel:
        return spmd.DataParallel(options.mode, shard_optimizer=shard, bits="same" if options.same_bits else None)
    if options.sequence_parallel:
        tensor_parallel.split_sequence(model)
    params = tensor_parallel.placements(options.model)
    return spmd.DataParallel(options.mode, mesh=mesh, params=params, shard_optimizer=shard)


class Batches:
    """Random pieces of a text: this rank's rows of a global batch, which depends only on its size and the seed."""

    def __init__(
        self, data: bytes, rows: int, context: int, rank: int, ranks: int, device: torch.device, seed: int
    ) -> None:
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.global_batch = rows
        self.rows = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
        self.piece = torch.arange(context + 1)
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Bytes, and the byte that follows each of them: two tensors of shape (batch, context)."""
        last = len(self.data) - len(self.piece)
        starts = torch.randint(last + 1, (self.global_batch,), generator=self.generator)[self.rows]
        pieces = self.data[starts[:, None] + self.piece].to(self.device, torch.long)
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """The place in the sequence of global batches, the same on all ranks."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.generator.set_state(state["generator"])


class Checkpoints:
    """Saves every few steps, and once more when SIGTERM asks the run to end. A context in which that is noted.

    An elastic run saves while it goes on, and also what a rank has whole when another one fails.
    """

    def __init__(self, options: argparse.Namespace, **state: Any) -> None:
        self.folder, self.every, self.state = options.checkpoints, options.save_every, state
        self.resumes, self.is_elastic = options.resume, options.elastic
        self.has_replicas = options.mode == "replicate" and not options.shard_optimizer and not options.mesh
        self.is_asked_to_end = False
        self.last: Any = None  # what watches over the last save

    def __enter__(self) -> Checkpoints:
        self.before = signal.signal(signal.SIGTERM, self.ask_to_end) if self.every else None
        return self

    def __exit__(self, *raised: object) -> None:
        if self.every:
            signal.signal(signal.SIGTERM, self.before)

    def ask_to_end(self, *signal_and_frame: object) -> None:
        """Note that the run is to end after the step that it is in."""
        self.is_asked_to_end = True

    def load(self) -> int:
        """The steps that are done: those of the newest checkpoint, which is loaded, or none."""
        try:
            return (spmd.load(self.folder, **self.state) or 0) if self.resumes else 0
        except FileNotFoundError:
            return 0

    def save(self, done: int) -> bool:
        """Save if it is time, and return whether to end."""
        if not self.every:
            return False
        ends = self.any_rank_is_asked()
        if ends or done % self.every == 0:
            wait = ends or not self.is_elastic
            self.last = spmd.save(self.folder, step=done, keep=2, wait=wait, **self.state)
        return ends

    def rescue(self, done: int) -> None:
        """Save on one of the ranks that are left: each of them has the state after step ``done`` whole."""
        steps = {int(each["step"]) for each in self.state["optimizer"].state.values()}
        if not self.is_elastic or not self.has_replicas or steps != {done}:
            return  # the last: the update had begun
        with contextlib.suppress(spmd.SpmdError):  # it has failed, too, or has ended
            if self.last is not None:
                self.last.wait()
        try:
            Path(self.folder, f"step-{done}").mkdir(parents=True)
        except FileExistsError:
            return  # another rank does, or has saved that step
        leave()  # it saves alone
        spmd.save(self.folder, step=done, keep=2, **self.state)

    def end(self) -> None:
        """End as a rank that SIGTERM has ended; where it was meant for others, let torchrun start this one again."""
        for _ in range(20):  # where hosts join, the signal comes to all, at about the same time
            if self.is_asked_to_end or not self.is_elastic:
                return
            time.sleep(0.1)
        sys.exit(os.EX_TEMPFAIL)

    def any_rank_is_asked(self) -> bool:
        """The signal reaches ranks at different steps, but all must save after the same one."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.is_asked_to_end
        device = next(self.state["model"].parameters()).device
        asked = torch.tensor(int(self.is_asked_to_end), device=device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)


def learn(
    step: Callable[..., Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batches: Batches,
    checkpoints: Checkpoints,
    options: argparse.Namespace,
    console: Console,
) -> int:
    """The training loop. Returns how many steps are done: all, unless the run was asked to end."""
    start = checkpoints.load()
    if start:
        console.print(f"resumed after step {start}")
    with ProgressLine(start, options.steps, batches.global_batch * options.context, console) as line:
        for done in range(start + 1, options.steps + 1):
            place = batches.state_dict()
            x, y = batches.draw()
            try:
                loss = step(model, optimizer, x, y)
            except spmd.RankFailedError:
                batches.load_state_dict(place)
                checkpoints.rescue(done - 1)
                raise
            schedule.step()
            if done <= start + 2 or done % options.log_every == 0 or done == options.steps:
                line.show(done, loss.item() / math.log(2))
            if checkpoints.save(done):
                return done
    return options.steps


class ProgressLine:
    """Progress: a bar on a terminal, a line per message elsewhere."""

    def __init__(self, start: int, steps: int, tokens: int, console: Console) -> None:
        self.start, self.steps, self.tokens, self.console = (
            start,
            steps,
            tokens,
            console,
        )  # tokens: in one step, of all ranks
        self.bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("compiling", total=steps)

    def __enter__(self) -> ProgressLine:
        self.bar.start()
        self.done, self.since = self.start, time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bar.stop()

    def show(self, done: int, bits: float) -> None:
        """Show that ``done`` steps are done, the last one at ``bits`` per byte."""
        now = time.perf_counter()
        seconds = (now - self.since) / (done - self.done)
        self.done, self.since = done, now
        line = f"loss {bits:.3f} bits/byte  {self.tokens / seconds:,.0f} tokens/s  {seconds * 1000:.0f} ms/step"
        self.bar.update(self.task, completed=done, description=line)
        if not self.console.is_terminal:
            self.console.print(f"step {done}/{self.steps}  {line}", soft_wrap=True)


def held_out_bits(loss_of: Callable[..., Tensor], model: nn.Module, batches: Batches, count: int) -> float:
    """Bits per byte over ``count`` global batches."""
    nats = sum(loss_of(model, *batches.draw()).item() for _ in range(count)) / count
    return nats / math.log(2)


def show_sample(model: nn.Module, options: argparse.Namespace, console: Console) -> None:
    """Sample from a plain copy of the model. Every rank must call this: sharded parameters are gathered from all."""
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if console.quiet or not options.sample_bytes:
        return
    writer = gpt.GPT(options.model)
    writer.load_state_dict(full)
    generator = torch.Generator().manual_seed(options.seed)
    written = writer.sample(options.prompt.encode() or b"\n", options.sample_bytes, generator)
    console.rule("a sample")
    console.print(printable(written), markup=False)
    console.rule()


def printable(written: bytes) -> str:
    """As text, without characters that would move the cursor."""
    letters = written.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in letters)


def warmup_then_cosine(steps: int) -> Callable[[int], float]:
    """A factor of the learning rate: linear warmup over the first twentieth, then a cosine down to a twentieth."""
    warmup = max(1, steps // 20)

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        part = min(1.0, (done - warmup) / max(1, steps - warmup))
        return 0.05 + 0.95 * (1 + math.cos(math.pi * part)) / 2

    return factor


def join(options: argparse.Namespace) -> tuple[DeviceMesh | None, torch.device]:
    """The mesh of all ranks, None for the plain step, and this rank's device."""
    kind = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        refuse("there is no CUDA device here: leave --device out, or use --device cpu")
    if options.eager:
        return None, torch.device(kind)
    world = spmd.world(kind)
    if options.elastic and options.batch < world.size():
        refuse(f"--batch {options.batch} is that of all ranks with --elastic, and there are {world.size()} of them")
    if options.mesh is None:
        return world, torch.device(kind)
    if math.prod(options.mesh) != world.size():
        sizes = "x".join(map(str, options.mesh))
        refuse(f"--mesh {sizes} has {math.prod(options.mesh)} ranks, but there are {world.size()}")
    return init_device_mesh(kind, options.mesh, mesh_dim_names=("dp", "tp")), torch.device(kind)


def load(options: argparse.Namespace) -> text.Corpus:
    """Read the text, or exit with a message."""
    try:
        corpus = text.load(options.text, options.text_bytes)
    except (OSError, ValueError) as error:
        refuse(str(error))
    if len(corpus.held_out) <= options.context:
        refuse(f"the text is too short for --context {options.context}: only {len(corpus.held_out)} bytes are held out")
    return corpus


def summary(options: argparse.Namespace, corpus: text.Corpus, model: nn.Module, ranks: int) -> str:
    """The run in two lines."""
    parameter = next(model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    mode = "eager, nothing compiled" if options.eager else options.mode
    if options.shard_optimizer:
        mode += ", sharded optimizer"
    if options.tensor_parallel:
        mode += f", tensor parallel over {options.mesh[1]}"
    return (
        f"model: {count / 1e6:.2f} M parameters, {options.dtype} on {parameter.device.type}, {mode}\n"
        f"text: {len(corpus.train) / 1e6:.1f} MB to learn from, {len(corpus.held_out) / 1e6:.1f} MB held out; "
        f"{ranks} x {options.batch} x {options.context} bytes a step"
    )


class Parser(argparse.ArgumentParser):
    """Prints on rank 0 only."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if is_first():
            super()._print_message(message, file)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; a wrong one exits with a message."""
    parser = Parser(
        description="Train a small GPT on real text, on any number of ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--text", type=Path, metavar="PATH", help="a file or folder to learn from; None: Python's standard library")
    add("--text-bytes", type=positive, metavar="N", help="read no more than this much of it; None: all")
    add("--width", type=positive, metavar="N", default=128, help="size of the hidden state")
    add("--layers", type=positive, metavar="N", default=4, help="blocks of the model")
    add("--heads", type=positive, metavar="N", default=4, help="attention heads of a block")
    add("--context", type=positive, metavar="N", default=128, help="bytes in a sequence")
    add("--tied", action="store_true", help="one matrix for the embedding and the output")
    add("--batch", type=positive, metavar="N", default=32, help="sequences in a step, per rank")
    add("--steps", type=positive, metavar="N", default=320, help="steps to train")
    add("--lr", type=float, metavar="RATE", default=2e-3, help="highest learning rate")
    add("--mode", choices=["replicate", "fully_shard", "default"], default="replicate", help="data parallel style")
    add("--shard-optimizer", action="store_true", help="shard optimizer state and updates")
    add("--mesh", type=mesh_sizes, metavar="DPxTP", help="ranks along the data and the tensor axis: 2x2")
    add("--tensor-parallel", action="store_true", help="shard heads, MLPs and vocabulary over the second axis")
    add("--sequence-parallel", action="store_true", help="shard the positions between them, too")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is any")
    add("--dtype", choices=["float32", "float64", "bfloat16"], default="float32", help="of the parameters")
    add("--seed", type=int, metavar="N", default=0, help="of parameters, batches and the sample")
    add("--dump", default="runs/train_gpt", metavar="FOLDER", help="where to write the graphs of every stage")
    add("--eager", action="store_true", help="run the plain step on one rank, for comparison")
    add("--checks", type=positive, metavar="N", default=8, help="batches per evaluation on held-out text")
    add("--save-every", type=positive, metavar="N", help="save after so many steps, and on SIGTERM; None: never")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--elastic", action="store_true", help="hosts may leave and join: --batch is that of all ranks; saves, resumes")
    add("--same-bits", action="store_true", help="the same parameters, bit for bit, on any number of ranks")
    add("--checkpoints", default="runs/checkpoints", metavar="FOLDER", help="where they are")
    add("--log-every", type=positive, metavar="N", default=20, help="steps between messages")
    add("--prompt", default="def ", help="what the sample starts with")
    add("--sample-bytes", type=int, metavar="N", default=400, help="length of the sample, 0 for none")
    options = parser.parse_args(arguments)
    if options.eager and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        refuse("--eager runs the plain step on one rank: start it without torchrun")
    if options.shard_optimizer and options.mode != "replicate":
        refuse("--shard-optimizer goes with --mode replicate: the other modes split optimizer state with parameters")
    if options.elastic:
        options.resume, options.save_every = True, options.save_every or 20
    if options.same_bits and (options.mesh or options.eager):
        refuse("--same-bits is for data parallel steps: leave out --mesh and --eager")
    if (options.mesh is None) == options.tensor_parallel or options.sequence_parallel > options.tensor_parallel:
        refuse("--mesh and --tensor-parallel go together, and --sequence-parallel needs both: --mesh 2x2 for 4 ranks")
    try:
        options.model = gpt.Config(options.width, options.layers, options.heads, options.context, tied=options.tied)
    except ValueError as error:
        refuse(str(error))
    return options


def positive(value: str) -> int:
    """A whole number above zero."""
    if (number := int(value)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above zero")
    return number


def mesh_sizes(value: str) -> tuple[int, int]:
    """Two whole numbers above zero, as in 2x4."""
    sizes = tuple(positive(size) for size in value.split("x"))
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"{value} is not of the form 2x4")
    return sizes


def refuse(why: str) -> NoReturn:
    """Exit with a message, printed by rank 0 only."""
    if is_first():
        print(f"train_gpt: {why}", file=sys.stderr)
    else:
        time.sleep(60)  # the first rank to exit makes the launcher end the others: leave rank 0 time to print
    sys.exit(2)


def is_first() -> bool:
    """Whether this is rank 0, before there is a process group to ask."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    main()
