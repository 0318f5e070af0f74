"""``spmd.export``: write a model as safetensors for other tools, file by file, so that no rank holds the whole."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..deferral.pending import finish_pending
from .direct import save_file
from .folders import INDEX, make, path_of, write_whole
from .names import Names, Piece, Pieces
from .prepare import Prepared, prepare
from .storage import Files, file_numbers, write
from .together import Together, together
from .trees import leaves

_LEAST, _MOST = 16_000_000, 1_000_000_000  # bytes of a file


def export(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    only: str | Sequence[str] | None = None,
    names: Names | None = None,
) -> None:
    """Write the parameters and persistent buffers of a model as safetensors, under their names; all ranks call it.

    One file ``model.safetensors``, or, for a large model, several with an index: what ``from_pretrained`` of Hugging
    Face's libraries reads, with the ``config.json`` of a model that has a configuration. Tied tensors are written once.
    ``dtype``: cast floating-point tensors to it. ``only``: an fnmatch pattern, or several, of the names to write, as
    ``"*lora*"`` for adapters alone; ``ValueError`` for one that matches none. No rank holds the whole model: each
    writes its parts to a temporary folder beside the files, and puts some of the files together. ``names``: the
    table of ``spmd.from_pretrained``, for files with the names that it reads, fused or split.
    ``spmd.load(folder, model=...)`` reads them.
    """
    path = path_of(folder)
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {model!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"expected dtype to be a floating-point torch.dtype or None, got {dtype!r}")
    finish_pending()
    with together(f"exporting to {path}") as ranks:
        prepared = _selected(prepare({"": model}, ranks), only, ranks)
        _check_values(prepared, ranks)
        pieces = _pieces(prepared, names, ranks)
        with _temporary(path, ranks) as parts:
            write(parts, prepared.tensors, ranks, dtype)
            files = _assign(prepared, pieces, dtype, ranks.size)
            ranks.run(lambda: _write_files(parts, files, prepared, pieces, dtype, ranks))
            ranks.first(lambda: _publish(path, parts, files, model))


def _selected(prepared: Prepared, only: str | Sequence[str] | None, ranks: Together) -> Prepared:
    """Select the entries whose names match a pattern of ``only``; None selects all."""
    if only is None:
        return prepared
    tree, patterns = prepared.trees[""], [only] if isinstance(only, str) else list(only)
    idle = [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in tree)]
    if idle or not patterns:
        ranks.fail(ValueError(f"expected only to match names of {', '.join(list(tree)[:3])}, ..., got {only!r}"))
    names = {name for name in tree if any(fnmatch(name, pattern) for pattern in patterns)}
    tensors = {name: tensor for name, tensor in prepared.tensors.items() if name[1:] in names}
    written = set(tensors)
    for name in sorted(names):  # of tied tensors the first name that is left
        first = prepared.ties.get(f".{name}", "")
        if first in prepared.tensors and first not in written:
            tensors[f".{name}"] = prepared.tensors[first]
            written.add(first)
    return replace(prepared, tensors=tensors, trees={"": {name: tree[name] for name in tree if name in names}})


def _check_values(prepared: Prepared, ranks: Together) -> None:
    """Raise ``ValueError`` for state that is no tensor: such files do not hold it."""
    others = [name for name, leaf in leaves(prepared.trees[""], "") if not isinstance(leaf, torch.Tensor)]
    if others:
        ranks.fail(ValueError(f"{', '.join(others)} is no tensor: safetensors files hold tensors only. Use spmd.save"))


@contextmanager
def _temporary(folder: Path, ranks: Together) -> Iterator[Path]:
    """A folder for the parts of all ranks, which goes in the end."""
    parts = folder / f".parts-{ranks.first(lambda: secrets.token_hex(8))}"
    try:
        ranks.first(lambda: make(parts))
        yield parts
    finally:
        if ranks.rank == 0:
            shutil.rmtree(parts, ignore_errors=True)


def _small(prepared: Prepared) -> dict[str, torch.Tensor]:
    """The tensors that every rank has whole, since they are stored with the values."""
    tree = leaves(prepared.trees[""], "")
    return {name: leaf for name, leaf in tree if isinstance(leaf, torch.Tensor) and not leaf.is_meta}


def _pieces(prepared: Prepared, names: Names | None, ranks: Together) -> Pieces:
    """The tensors of the files, and where in the model's those are."""
    shapes = {name[1:]: tuple(tensor.shape) for name, tensor in (prepared.tensors | _small(prepared)).items()}
    try:
        return Pieces.by(names, shapes)
    except (TypeError, ValueError) as error:  # the same on all ranks
        ranks.fail(error)


def _assign(prepared: Prepared, pieces: Pieces, dtype: torch.dtype | None, size: int) -> list[list[str]]:
    """The names in each file: a file has at most a quarter of a rank's share of the model, if that is not small."""
    of = prepared.tensors | _small(prepared)

    def length(source: str) -> int:
        tensor = of[f".{pieces.sources[source][0].name}"]
        cast = dtype is not None and tensor.is_floating_point()
        count = math.prod(pieces.shapes[source])
        return count * (dtype.itemsize if cast and dtype is not None else tensor.element_size())

    lengths = {source: length(source) for source in pieces.shapes}
    limit = min(max(sum(lengths.values()) // (4 * size), _LEAST), _MOST)
    numbers = file_numbers(lengths, limit)
    files: list[list[str]] = [[] for _ in range(max(numbers.values(), default=1))]
    for name, number in numbers.items():
        files[number - 1].append(name)
    return files


def _write_files(
    parts: Path, files: list[list[str]], prepared: Prepared, pieces: Pieces, dtype: torch.dtype | None, ranks: Together
) -> None:
    """Put together the files of this rank, tensor by tensor: it holds one whole tensor of each side at a time."""
    stored = Files(sorted(parts.glob("shard-*.safetensors")))
    small = {name: _cast(tensor, dtype) for name, tensor in _small(prepared).items()}
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in stored.tensors.items()}

    def whole(name: str) -> torch.Tensor:
        """One tensor of the model, under the name with the dot in front that its empty name has left."""
        if name in small:
            return small[name]
        target = torch.empty_like(empty[name], device="cpu")
        stored.read({name: target}, Together(ranks.what, None))
        return target

    def like(source: str) -> torch.Tensor:
        dtypes = {(empty | small)[f".{piece.name}"].dtype for piece in pieces.sources[source]}
        if len(dtypes) > 1:
            raise ValueError(f"names makes one tensor, {source}, of several dtypes: give export a dtype")
        return torch.empty(pieces.shapes[source], dtype=dtypes.pop(), device="meta")

    for number in range(ranks.rank, len(files), ranks.size):
        save_file(
            {source: like(source) for source in files[number]},
            parts / str(number),
            {"format": "pt"},
            lambda source: _put_together(pieces.sources[source], pieces.shapes[source], whole),
        )


def _put_together(
    pieces: Sequence[Piece], shape: tuple[int, ...], whole: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """A tensor of a file, of its pieces in those of the model."""
    found = []
    for piece in pieces:
        tensor = whole(f".{piece.name}")
        if piece.index is not None:
            tensor = tensor[piece.index]
        found.append(tensor if tuple(tensor.shape) == shape else tensor.narrow(0, piece.at, piece.rows))
    return found[0].contiguous() if len(found) == 1 else torch.cat(found)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.clone()


def _publish(folder: Path, parts: Path, files: list[list[str]], model: nn.Module) -> None:
    """Move the files to their places, in place of earlier ones; the index comes last."""
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{k:05d}-of-{len(files):05d}.safetensors" for k in range(1, len(files) + 1)]
    (folder / INDEX).unlink(missing_ok=True)
    for old in {*folder.glob("model-*-of-*.safetensors"), folder / "model.safetensors"}:
        old.unlink(missing_ok=True)
    total = 0
    for k, name in enumerate(names):
        total += (parts / str(k)).stat().st_size
        os.replace(parts / str(k), folder / name)
    if len(names) > 1:
        where = {each: name for name, members in zip(names, files, strict=True) for each in members}
        write_whole(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": where}).encode())
    _save_configuration(folder, model)


def _save_configuration(folder: Path, model: nn.Module) -> None:
    """Write the configurations that a model of Hugging Face's has, as its ``save_pretrained`` does."""
    attributes: Mapping[str, Any] = vars(model)
    for key in ("config", "generation_config"):
        write_to = getattr(attributes.get(key), "save_pretrained", None)
        if callable(write_to):
            write_to(folder)
