"""One rank of the pool: receive a job, join its process group, run it, answer, and check the global state of torch."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import spmd
from spmd._torch import gloo_of_one_worker

from .torch_state import torch_state

if TYPE_CHECKING:
    from benchmarks.peers.network import Network

_WORN = 14  # threads of gloo, each of which wakes up often: a program on two axes leaves some, a call that failed, too


@dataclass(frozen=True)
class Task:
    """A job for one rank; ``store``: the file store of its process group, None if the job makes its own."""

    rank: int
    world: int
    store: Path | None
    timeout: float
    job: bytes


@dataclass(frozen=True)
class Done:
    """A job's pickled result. ``is_worn``: the process has threads of gloo left, and is replaced."""

    value: bytes
    is_worn: bool = False


@dataclass(frozen=True)
class Failed:
    """An error and its time: a death counts as first, a hang as last. The process is replaced."""

    text: str
    when: float = float("inf")


Outcome = Done | Failed


def serve(pipe: Connection, stacks: Path, network: Network | None, number: int) -> None:
    """Run jobs until the pipe closes. ``stacks`` gets what a job prints to stderr, and its stack on a signal.

    These are ``SIGUSR1``, for Python's stack, and fatal ones, for those of all native threads, too. ``number``: which
    worker this is; it enters its host of the network, if there are any.
    """
    if network is not None:
        network.enter(number)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with stacks.open("a") as file, gloo_of_one_worker():  # two of torch's corrupt memory, once in some thousand jobs
        os.dup2(file.fileno(), sys.stderr.fileno())
        torch._C._set_print_stack_traces_on_fatal_signal(True)
        faulthandler.register(signal.SIGUSR1, file=file)
        faulthandler.enable(file)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the session; it closes the pipe
        while (received := _next(pipe)) is not None:
            file.truncate(0)
            pipe.send_bytes(packed(_outcome(received)))


def packed(value: Any) -> bytes:
    """Pickled as plain bytes: tensors travel by value."""
    return pickle.dumps(value)


def unpacked(data: bytes) -> Any:
    """The inverse of ``packed``."""
    return pickle.loads(data)


def _next(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except EOFError:
        return None


def _outcome(received: bytes) -> Outcome:
    try:
        sys.path[:], task = unpacked(received)
        return _run(task, *unpacked(task.job))
    except BaseException:
        return Failed(traceback.format_exc(), time.time())


def _run(task: Task, job: Any, args: tuple[Any, ...]) -> Outcome:
    random.seed(0)
    torch.manual_seed(0)
    spmd.seed(None)
    before = torch_state()
    outcome: Outcome
    try:
        if task.store is not None:
            _join(task, task.store)
        outcome = Done(packed(job(task.rank, task.world, *args)))
    except BaseException:  # whatever a job raises is its own failure, never the worker's end
        outcome = Failed(traceback.format_exc(), time.time())  # before other ranks see this one leave
    if dist.is_initialized():
        dist.destroy_process_group()
    after = torch_state()
    left = {name: (was, after[name]) for name, was in before.items() if after[name] != was}
    if not left:
        return replace(outcome, is_worn=_is_worn()) if isinstance(outcome, Done) else outcome
    text = f"{job.__name__} left torch changed; what, before and after: {left}"
    return Failed(f"{outcome.text}\n{text}" if isinstance(outcome, Failed) else text, time.time())


def _is_worn() -> bool:
    """Whether there are too many threads, also of groups that are referred to in cycles, which Python seldom collects.

    To collect them takes 20 ms; a process in the place of this one takes 0.2 s for what all others have done before.
    """
    if _threads_of_gloo() <= _WORN:
        return False
    gc.collect()
    return _threads_of_gloo() > _WORN


def _threads_of_gloo() -> int:
    """Threads that gloo has started (Linux): each wakes up a hundred times a second, also once its group has failed."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(path.read_text())
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def _join(task: Task, at: Path) -> None:
    """Join the process group of the job."""
    store, deadline = dist.FileStore(str(at), task.world), timedelta(seconds=task.timeout)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world, timeout=deadline)
    dist.barrier()  # a rank that is done at once must not close connections that others still open
