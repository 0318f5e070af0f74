"""Tensors to and from safetensors files, by torch.distributed.checkpoint (DCP): each rank writes and reads its parts.

DCP finds out who writes what of replicas, and which part of which file a rank needs. ``plan_files`` asks it which files
this rank writes, without writing any: a save in the background writes them later.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from passes import SpmdError

from .._torch import DCP_OFFSETS, DCP_PARTS, DCP_VERSION, local_tensor, storage_id
from ..state.split_tensor import on_own_stages
from .direct import save_file
from .together import Together

Tensors = Mapping[str, torch.Tensor]
# Bytes of one file of a rank: a sixteenth of all that the rank writes, but no less and no more than these. What is cast
# is put together in memory a file at a time; and an update waits for a file that is written.
_LEAST, _MOST = 48_000_000, 256_000_000
_WRITTEN_AS = "spmd.file"  # metadata of a file: its name, and that of its folder, which no other save has


@dataclass
class File:
    """A file that this rank is to write: ``items`` of the plan, which ``planner`` finds the tensors of."""

    path: Path
    items: list[WriteItem]
    planner: SavePlanner

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's parts of tensors, by name."""
        found = ((str(item.index.fqn), self.planner.resolve_data(item)) for item in self.items)
        return {name: tensor for name, tensor in found if isinstance(tensor, torch.Tensor)}  # we plan nothing else

    def write(self, tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
        """Write what ``tensors`` returned to the disk; returns name and length."""
        chunks = {str(item.index.fqn): item.tensor_data.chunk for item in self.items if item.tensor_data is not None}
        offsets = {name: {DCP_OFFSETS: list(chunk.offsets)} for name, chunk in chunks.items()}
        metadata = {DCP_PARTS: json.dumps(offsets), **DCP_VERSION, "format": "pt", _WRITTEN_AS: _name(self.path)}
        save_file(tensors, self.path, metadata)
        return self.path.name, self.path.stat().st_size


def plan_files(folder: Path, tensors: Tensors, ranks: Together, dtype: torch.dtype | None = None) -> list[File]:
    """The files that this rank is to write of tensors that all ranks have the same names of; it writes nothing.

    ``dtype``: what floating-point tensors are cast to.
    """
    global _last
    layout = _layout(tensors, dtype, ranks)
    known = _last if _last is not None and _last.layout == layout else None
    tokens = ranks.run(lambda: known.token if known is not None else None)
    if known is not None and len({*tokens}) == 1:
        return known.files(folder, tensors, dtype, ranks.rank)
    sizes = {name: _share(tensor, ranks.size) for name, tensor in tensors.items()}
    limit = min(max(sum(sizes.values()) // 16, _LEAST), _MOST)
    writer = _Writer(file_numbers(sizes, limit))
    ranks.communicate(lambda: _plan(tensors, writer, ranks.group))
    token, *_ = ranks.run(lambda: uuid4().hex)
    _last = _Plan(layout, token, writer.items)
    return _last.files(folder, tensors, dtype, ranks.rank)


@dataclass(frozen=True)
class _Plan:
    """This rank's part of a save of tensors in this ``layout``: the items that it writes to each file, by number.

    ``token``: the same on the ranks that made the plan together, and of no other plan.
    """

    layout: Any
    token: str
    items: dict[int, list[WriteItem]]

    def files(self, folder: Path, tensors: Tensors, dtype: torch.dtype | None, rank: int) -> list[File]:
        """The files, of the tensors as they are now."""
        planner = _SavePlanner(dtype)
        planner.set_up_planner(on_own_stages(tensors))
        return [
            File(folder / f"shard-{rank + 1:05d}-{number:05d}.safetensors", items, planner)
            for number, items in sorted(self.items.items())
        ]


_last: _Plan | None = None  # made last: the next save is mostly of the same


def _layout(tensors: Tensors, dtype: torch.dtype | None, ranks: Together) -> Any:
    """Everything that a plan depends on, on this rank."""
    meshes: dict[int, Any] = {}

    def placed(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return None
        mesh = tensor.device_mesh
        if id(mesh) not in meshes:
            meshes[id(mesh)] = mesh.mesh.tolist()
        return tuple(tensor.placements), meshes[id(mesh)]

    each = [(name, t.dtype, t.shape, local_tensor(t).shape, placed(t)) for name, t in tensors.items()]
    return ranks.rank, ranks.size, dtype, (_LEAST, _MOST), each


def write(folder: Path, tensors: Tensors, ranks: Together, dtype: torch.dtype | None = None) -> dict[str, int]:
    """Write tensors that all ranks have the same names of; returns the length of each file, by name.

    ``dtype``: what floating-point tensors are cast to.
    """
    files = plan_files(folder, tensors, ranks, dtype)
    written = ranks.run(lambda: dict(file.write(file.tensors()) for file in files))
    return {name: length for each in written for name, length in each.items()}


def _plan(tensors: Tensors, writer: _Writer, group: Any) -> None:
    with _quiet():
        save(
            on_own_stages(tensors),
            storage_writer=writer,
            planner=_SavePlanner(),
            process_group=group,
            no_dist=group is None,
        )


class _Writer(StorageWriter):
    """Takes the plan that DCP made for this rank, and leaves the writing to its caller.

    ``numbers``: of the file that each tensor goes to.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.items: dict[int, list[WriteItem]] = {}
        self._numbers = numbers

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Divide what this rank is to write into files."""
        for item in plan.items:
            self.items.setdefault(self._numbers[str(item.index.fqn)], []).append(item)
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to finish: the marker is ours."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any folder."""
        return True


def _share(tensor: torch.Tensor, size: int) -> int:
    """About how many bytes of a tensor this rank writes."""
    local = local_tensor(tensor)
    return local.nbytes if local is not tensor else local.nbytes // size


def file_numbers(sizes: Mapping[str, int], limit: int) -> dict[str, int]:
    """The number of the file that each tensor goes to, from 1: a new one starts when the last has ``limit`` bytes."""
    numbers, number, total = {}, 1, 0
    for name, size in sizes.items():
        if total and total + size > limit:
            number, total = number + 1, 0
        numbers[name], total = number, total + size
    return numbers


class _SavePlanner(DefaultSavePlanner):
    """Plans by name, and gives the writer tensors as safetensors takes them: dense, and none in memory of another.

    ``dtype``: what floating-point tensors are cast to when they are written, one file at a time.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__(flatten_state_dict=False)
        self._dtype = dtype
        self._written: set[int] = set()  # storages

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The tensor to write."""
        tensor: torch.Tensor = object.detach()
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        tensor, storage = tensor.contiguous(), storage_id(tensor)
        if storage in self._written:
            return tensor.clone()
        self._written.add(storage)
        return tensor


class Files:
    """Safetensors files to read from. ``tensors``: dtype and global shape of all tensors in them, by name.

    ``are_parts``: each was written by ``File.write``, under the name that it has. Raises ``SpmdError`` with the name of
    a file that was not, or that cannot be read.
    """

    def __init__(self, paths: Sequence[Path], *, are_parts: bool = False) -> None:
        self._reader = _Reader(paths, are_parts)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            name: (each.properties.dtype, tuple(each.size))
            for name, each in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def read(self, targets: Tensors, ranks: Together) -> None:
        """Read into live tensors, each rank its own parts; values are cast where dtypes differ."""
        ranks.communicate(lambda: self._read(targets, ranks.group))

    def _read(self, targets: Tensors, group: Any) -> None:
        with _quiet():
            load(
                on_own_stages(targets),
                storage_reader=self._reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )


class _Reader(HuggingFaceStorageReader):
    """Reads the files given, and their headers once."""

    def __init__(self, paths: Sequence[Path], are_parts: bool) -> None:
        super().__init__(str(paths[0].parent) if paths else ".")
        self.fs, self._paths, self._are_parts = _These(paths), paths, are_parts
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The names, shapes and parts of all tensors."""
        if self._metadata is None:
            for path in self._paths:
                check_header(path, self._are_parts)
            self._metadata = super().read_metadata()
        self.storage_data = self._metadata.storage_data
        return self._metadata


class _These(FileSystem):
    """A file system in which every folder has the files given."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [str(path) for path in paths]

    def ls(self, path: Any) -> list[str]:
        """The files given."""
        return self._paths


def check_header(path: Path, is_part: bool = False) -> None:
    """Raise ``SpmdError`` for a file that is damaged, cut off, or not the one that was saved there."""
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
            written_as = (file.metadata() or {}).get(_WRITTEN_AS)
    except (SafetensorError, OSError) as error:
        raise SpmdError(f"{path} is damaged, or no safetensors file: {error}") from error
    if is_part and written_as != _name(path):
        raise SpmdError(f"{path} is not the file that was saved there, but {written_as or 'that of another tool'}")


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
