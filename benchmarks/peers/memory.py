"""Peak memory of a step: the tensors alive before it, and the most memory that it allocates in addition.

Other memory of the process (the interpreter, graphs, compilers' caches) is left out: it depends neither on the width of
the model nor on the batch. On CUDA the allocator records the peak. On the CPU the first part are the storages that
Python objects refer to, and DDP's buckets, which belong to C++ unless gradients are views of them; the second is the
rise of the resident set, so that the buffers of the communication backend count, too.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def peak(run: Callable[[], object], device: torch.device) -> int:
    """The peak memory while ``run`` runs, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return int(torch.cuda.max_memory_allocated(device))
    alive = _tensors() + _buckets()
    ctypes.CDLL(None).malloc_trim(0)  # free pages would hide what a step allocates
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = status("VmRSS")
    run()
    return alive + max(0, status("VmHWM") - before)


def _tensors() -> int:
    """Bytes on the CPU of the tensors that Python objects refer to, each once: storages may overlap.

    Segments of other ranks that are mapped here count there.
    """
    from passes.runtime.local_peers import mapped_addresses  # here, since some read a status before they import passes

    gc.collect()
    others = mapped_addresses()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    tensors += [found.grad for found in tensors if found.is_leaf and found.grad is not None]
    total = end = 0
    for start, stop in sorted(filter(None, map(_storage, tensors))):
        if start in others:
            continue
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _buckets() -> int:
    """Bytes of the buckets beside the gradients of DDP modules."""
    modules = [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]
    return sum(
        parameter.nbytes
        for module in modules
        if not module.gradient_as_bucket_view
        for parameter in module.parameters()
        if parameter.requires_grad
    )


def _storage(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a tensor's memory and the one after its last; None without memory, as of a fake tensor."""
    if issubclass(type(tensor), DTensor):
        return None  # this rank's part is a tensor by itself
    try:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu" or not storage.data_ptr():
            return None
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except (RuntimeError, NotImplementedError):  # kinds of tensors without storage
        return None


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def pss(process: int | str = "self") -> int:
    """The resident bytes of a process, in which a page that n processes map counts as an n-th."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    return int(rollup.split("Pss:")[1].split()[0]) * 1024


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of this rank's parts."""
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]
    return sum(each.nbytes for each in parts)
