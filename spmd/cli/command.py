"""``python -m spmd calibrate``: measure what communication costs on these machines, into a file for compiled steps.

Run alone it starts ranks of its own on this machine; under torchrun it measures the ranks that are there::

    python -m spmd calibrate --out costs.json
    torchrun --nnodes 2 --nproc-per-node 8 ... -m spmd calibrate --mesh 2x8 --axes dp,tp --out costs.json
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table as Shown
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from passes import Kind, Table
from passes.analysis.costs import ALGORITHMS, Algorithm, Link, Point

from ..ranks.world import world
from .calibrate import SIZES, Progress, calibrate


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``argv`` names."""
    arguments = _arguments(argv)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world()  # joins torchrun's ranks
        _on_one_rank(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(_local_rank, (arguments, f"{folder}/store"), nprocs=arguments.ranks)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m spmd", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("calibrate", help="measure what communication costs, into a file")
    command.add_argument("--out", type=Path, default=Path("costs.json"), help="the file to write (%(default)s)")
    command.add_argument("--ranks", type=int, default=2, help="ranks to start, without torchrun (%(default)s)")
    command.add_argument("--mesh", help="the ranks along each axis, as 2x8; by default one axis")
    command.add_argument("--axes", help="the names of the axes, as dp,tp; by default dp, axis1, ...")
    command.add_argument("--rounds", type=int, default=20, help="how often each is measured (%(default)s)")
    command.add_argument("--max-bytes", type=int, default=SIZES[-1], help="the largest size (%(default)s)")
    arguments = parser.parse_args(argv)
    ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    try:
        arguments.shape = tuple(int(part) for part in (arguments.mesh or str(ranks)).split("x"))
    except ValueError:
        command.error(f"expected --mesh as numbers of ranks, such as 2x8, got {arguments.mesh!r}")
    unnamed = ("dp", *(f"axis{k}" for k in range(1, len(arguments.shape))))
    arguments.names = tuple(arguments.axes.split(",")) if arguments.axes else unnamed
    if ranks < 2 or math.prod(arguments.shape) != ranks:
        command.error(f"expected a mesh of all ranks, two at least, but {arguments.shape} is not one of {ranks}")
    if len(arguments.names) != len(arguments.shape):
        command.error(f"expected a name for each of {len(arguments.shape)} axes, got {arguments.axes!r}")
    arguments.sizes = [size for size in SIZES if size <= arguments.max_bytes] or SIZES[:1]
    return arguments


def _local_rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """One of the ranks that this command starts itself, on its share of the cores."""
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
    _on_one_rank(arguments)


def _on_one_rank(arguments: argparse.Namespace) -> None:
    """Measure with all others; the first rank shows and writes the table."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    mesh = init_device_mesh(device, arguments.shape, mesh_dim_names=arguments.names)
    first = dist.get_rank() == 0
    try:
        with _progress(first) as progress:
            table = calibrate(mesh, arguments.sizes, arguments.rounds, progress)
        if first:
            table.write(arguments.out)
            _show(table, arguments.out)
    finally:
        dist.destroy_process_group()


@contextmanager
def _progress(shown: bool) -> Iterator[Progress]:
    with Bar(console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task("")

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield update


def _show(table: Table, out: Path) -> None:
    console = Console()
    for link in table.links:
        console.print(_shown(link))
    console.print(
        f"each rank multiplies matrices at {table.compute['matmul float32'] / 1e9:.1f} GFLOP/s (float32) "
        f"and moves {table.compute['memory'] / 1e9:.1f} GB/s"
    )
    console.print(f"written to {out}; on all ranks: passes=passes.default(table=passes.Table.read({str(out)!r}))")


def _shown(link: Link) -> Shown:
    """Milliseconds by kind, size and algorithm; a compiled step takes the bold one."""
    shown = Shown(title=f"{link.axis}: {link.ranks} ranks by {link.backend}; ms to the result/ms of CPU")
    for heading in ("", *Algorithm):
        shown.add_column(heading, justify="right", no_wrap=True)
    for kind in ALGORITHMS:
        curves = [link.curves.get((kind, algorithm), ()) for algorithm in Algorithm]
        shown.add_row(kind)
        for points in zip_longest(*curves):
            size = next(point.bytes for point in points if point)
            cells = (_cell(link, kind, each, point) for each, point in zip(Algorithm, points, strict=True))
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
