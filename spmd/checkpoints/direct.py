"""Safetensors files, written past the page cache: by a thread that shares its core with a training step.

``safetensors.torch.save_file`` copies what it writes into new pages of the page cache: that takes about 1 s of CPU for
each GB, which the step loses. Direct I/O leaves the copying to the disk. It takes whole blocks from aligned memory,
so tensors go through a small buffer, which stays in the processor's cache.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch

from ..ranks.equal_values import bytes_of

_BLOCK = 4096  # of which lengths and addresses are multiples, on every disk; a page is no smaller
_BUFFER = 2_097_152
DTYPES = {  # what safetensors files hold, under their names there
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def save_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str],
    read: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Write dense tensors to the disk, as that of safetensors does, and ``fsync``.

    ``read`` returns the values of a tensor by its name; it is called for one after the other, and ``tensors`` may be
    on the meta device then.
    """
    wide_first = sorted(tensors.items(), key=lambda each: -each[1].element_size())  # so that each is aligned
    with _DirectFile(path) as file:
        file.write(_bytes_of(_header(wide_first, metadata)))
        for name, tensor in wide_first:
            file.write(bytes_of((read(name) if read else tensor).cpu()))


def _header(tensors: list[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file: its length, and JSON with the place of each tensor behind it, up to a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class _DirectFile:
    """A new file, which is written block by block; through the page cache where the file system has no other way."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path)
        self._buffer = mmap.mmap(-1, _BUFFER)  # at the start of a page
        self._staged = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._filled = self._length = 0

    def write(self, values: torch.Tensor) -> None:
        """Append bytes."""
        for part in values.split(_BUFFER):
            rest = part[: _BUFFER - self._filled]
            self._stage(rest)
            self._stage(part[rest.numel() :])

    def _stage(self, values: torch.Tensor) -> None:
        """Append bytes for which there is room."""
        end = self._filled + values.numel()
        self._staged[self._filled : end].copy_(values)
        self._filled = end
        self._length += values.numel()
        if end == _BUFFER:
            self._write_staged()

    def _write_staged(self) -> None:
        """Write what is staged, up to a whole block."""
        with memoryview(self._buffer) as staged:
            start, end = 0, self._filled + -self._filled % _BLOCK
            while start < end:
                start += self._write(staged[start:end])
        self._filled = 0

    def _write(self, block: memoryview) -> int:
        try:
            return os.write(self._descriptor, block)
        except OSError as error:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _DIRECT:
                raise
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)  # a file system with rules of its own
            return os.write(self._descriptor, block)

    def __enter__(self) -> _DirectFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._write_staged()
                os.ftruncate(self._descriptor, self._length)
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


_DIRECT = getattr(os, "O_DIRECT", 0)  # of Linux


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)
