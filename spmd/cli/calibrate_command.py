"""``spmd calibrate``: measure what communication costs on these machines, into a file.

Compiled steps choose algorithms by it. Run alone, the command starts ranks of its own on this machine; under torchrun
it measures those ranks::

    python -m spmd calibrate --out costs.json
    torchrun --nnodes 2 --nproc-per-node 8 ... -m spmd calibrate --mesh 2x8 --axes dp,tp --out costs.json
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table as RichTable
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from passes import Kind, Table
from passes.analysis.collective_algorithms import ALGORITHMS, Algorithm, Link, Point

from ..ranks.world import world
from .calibrate import SIZES, Progress, calibrate


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``calibrate`` to its parser."""
    command.add_argument("--out", type=Path, default=Path("costs.json"), help="the file to write (%(default)s)")
    command.add_argument("--ranks", type=int, default=2, help="ranks to start, without torchrun (%(default)s)")
    command.add_argument("--mesh", help="ranks along each axis, such as 2x8; by default one axis")
    command.add_argument("--axes", help="names of the axes, such as dp,tp; by default dp,axis1,...")
    command.add_argument("--rounds", type=int, default=20, help="measurements of each collective (%(default)s)")
    command.add_argument("--json", action="store_true", help="print what is written, as JSON")
    command.add_argument("--max-bytes", type=int, default=SIZES[-1], help="the largest operand (%(default)s)")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure on the ranks of torchrun, or on ranks of its own; returns the exit code."""
    try:
        _complete(arguments)
    except ValueError as error:
        parser.error(str(error))
    arguments = argparse.Namespace(**{name: value for name, value in vars(arguments).items() if name != "run"})
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world()  # joins the ranks of torchrun
        _run_rank(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        spawn(_start_rank, (arguments, f"{folder}/store"), nprocs=arguments.ranks)
    return 0


def _complete(arguments: argparse.Namespace) -> None:
    """Set ``shape``, ``names`` and ``sizes`` from the options. Raises ``ValueError`` if these do not fit together."""
    ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    try:
        shape = tuple(int(part) for part in (arguments.mesh or str(ranks)).split("x"))
    except ValueError:
        raise ValueError(f"expected --mesh as numbers of ranks, such as 2x8, got {arguments.mesh!r}") from None
    if ranks < 2 or math.prod(shape) != ranks:
        raise ValueError(f"expected a mesh of all ranks, at least 2, got {shape} for {ranks} ranks")
    default_names = ("dp", *(f"axis{k}" for k in range(1, len(shape))))
    arguments.names = tuple(arguments.axes.split(",")) if arguments.axes else default_names
    if len(arguments.names) != len(shape):
        raise ValueError(f"expected a name for each of {len(shape)} axes, got {arguments.axes!r}")
    arguments.shape = shape
    arguments.sizes = [size for size in SIZES if size <= arguments.max_bytes] or SIZES[:1]


def _start_rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """Run one of the ranks that this command starts itself, on its share of the cores."""
    ranks = arguments.ranks
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = max(1, len(cores) // ranks)
    if len(cores) >= ranks:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
    torch.set_num_threads(share)
    cuda = torch.cuda.device_count() >= ranks
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    _run_rank(arguments)


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure together with all other ranks; the first rank prints and writes the table."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    mesh = init_device_mesh(device, arguments.shape, mesh_dim_names=arguments.names)
    first = dist.get_rank() == 0
    try:
        with _progress(first) as progress:
            table = calibrate(mesh, arguments.sizes, arguments.rounds, progress)
        if first:
            table.write(arguments.out)
            if arguments.json:
                print(arguments.out.read_text(encoding="utf-8"))
            else:
                _print(table, arguments.out)
    finally:
        dist.destroy_process_group()


@contextmanager
def _progress(shown: bool) -> Iterator[Progress]:
    with Bar(console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task("")

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield update


def _print(table: Table, out: Path) -> None:
    console = Console()
    for link in table.links:
        console.print(_link_table(link))
    rates = table.compute
    console.print(
        f"compute per rank: {rates['matmul float32'] / 1e9:.1f} GFLOP/s (float32 matmul), "
        f"{rates['memory'] / 1e9:.1f} GB/s (memory), {rates['transcendental'] / 1e9:.2f} G/s (gelu), "
        f"{1e6 / rates['launches']:.1f} us to launch an op",
        soft_wrap=True,
    )
    console.print(f"wrote {out}; on all ranks:", soft_wrap=True)
    console.print(f"passes=passes.default(table=passes.Table.read({str(out)!r}))", soft_wrap=True)


def _link_table(link: Link) -> RichTable:
    """Milliseconds by kind, size and algorithm. Compiled steps choose the bold ones."""
    title = f"{link.axis}: {link.ranks} ranks, {link.backend}; ms elapsed/ms of CPU time"
    shown = RichTable(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    algorithms = [each for each in Algorithm if any(algorithm is each for _, algorithm in link.curves)]
    for heading in ("", *algorithms):
        shown.add_column(heading, justify="right", no_wrap=True)
    for kind in ALGORITHMS:
        curves = [link.curves.get((kind, algorithm), ()) for algorithm in algorithms]
        shown.add_row(kind)
        for points in zip_longest(*curves):
            size = next(point.bytes for point in points if point)
            cells = (_cell(link, kind, each, point) for each, point in zip(algorithms, points, strict=True))
            shown.add_row(_binary(size), *cells)
        shown.add_row("latency", *(f"{curve[0].seconds * 1e6:.0f} us" if curve else "" for curve in curves))
        shown.add_row("bandwidth", *(_bandwidth(curve[-1]) if curve else "" for curve in curves), end_section=True)
    return shown


def _cell(link: Link, kind: Kind, algorithm: Algorithm, point: Point | None) -> str:
    if point is None:
        return ""
    text = f"{_milliseconds(point.seconds)}/{_milliseconds(point.cpu)}"
    return f"[bold]{text}[/bold]" if link.cheapest(kind, point.bytes, ALGORITHMS[kind]) is algorithm else text


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{2 if seconds < 0.01 else 1}f}"


def _bandwidth(point: Point) -> str:
    return f"{point.bytes / point.seconds / 1e9:.2f} GB/s"


def _binary(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
