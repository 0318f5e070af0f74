"""A stored checkpoint: a folder of ours, or safetensors files of another tool, such as Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from passes import SpmdError

from . import marker, values
from .folders import MARKER, VALUES, foreign_files
from .objects import Objects
from .storage import Files


@dataclass(frozen=True)
class Stored:
    """``trees``: plain values, with meta tensors for what is in ``files``. ``ties``: further names of tied tensors.

    ``all_ties_known``: whether tensors of two names that are not in ``ties`` were two.
    """

    files: Files
    trees: dict[str, Any]
    ties: Mapping[str, str]
    prefix: str = ""  # what our names have in front of those in the files
    all_ties_known: bool = True
    step: int | None = None
    rng: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path, objects: Objects) -> Stored:
        """Find what a folder stores for these objects. Raises ``SpmdError`` with the name of a file that is damaged."""
        return _of_ours(folder) if (folder / MARKER).is_file() else _of_others(folder, objects)

    def source(self, name: str) -> str:
        """The name in the files of what belongs to the tensor ``name``."""
        return self.ties.get(name, name).removeprefix(self.prefix)


def _of_ours(folder: Path) -> Stored:
    found = marker.read(folder)
    data = folder / found.data
    trees, rng = values.read(data / VALUES)
    files = Files([data / name for name in found.files if name != VALUES], are_parts=True)
    has = {name: (str(dtype).removeprefix("torch."), list(shape)) for name, (dtype, shape) in files.tensors.items()}
    wrong = [name for name, each in found.tensors.items() if has.get(name) != tuple(each)]
    if wrong:
        raise SpmdError(f"{data} does not have what {folder / MARKER} names: {', '.join(wrong[:8])}")
    return Stored(files, trees, found.ties, step=found.step, rng=rng)


def _of_others(folder: Path, objects: Objects) -> Stored:
    """The one model among the objects; of tied tensors such files have one, under any of their names."""
    if list(objects.modules) != list(objects.given) or len(objects.given) != 1:
        others = ", ".join(objects.given.keys() - objects.modules.keys())
        raise ValueError(f"{folder} has safetensors files without a checkpoint.json: expected one model, got {others}")
    (name,) = objects.given
    files = Files(foreign_files(folder))
    tree = {key: torch.empty(shape, dtype=dtype, device="meta") for key, (dtype, shape) in files.tensors.items()}
    ties = {}
    for path, first in objects.ties.items():
        key, known = path.removeprefix(f"{name}."), first.removeprefix(f"{name}.")
        for here, there, full in ((key, known, path), (known, key, first)):
            if here not in tree and there in tree:
                tree[here], ties[full] = tree[there], f"{name}.{there}"
    return Stored(files, {name: tree}, ties, f"{name}.", all_ties_known=False)
