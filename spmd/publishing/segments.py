"""Segments: files in memory that one process writes and others map, each of one version at a time.

The writer holds an exclusive lock, readers hold shared ones, and nobody waits for a lock. The kernel lets go of the
locks of a process that ends. The number of the version is written last and taken away first: a segment that was left
half written has none.
"""

from __future__ import annotations

import fcntl
import os
import struct
import warnings
import weakref
from mmap import PROT_READ, mmap
from pathlib import Path

import torch

from passes import SpmdError

HEADER = 4096  # bytes before the tensors: a page
_FORMAT = struct.Struct("<8sq")
_MAGIC = b"spmd-pub"


class Segment:
    """A segment as its writer sees it. ``bytes``: those behind the header."""

    def __init__(self, path: Path, size: int) -> None:
        """Make the file. Raises ``SpmdError`` if there is no memory for it: to find that out later kills a process."""
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(self.file, 0, HEADER + size)
            self._memory = mmap(self.file, HEADER + size)
        except OSError as error:
            os.close(self.file)
            path.unlink(missing_ok=True)
            raise SpmdError(_no_memory(path, HEADER + size, error)) from error
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[HEADER:]

    def begin(self) -> bool:
        """Take it for a new version; False if a process reads it."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._set_version(0)
        return True

    def end(self, version: int = 0) -> None:
        """Let others read it, of this version; 0 for none."""
        self._set_version(version)
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file, and remove it; readers keep what they have mapped."""
        self.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Let go of the file, which stays."""
        os.close(self.file)

    def _set_version(self, version: int) -> None:
        _FORMAT.pack_into(self._memory, 0, _MAGIC, version)


def _no_memory(path: Path, size: int, error: OSError) -> str:
    held = os.statvfs(path.parent)
    return (
        f"expected {size:,} bytes of memory for {path}, but {path.parent} has {held.f_bavail * held.f_frsize:,}: "
        f"{error.strerror}. A rank needs its part of the model twice, and once more for each older version that is "
        "still read; a container has more with --shm-size"
    )


class MappedSegment:
    """A segment as a reader sees it, mapped once for all versions that it gets. ``bytes``: those behind the header."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises ``FileNotFoundError`` if it is gone, ``SpmdError`` if it is another file than was written."""
        self.file = os.open(path, os.O_RDONLY)
        try:
            if os.fstat(self.file).st_size != HEADER + size:
                raise SpmdError(f"expected {path} to have {HEADER + size:,} bytes: it is another file, or was cut off")
            self._memory = mmap(self.file, HEADER + size, prot=PROT_READ)
        except BaseException:
            os.close(self.file)
            raise
        self._close = weakref.finalize(self, os.close, self.file)
        self._close.atexit = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[HEADER:]

    def hold(self, version: int) -> bool:
        """Keep the writer from it until ``let_go``; False if it is written, or is not of this version."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if _FORMAT.unpack_from(self._memory) == (_MAGIC, version):
            return True
        self.let_go()
        return False

    def let_go(self) -> None:
        """Let the writer have it."""
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def is_removed(self) -> bool:
        """Whether its writer has given it up."""
        return os.fstat(self.file).st_nlink == 0

    def close(self) -> None:
        """Let go of the file."""
        self._close()
