"""The marker of a checkpoint, ``checkpoint.json``: what it holds, and in which files. Written last, read first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from passes import SpmdError

from .folders import MARKER

_FORMAT = "spmd checkpoint 2"


@dataclass(frozen=True)
class Marker:
    """``tensors``: dtype and global shape by name. ``ties``: further names. ``files``: bytes of each, in ``data``."""

    step: int | None
    data: str
    tensors: dict[str, tuple[str, list[int]]]
    ties: dict[str, str]
    files: dict[str, int]
    format: str = _FORMAT

    def to_bytes(self) -> bytes:
        """The marker as a file."""
        return json.dumps(vars(self)).encode()

    def check_files(self, folder: Path) -> None:
        """Raise ``SpmdError`` for a file that is not in ``folder`` in its length."""
        for name, length in self.files.items():
            file = folder / name
            has = file.stat().st_size if file.is_file() else None
            if has != length:
                found = "is not there" if has is None else f"has {has} bytes"
                raise SpmdError(
                    f"{file} {found}, but was written with {length} bytes: it is damaged, or not all ranks see "
                    "one folder"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of a tensor."""
        return tuple(self.tensors[name][1])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        dtype: torch.dtype = getattr(torch, self.tensors[name][0])
        return dtype


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Dtype and global shape of tensors, by name, as a marker has them."""
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}


def read(checkpoint: Path) -> Marker:
    """The marker of a checkpoint, of which all files are there in the length that they were written with.

    Raises ``SpmdError`` with the name of the file that is not.
    """
    path = checkpoint / MARKER
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        marker = Marker(**content)
    except (ValueError, TypeError) as error:
        raise SpmdError(f"{path} is damaged, or was not written by spmd.save: {error}") from error
    if marker.format != _FORMAT:
        raise SpmdError(f"{path} has the format {marker.format!r}, and this version of spmd reads {_FORMAT!r}")
    marker.check_files(checkpoint / marker.data)
    return marker
