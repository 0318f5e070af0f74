"""Peak memory of a step: the tensors alive before it, and the most that came on top while it ran.

What the process holds besides (the interpreter, graphs, compilers' caches) is left out: it depends neither on the
width of the model nor on the batch. On CUDA the allocator knows the peak. On the CPU the first part are the storages
that Python objects refer to (buckets that DDP has besides the gradients, without bucket views, are C++'s own and
missing), the second is how far the resident set rises, so that the transport's buffers count, too.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

from passes.runtime.local_peers import mapped_addresses


def peak(run: Callable[[], object], device: torch.device) -> int:
    """Bytes, while ``run`` runs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return int(torch.cuda.max_memory_allocated(device))
    alive = _tensors()
    ctypes.CDLL(None).malloc_trim(0)  # pages that are free already would hide what a step takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _status("VmRSS")
    run()
    return alive + max(0, _status("VmHWM") - before)


def _tensors() -> int:
    """Bytes on the CPU that tensors have which Python objects refer to, each once: storages may lie in one another.

    What this rank looks at in another one's memory counts there.
    """
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


def _storage(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a tensor's memory and the one after its last; None for one that has none, as fakes."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu" or not storage.data_ptr():
            return None
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except (RuntimeError, NotImplementedError):  # kinds of tensors without storage
        return None


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
