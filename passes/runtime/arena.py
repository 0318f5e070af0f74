"""The functions by which a program has memory that was planned ahead: ``reserve`` it, and find a ``place`` in it.

They are plain Python and stand in graphs: run as it is, a graph reserves memory at each call. What lowers a program may
keep the memory from call to call, since nothing that lives on after a call is ever placed in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .segments import allocate_segment


def reserve(size: int, device: torch.device, shared: bool = False) -> torch.Tensor:
    """An arena: ``size`` bytes of memory with nothing in them. ``shared``: the ranks of this host can look at it."""
    return allocate_segment(size) if shared else torch.empty(size, dtype=torch.uint8, device=device)


def place(
    arena: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor that lies ``offset`` bytes into ``arena``; ``stride`` counts elements, as always.

    Its storage ends where the tensor ends, and is no other place's: who waits for a collective finds it by the storage
    of its result.
    """
    if type(arena) is not torch.Tensor:  # a fake one has no memory to lie in
        return arena.new_empty_strided(tuple(shape), tuple(stride), dtype=dtype)
    end = offset + extent(shape, stride) * dtype.itemsize
    storage = torch.UntypedStorage.__getitem__(arena.untyped_storage(), slice(offset, end))
    return torch.empty(0, dtype=dtype, device=arena.device).set_(storage, 0, tuple(shape), tuple(stride))


def whole(place: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The concatenation of ``parts``, which were written one after the other into ``place``: nothing is left to do."""
    return place


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """From the first element of a tensor to the last one, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def has_arena(graph: fx.Graph) -> bool:
    """Whether values of ``graph`` lie in memory that was planned ahead."""
    return bool(graph.find_nodes(op="call_function", target=reserve))
