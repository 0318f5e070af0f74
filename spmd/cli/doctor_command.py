"""``spmd doctor``: what of spmd works on this machine, and what follows from what does not.

It looks at versions, devices, memory and limits, and lets two ranks train small models: one compared with one process,
one with the bits that ``bits="same"`` is known to have on such a processor::

    python -m spmd doctor
    python -m spmd doctor --no-ranks --json

It ends with 0 unless something fails that training needs, and with 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.multiprocessing.spawn import spawn

from passes.runtime.segments import allocate_segment

from ..decorator import compile
from .known_bits import KNOWN, this_kind, trained_bits

TESTED = ("2.11", "2.15")  # the oldest and the newest torch
_STYLES = {"works": "green", "slower": "yellow", "fails": "red", "not here": "dim"}
_RANKS_WITHIN = 240.0  # seconds
_FEW_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``state``: "works", "slower", "fails" or "not here"; ``so``: what follows."""

    what: str
    state: str
    found: str
    so: str = ""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor`` to its parser."""
    command.add_argument("--no-ranks", action="store_true", help="start no ranks")
    command.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Look, print, and return the exit code."""
    found = [*_here(), *([] if arguments.no_ranks else _two_ranks())]
    if arguments.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        Console().print(_table(found))
    return int(any(each.state == "fails" for each in found))


def _here() -> Iterator[Finding]:
    """The checks that need no second process."""
    yield _torch()
    yield _devices()
    yield _shared_memory()
    yield _host_name()
    yield _open_files()
    yield _threads()
    if folder := os.environ.get("SPMD_DUMP"):
        yield _dumps(Path(folder))


def _torch() -> Finding:
    found = f"torch {torch.__version__}, Python {sys.version.partition(' ')[0]}"
    major, minor = torch.__version__.split(".")[:2]
    oldest, newest = TESTED
    if oldest <= f"{int(major)}.{int(minor):02}" <= newest:
        return Finding("versions", "works", found)
    return Finding("versions", "fails", found, f"spmd is tested with torch {oldest} to {newest}: install one of these")


def _devices() -> Finding:
    count = torch.cuda.device_count()
    if not count:
        return Finding("CUDA", "not here", "no device", "ranks train on the CPU")
    if not dist.is_nccl_available():
        return Finding("CUDA", "fails", f"{count} devices, no NCCL", "install a torch that was built with NCCL")
    return Finding("CUDA", "works", f"{count} devices, NCCL")


def _shared_memory() -> Finding:
    what, so = "shared memory", "ranks of this host send messages through gloo instead"
    try:
        allocate_segment(1 << 20).fill_(1)
    except (OSError, AttributeError) as error:  # os.memfd_create is there on Linux only
        return Finding(what, "slower", f"refused: {error}", so)
    return Finding(what, "works", "a segment of 1 MiB")


def _host_name() -> Finding:
    """Gloo listens at the address that the host's name has, unless an interface is named."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        known = [name for _, name in socket.if_nameindex()]
        if interface in known:
            return Finding("network", "works", f"interface {interface}")
        return Finding("network", "fails", f"GLOO_SOCKET_IFNAME={interface}", f"name one of {', '.join(known)}")
    name = socket.gethostname()
    way_out = "for ranks on several hosts, set GLOO_SOCKET_IFNAME to this host's interface"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Finding("network", "slower", f"the name {name} has no address", f"gloo listens on loopback: {way_out}")
    so = f"no other host can reach that: {way_out}" if address.startswith("127.") else ""
    return Finding("network", "works", f"{name} is {address}", so)


def _open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} for a process"
    if limit == resource.RLIM_INFINITY or limit >= _FEW_FILES:
        return Finding("open files", "works", found)
    so = "many ranks on this host, or many models in one process, may need more: ulimit -n 4096"
    return Finding("open files", "slower", found, so)


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, given = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    found = f"{threads} threads of torch, {cores} cores"
    if given is None and threads > 1 and cores > 1:
        so = "several ranks on this host would compete: set OMP_NUM_THREADS to cores divided by ranks (torchrun sets 1)"
        return Finding("threads", "slower", f"{found}, OMP_NUM_THREADS is not set", so)
    return Finding("threads", "works", found)


def _dumps(folder: Path) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding("dumps", "works", f"SPMD_DUMP={folder}")
    except OSError as error:
        return Finding("dumps", "slower", f"SPMD_DUMP={folder}: {error.strerror}", "steps warn, and train on without")


def _two_ranks() -> list[Finding]:
    """Two ranks of this machine train as one process does, and to known bits."""
    what = "two ranks"
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        context = spawn(_train, (folder,), nprocs=2, join=False)
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > start + _RANKS_WITHIN:
                    raise TimeoutError(f"they had not ended after {_RANKS_WITHIN:g} s")
        except Exception as error:
            reason = str(error).strip().splitlines()[-1]
            return [Finding(what, "fails", reason, "no training on several ranks of this host, until this works")]
        finally:
            for process in context.processes:
                process.kill()
        written = json.loads((Path(folder) / "written").read_text())
    found = f"train as one process does ({time.monotonic() - start:.0f} s)"
    problems = [note for note in written["notes"] if "cannot share memory" in note]
    if problems:
        return [Finding(what, "slower", found, "; ".join(problems)), _bits(written["bits"])]
    return [Finding(what, "works", f"{found}, over shared memory"), _bits(written["bits"])]


def _bits(found: str) -> Finding:
    """The hash of the step with equal bits beside the known one."""
    what, kind, short = 'bits="same"', this_kind(), found[:12]
    here = f"{kind[0]}, torch {kind[1]}"
    if kind not in KNOWN:
        return Finding(what, "not here", f"{short} on {here}", "no hash is known for this kind to compare it with")
    if KNOWN[kind] == found:
        return Finding(what, "works", f"{short}, as known for {here}")
    so = "a run that such a machine began goes on here with other bits: compare the versions of torch and its libraries"
    return Finding(what, "fails", f"{short}, but {KNOWN[kind][:12]} is known for {here}", so)


def _train(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    os.environ["SPMD_QUIET"] = "1"
    torch.manual_seed(0)
    batch = torch.randn(4, 3, dtype=torch.float64)
    plain, model = (nn.Linear(3, 2, dtype=torch.float64) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    step = compile(_step)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch[2 * rank : 2 * rank + 2])
    _step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batch)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected)
    bits = trained_bits(rank, 2)
    if rank == 0:
        (Path(folder) / "written").write_text(json.dumps({"notes": step.report().notes, "bits": bits}))
    dist.destroy_process_group()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _table(found: list[Finding]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("", "", "found", "so"):
        table.add_column(heading, overflow="fold")
    for each in found:
        table.add_row(each.what, Text(each.state, _STYLES[each.state]), Text(each.found), Text(each.so))
    return table
