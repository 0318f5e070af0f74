"""Memory: live tensors, each storage counted once, whether a given one is alive, and what the process has in use.

And what keeps Python's collector from visiting all of torch in every test.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import spmd
from passes import Report
from passes.runtime.local_peers import mapped_addresses

_M_MMAP_THRESHOLD = -3


def live_bytes() -> int:
    """The bytes of all tensors in this process, gradients included; memory of several storages counts once.

    Segments of other ranks count there.
    """
    gc.collect()
    others = mapped_addresses()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    tensors += [value.grad for value in tensors if value.is_leaf and value.grad is not None]
    spans = set[tuple[int, int]]()
    for value in tensors:
        wrapper = isinstance(value, (FakeTensor, DTensor)) or is_functorch_wrapped_tensor(value)
        if not wrapper and value.device.type != "meta":  # what is wrapped is listed, too
            storage = value.untyped_storage()
            if storage.data_ptr() not in others:
                spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return _covered(spans)


def spare_the_collector() -> None:
    """Let Python's collector run rarely, and not over what is there by now: torch has a million objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def resident_bytes() -> int:
    """The memory of this process that is in use (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def idle_bytes() -> int:
    """The memory of this process that no other one can have, without what malloc keeps (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("RssAnon")


def allocated_bytes() -> int:
    """What the C library has handed out and not got back: it counts each byte that is kept, whatever Linux does."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2  # glibc 2.33
    ask.restype = _Mallinfo2
    found = ask()
    return int(found.uordblks + found.hblkhd)


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def peak_bytes(run: Callable[[], object]) -> int:
    """The most of that while ``run`` runs for a second time or later: neither files nor shared memory grow then."""
    idle_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    run()
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def sampled_peak_bytes(run: Callable[[], object]) -> int:
    """The most of that while ``run`` runs, looked at each millisecond: without the files that it maps meanwhile."""
    seen, done = [idle_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(_status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(seen)


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def allocate_without_holes() -> None:
    """Let this process return each large tensor that is freed to Linux: holes between others are the allocator's."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def arena_bytes(compiled: spmd.CompiledStep) -> int:
    """The bytes of the arenas of a step, which its programs share: the largest of each kind."""
    memory = [Report.of(program).memory for program in compiled.programs]
    kinds = {kind for each in memory for kind in each}
    return sum(max(each[kind].arena for each in memory if kind in each) for kind in kinds)


def _covered(spans: set[tuple[int, int]]) -> int:
    """The number of addresses in the union of ``spans``."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def storages_of(module: torch.nn.Module) -> dict[str, StorageWeakRef]:
    """A weak reference to the storage of each parameter."""
    return {name: StorageWeakRef(parameter.untyped_storage()) for name, parameter in module.named_parameters()}


def still_alive(storages: dict[str, StorageWeakRef]) -> list[str]:
    """The names of the storages that are still referenced."""
    gc.collect()
    return [name for name, storage in storages.items() if not storage.expired()]
