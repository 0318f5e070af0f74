"""Slices of the tensors in safetensors files, read from the file into place, with one small buffer.

A file that is mapped into memory counts as memory of its reader for as long as it is open, and what is sliced of it is
copied twice. Here a run of bytes that is one in the file and in the target is read to where it belongs; all else, rows
that are cast or cut, goes through a buffer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from passes import SpmdError

from .direct import DTYPES
from .storage import check_header

_BUFFER = 8_000_000
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, row by row from the byte ``begin`` on."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def stored_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of these files by name. Raises ``SpmdError`` with the name of a file that cannot be read."""
    found: dict[str, StoredTensor] = {}
    for path in paths:
        check_header(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise SpmdError(f"{name} in {path} is of {entry['dtype']}, a dtype that cannot be read here")
            if name in found:
                raise SpmdError(f"{found[name].path} and {path} both have {name}: keep one of these files")
            begin = 8 + length + entry["data_offsets"][0]
            found[name] = StoredTensor(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), begin)
    return found


class SliceReader:
    """Reads slices; files stay open until it ends."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, tensor: StoredTensor, start: Sequence[int], target: torch.Tensor) -> None:
        """Fill ``target``, of any strides and dtype, with the values of ``tensor`` from the indices ``start`` on."""
        if target.numel():
            self._read(tensor, tensor.begin, tensor.shape, start, target)

    def _read(
        self, tensor: StoredTensor, begin: int, shape: Sequence[int], start: Sequence[int], target: torch.Tensor
    ) -> None:
        """Read of a part of a file that begins at a byte, and has this shape."""
        if not shape:
            return self._rows(tensor, begin, target.reshape(1, 1), 1, 0)
        size = tensor.dtype.itemsize * torch.Size(shape[1:]).numel()  # bytes of a row
        begin += start[0] * size
        if tuple(target.shape[1:]) == tuple(shape[1:]):  # whole rows: one run of bytes
            self._run(tensor, begin, target)
        elif len(shape) == 2:
            self._rows(tensor, begin, target, shape[1], start[1])
        else:
            for k, part in enumerate(target):
                self._read(tensor, begin + k * size, shape[1:], start[1:], part)

    def _run(self, tensor: StoredTensor, begin: int, target: torch.Tensor) -> None:
        """Read one run of bytes."""
        if not target.is_contiguous():
            dense = torch.empty(target.shape, dtype=target.dtype)
            self._run(tensor, begin, dense)
            target.copy_(dense)
        elif target.dtype == tensor.dtype and target.device.type == "cpu":
            self._fill(tensor, begin, target.reshape(-1).view(torch.uint8))
        else:
            columns = target[0].numel()
            self._rows(tensor, begin, target.view(target.shape[0], columns), columns, 0)

    def _rows(self, tensor: StoredTensor, begin: int, target: torch.Tensor, columns: int, first: int) -> None:
        """Read rows of so many columns, of which ``target`` has those from ``first`` on, through the buffer."""
        size = tensor.dtype.itemsize * columns
        step = max(_BUFFER // size, 1)
        for row in range(0, target.shape[0], step):
            part = target[row : row + step]
            values = self._staged(size * part.shape[0])
            self._fill(tensor, begin + row * size, values)
            whole = values.view(tensor.dtype).view(part.shape[0], columns)
            part.copy_(whole[:, first : first + part.shape[1]])

    def _staged(self, length: int) -> torch.Tensor:
        if self._buffer.numel() < length:
            self._buffer = torch.empty(length, dtype=torch.uint8)
        return self._buffer[:length]

    def _fill(self, tensor: StoredTensor, begin: int, target: torch.Tensor) -> None:
        """Fill bytes with those of the file."""
        if tensor.path not in self._descriptors:
            self._descriptors[tensor.path] = os.open(tensor.path, os.O_RDONLY)
        values: Any = target.numpy()
        view, done = memoryview(values), 0
        while done < len(view):
            count = os.preadv(self._descriptors[tensor.path], [view[done:]], begin + done)
            if not count:
                raise SpmdError(f"{tensor.path} ends within a tensor: it was cut off while it was read")
            done += count
