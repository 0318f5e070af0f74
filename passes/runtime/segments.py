"""Shared-memory segments: files in memory, without a name, that the ranks of one host map of each other.

``allocate_segment`` returns one as a tensor of bytes. ``locate`` finds the segment that a tensor is stored in, and its
offset there; ``copy_to_segment`` copies a tensor that is stored elsewhere. The owner of a segment writes, the others
read; ``local_peers.py`` synchronizes them.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from dataclasses import dataclass
from itertools import count
from mmap import mmap

import torch

EMPTY = torch.empty(0, dtype=torch.uint8)
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of fcntl(2), which Python knows from 3.13 on
_numbers = count(1)
_segments: dict[int, Segment] = {}  # by address
_last_closed = 0


@dataclass(frozen=True)
class Segment:
    """A file in memory that this process has mapped; it is closed when no tensor is stored in it any more."""

    number: int
    size: int
    file: int


@dataclass(frozen=True)
class SharedBytes:
    """The contents of a tensor that local ranks can read: ``bytes``, (size,) uint8, at ``offset`` in ``segment``.

    ``segment`` is None where there are no bytes.
    """

    bytes: torch.Tensor
    segment: Segment | None = None
    offset: int = 0


def allocate_segment(size: int) -> torch.Tensor:
    """Return ``size`` zero bytes that local ranks can map, (size,) uint8. Raises ``OSError`` if there is no memory."""
    try:
        made, memory = _mapped_file(max(size, 1))
    except OSError as error:
        raise OSError(
            error.errno,
            f"could not allocate {size:,} bytes of memory shared by the ranks of a host: {error.strerror}. They take "
            "two open files (ulimit -n) and count as shared memory",
        ) from error
    tensor = torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the map
    _segments[tensor.data_ptr()] = made
    weakref.finalize(memory, _close, tensor.data_ptr(), made).atexit = False
    return tensor[:size]


def _mapped_file(size: int) -> tuple[Segment, mmap]:
    file = os.memfd_create("spmd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        memory = mmap(file, size)
        _seal(file)
        return Segment(next(_numbers), size, file), memory
    except BaseException:
        os.close(file)
        raise


def _seal(file: int) -> None:
    """From now on nobody can change the size of a file, or get to write to it who does not already."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals | _SEAL_FUTURE_WRITE)
    except OSError:  # before Linux 5.1
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)


def _close(address: int, closed: Segment) -> None:
    global _last_closed
    if _segments.get(address) is closed:  # else another thread has made one there meanwhile
        del _segments[address]
    _last_closed = closed.number
    os.close(closed.file)


def last_closed() -> int:
    """The number of the segment that was closed last; another one after each that is closed."""
    return _last_closed


def open_segments() -> set[int]:
    """The numbers of the segments of this process that are still open."""
    return {each.number for each in list(_segments.values())}  # one may be closed meanwhile


def locate(tensor: torch.Tensor) -> SharedBytes | None:
    """Find a contiguous ``tensor`` in the segments of this process; None if it is stored elsewhere."""
    if not tensor.nbytes:
        return SharedBytes(EMPTY)
    start = tensor.data_ptr()
    for address, each in list(_segments.items()):  # one may be closed meanwhile
        if address <= start and start + tensor.nbytes <= address + each.size:
            return SharedBytes(tensor.view(-1).view(torch.uint8), each, start - address)
    return None


def copy_to_segment(tensor: torch.Tensor) -> SharedBytes:
    """Copy ``tensor`` into a segment of its own."""
    source = tensor.contiguous().view(-1).view(torch.uint8)
    copy = locate(allocate_segment(source.numel()).copy_(source))
    assert copy is not None, "it is stored in a segment that was just allocated"
    return copy
