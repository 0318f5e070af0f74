"""Models from a folder of safetensors files, of which each rank reads its parts; for ``spmd.from_pretrained``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch import local_tensor, own_buffers
from ..placements import extent
from ..ranks.equal_values import bytes_of
from ..ranks.world import describe as describe_mesh
from .built import LibraryNames, build
from .folders import foreign_files
from .names import Names, Piece, Pieces
from .slices import SliceReader, StoredTensor, stored_tensors

_SHOWN = 20


class PretrainedModel:
    """A model without values, and where in which file those are. Raises for all that does not fit."""

    def __init__(self, folder: Path, make: Any, config: Any, dtype: torch.dtype | None, names: Names | None) -> None:
        stored = stored_tensors(_files(folder))
        floating = [each.dtype for each in stored.values() if each.dtype.is_floating_point]
        self.model = build(folder, make, config, dtype, floating[0] if floating else None)
        self._first = _first_names(self.model)
        self._pieces = Pieces.by(names, {name: tuple(each.shape) for name, each in _state(self.model).items()})
        library, wanted = LibraryNames(self.model), self._pieces.shapes
        known, is_body = {name: library.known(name, wanted) for name in stored}, library.is_body(stored, wanted)
        self._stored = {
            name if known[name] in stored else known[name]: each
            for name, each in stored.items()
            if known[name] in wanted or not library.is_ignored(name, is_body)
        }
        self._check(str(folder))
        same = [name for name, pieces in self._pieces.of.items() if pieces[0].source == name and name in self._stored]
        changed = [name for name in same if library.changes(name)]
        if changed:
            raise ValueError(
                f"transformers changes {', '.join(changed[:8])} when it reads {folder}, which is not done here: "
                "read it by from_pretrained of transformers, and write it anew by spmd.export"
            )

    def _check(self, where: str) -> None:
        """Raise ``ValueError`` with all that does not fit."""
        pieces, wrong = self._pieces, _without_values(self.model)
        has = {name for name, each in pieces.of.items() if all(piece.source in self._stored for piece in each)}
        found = {self._first.get(name, name) for name in has}
        for name, each in pieces.of.items():
            if self._first.get(name, name) not in found:
                missing = [piece.source for piece in each if piece.source not in self._stored]
                wrong += [f"{name}: {source} is missing in the files" for source in missing]
        for source, stored in self._stored.items():
            if source not in pieces.shapes:
                wrong.append(f"{source}: only in the files")
            elif stored.shape != pieces.shapes[source]:
                wrong.append(f"{source}: shape {list(stored.shape)} in the files, {list(pieces.shapes[source])} here")
        if wrong:
            more = [f"... and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
            lines = "\n  ".join([*sorted(wrong)[:_SHOWN], *more])
            raise ValueError(
                f"{where} does not fit the model:\n  {lines}\nPass names={{...}} where the files have other names, and "
                "model= for another class"
            )

    def fill(self, device: torch.device) -> None:
        """Read this rank's parts of all tensors; of tied ones each once, and again where the files have several."""
        _move_buffers(self.model, device)
        read = set[str]()
        with SliceReader() as reader, torch.no_grad():
            for name, tensor in _state(self.model).items():
                pieces, first = self._pieces.of[name], self._first.get(name, name)
                if not all(piece.source in self._stored for piece in pieces):
                    continue
                target = local_tensor(tensor.detach())
                box = target if first not in read else torch.empty_like(target)
                for piece in pieces:
                    _read_piece(reader, self._stored[piece.source], piece, tensor, box)
                if first in read and not torch.equal(bytes_of(box), bytes_of(target)):
                    raise ValueError(f"{name} and {first} are tied in the model, but the files have other values")
                read.add(first)


def _read_piece(
    reader: SliceReader, stored: StoredTensor, piece: Piece, tensor: torch.Tensor, local: torch.Tensor
) -> None:
    """Read what this rank has of a piece into its part of a tensor."""
    lows, sizes = _box(tensor)
    start = [*lows]
    if piece.index is not None:
        if not lows[0] <= piece.index < lows[0] + sizes[0]:
            return
        local, lows, start = local[piece.index - lows[0]], lows[1:], start[1:]
    if local.ndim:
        low, high = max(lows[0], piece.at), min(lows[0] + local.shape[0], piece.at + piece.rows)
        if low >= high:
            return
        local, start[0] = local[low - lows[0] : high - lows[0]], low - piece.at + piece.start
    reader.read(stored, start, local)


def _box(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """The first index and the size, by dim, of this rank's part of a tensor."""
    low, sizes = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        for placement, axis in zip(tensor.placements, describe_mesh(tensor.device_mesh).axes, strict=True):
            if placement.is_shard():
                dim = placement.dim  # type: ignore[attr-defined]
                offset, length = extent(placement, sizes[dim], axis)  # type: ignore[arg-type]
                low[dim], sizes[dim] = low[dim] + offset, length
    return low, sizes


def _files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"  # before an index, as transformers has it
    found = [single] if single.is_file() else foreign_files(folder)
    if not found:
        what = "no safetensors file in it" if folder.exists() else "no such folder"
        raise FileNotFoundError(
            f"expected {folder} to be a folder with config.json and safetensors files, but there is {what}. Of a model "
            "on a hub, download the folder first"
        )
    return found


def _state(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The live tensors of a model's state dict."""
    return {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, torch.Tensor)}


def _without_values(model: nn.Module) -> list[str]:
    """A line for each tensor on the meta device that is in no state dict, so that no file can have it."""
    state = set(map(id, _state(model).values()))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        f"{name}: on the meta device, and in no state dict" for name, t in tensors if t.is_meta and id(t) not in state
    ]


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of each tensor that has several, by the others."""
    first: dict[int, str] = {}
    found = {name: first.setdefault(id(tensor), name) for name, tensor in _state(model).items()}
    return {name: known for name, known in found.items() if name != known}


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    moved: dict[int, torch.Tensor] = {}  # modules may share one
    held = [(buffers, name, each) for buffers in map(own_buffers, model.modules()) for name, each in buffers.items()]
    for buffers, name, each in held:
        if each is not None and each.device.type != device.type:
            buffers[name] = moved.setdefault(id(each), each.to(device))
