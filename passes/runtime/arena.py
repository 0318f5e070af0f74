"""Memory that is planned ahead, as functions that a graph calls: ``reserve`` an arena, take a ``view_at`` an offset.

They are plain Python: run as it is, a graph reserves memory at each call. A backend may keep the memory from call to
call, since no value that outlives a call lies in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .host_memory import like
from .segments import allocate_segment

ALIGNMENT = 64  # bytes: a cache line, and as wide as any vector


def reserve(size: int, device: torch.device, shared: bool = False) -> torch.Tensor:
    """An arena: ``size`` bytes of uninitialized memory. ``shared``: all ranks of this host can read it."""
    return allocate_segment(size) if shared else torch.empty(size, dtype=torch.uint8, device=device)


def view_at(
    arena: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor that starts ``offset`` bytes into ``arena``; ``stride`` counts elements.

    It has a storage of its own, which ends where the tensor ends: pending collectives are found by the storage of their
    result.
    """
    if type(arena) is not torch.Tensor:  # a fake one has no memory
        return arena.new_empty_strided(tuple(shape), tuple(stride), dtype=dtype)
    end = offset + extent(shape, stride) * dtype.itemsize
    storage = torch.UntypedStorage.__getitem__(arena.untyped_storage(), slice(offset, end))
    return torch.empty(0, dtype=dtype, device=arena.device).set_(storage, 0, tuple(shape), tuple(stride))


def whole(view: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The concatenation of ``parts``, which were written one after the other into ``view``: nothing is left to do."""
    return view


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements in memory from the first one of a tensor to its last one, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy at a multiple of ``ALIGNMENT``: matrix products round by where operands begin."""
    return like(tensor, tensor.device).copy_(tensor) if is_unaligned(tensor) else tensor


def is_unaligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins elsewhere. A fake one has no memory."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.data_ptr() % ALIGNMENT != 0


def has_arena(graph: fx.Graph) -> bool:
    """Whether values of ``graph`` lie in an arena."""
    return bool(graph.find_nodes(op="call_function", target=reserve))


def has_shared_arena(graph: fx.Graph) -> bool:
    """Whether other ranks of the host read memory that a graph reserves."""
    return any(True in node.args for node in graph.find_nodes(op="call_function", target=reserve))
