"""The plain values of a checkpoint, in one file that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from passes import SpmdError

from .trees import IN_FILES, leaves


def check(trees: dict[str, Any]) -> None:
    """Raise ``TypeError`` with the name of a value that could not be loaded again."""
    if _is_plain(trees) or _saved(trees) is not None:
        return
    wrong = [name for key, tree in trees.items() for name, leaf in leaves(tree, key) if _saved(leaf) is None]
    raise TypeError(
        f"{', '.join(wrong[:8]) or 'the state'} cannot be saved: a checkpoint holds tensors, numbers, strings, None, "
        "and dicts, lists, tuples and sets of these, since loading it executes no code. Let state_dict() return such "
        "values"
    )


def to_bytes(trees: dict[str, Any], rng: dict[str, Any], folder: str) -> bytes:
    """The file of these values, which ``check`` has seen; ``folder``: the name of that which it will be in."""
    file = io.BytesIO()
    torch.save({"state": trees, "rng": rng, "folder": folder}, file)
    return file.getvalue()


def _is_plain(value: Any) -> bool:
    """Whether a tree consists of what is known to come back, so that there is no need to try."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is torch.Tensor:
        return value.layout is torch.strided and value.dtype in IN_FILES and not value.__dict__
    return kind in (bool, float, str, NoneType) or (kind is int and abs(value) < 2**63)


def _saved(value: Any) -> bytes | None:
    """The bytes that ``torch.save`` writes; None unless they load again without executing code."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception:  # pickle raises what it likes
        return None
    return file.getvalue()


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trees, and the random state. Raises ``SpmdError`` for a file that is damaged, or of another save."""
    try:
        content = torch.load(path, weights_only=True)
        state, rng, folder = content["state"], content["rng"], content["folder"]
    except Exception as error:  # so does torch.load
        raise SpmdError(f"{path} is damaged, or was not written by spmd.save: {error}") from error
    if folder != path.parent.name:
        raise SpmdError(f"{path} is not the file that was saved there, but that of {folder}")
    return state, rng
