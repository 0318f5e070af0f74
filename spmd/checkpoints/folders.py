"""Folders of checkpoints: which of them are complete, and which is the newest.

    ckpt/step-100/checkpoint.json           what there is; written last, in one move
    ckpt/step-100/data-<token>/*.safetensors, values.pt

A folder without ``checkpoint.json`` is none. A checkpoint that is saved over another has a data folder of its own, and
the older one goes once ``checkpoint.json`` names the new one: at every moment either is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from passes import SpmdError

MARKER, VALUES, DATA = "checkpoint.json", "values.pt", "data-"
INDEX = "model.safetensors.index.json"  # of Hugging Face's: which file has which tensor
_STEP = re.compile(r"step-(\d+)")


def path_of(folder: Any) -> Path:
    """The folder that a user gave. Raises ``TypeError`` or ``ValueError`` for what is no path of a file system."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"expected folder to be a path, got {folder!r}")
    if "://" in str(folder):
        raise ValueError(f"expected folder to be a path of a file system that all ranks see, got {str(folder)!r}")
    return Path(folder).absolute()


def make(folder: Path) -> None:
    """Make a folder, and those above it. Raises ``SpmdError`` where it cannot be made."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise SpmdError(
            f"expected a path where a folder can be made, but {folder.parent} cannot have one: {error}. Pass another"
        ) from error


def target(folder: Path, step: int | None) -> Path:
    """The folder of a step's checkpoint; without ``step`` the folder itself is one."""
    return folder if step is None else folder / f"step-{step}"


def newest(folder: Path) -> Path | None:
    """The checkpoint in a folder: the folder itself if it is one, else that of the last step; None if there is none.

    Raises ``ValueError`` for a folder that is one and has those of steps, too: which is newer is not known.
    """
    complete = {step: path for step, path in steps(folder).items() if (path / MARKER).is_file()}
    if (folder / MARKER).is_file():
        if complete:
            raise ValueError(
                f"{folder} is a checkpoint, and has those of steps {sorted(complete)}, too: load one of them by its "
                f"folder, such as {complete[max(complete)]}, or remove {folder / MARKER}"
            )
        return folder
    return complete[max(complete)] if complete else None


def steps(folder: Path) -> dict[int, Path]:
    """The folders of steps, complete or not, by step."""
    found = (
        ((_STEP.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    )
    return {int(match[1]): path for match, path in found if match}


def foreign_files(folder: Path) -> list[Path]:
    """The safetensors files that other tools wrote: ``folder`` itself, those of its index, or all in it.

    Raises ``SpmdError`` for an index that is damaged.
    """
    if folder.suffix == ".safetensors":
        return [folder] if folder.is_file() else []
    index = folder / INDEX
    if index.is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SpmdError(f"{index} is damaged, or no index of safetensors files: {error!r}") from error
    return sorted(folder.glob("*.safetensors"))


def remove_leftovers(checkpoint: Path, data: str) -> None:
    """Remove from a checkpoint the data of others: of an earlier one, and of saves that did not end."""
    for path in checkpoint.glob(f"{DATA}*"):
        if path.name != data:
            shutil.rmtree(path, ignore_errors=True)


def keep_newest(folder: Path, count: int, saved: int) -> None:
    """Remove all but the ``count`` newest complete checkpoints up to step ``saved``, and earlier incomplete ones.

    The marker goes first, so that none is half there.
    """
    earlier = {step: path for step, path in steps(folder).items() if step <= saved}
    complete = sorted(step for step, path in earlier.items() if (path / MARKER).is_file())
    for step, path in earlier.items():
        if step not in complete[-count:]:
            (path / MARKER).unlink(missing_ok=True)
            _partial(path / MARKER).unlink(missing_ok=True)  # of a save that was killed just before its end
            for data in path.glob(f"{DATA}*"):
                shutil.rmtree(data, ignore_errors=True)
            if not any(path.iterdir()):  # what else the user keeps there stays
                path.rmdir()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file such that it is there as a whole or not at all, also after a loss of power."""
    partial = _partial(path)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
