"""Batches of which the ranks bring unequal numbers of rows, as at the end of an epoch.

The global batch is what all ranks bring, in their order. Before the call it is cut anew, as ``torch.chunk`` cuts, which
is how programs split rows; afterwards the rows of a result go to the ranks that brought those of the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, product
from math import prod
from typing import Any, Protocol

import torch
from torch.distributed.tensor import Shard

from passes import Mesh, Output, OutputKind, PlacementError, Program, SpmdError
from passes.ir.program import is_sharded

from ..placements import chunk
from ..ranks.equal_values import bytes_of
from .call import Call
from .inputs import BatchInput
from .state import Arguments

Exchange = Callable[[torch.Tensor, list[int], list[int], tuple[int, ...]], torch.Tensor]
"""From the bytes for all ranks of a group, how many are for each, and how many come from each, to those that come."""


@dataclass(frozen=True)
class Split:
    """The split of an argument: along ``dim``, over ``axes`` of the mesh, which are numbers."""

    dim: int
    axes: tuple[int, ...]

    @classmethod
    def of(cls, argument: BatchInput) -> Split | None:
        """None for an argument that is not split along one dim."""
        dims = {entry.dim for entry in argument.placement if isinstance(entry, Shard)}
        axes = tuple(k for k, entry in enumerate(argument.placement) if isinstance(entry, Shard))
        return cls(dims.pop(), axes) if len(dims) == 1 else None


def inputs_of(call: Call) -> list[BatchInput]:
    """The tensor arguments of a call; none where they cannot be placed, which compiling explains."""
    try:
        return call.inputs
    except SpmdError:
        return []


def splits_of(call: Call) -> dict[str, Split]:
    """The arguments that are split, by name."""
    found = {each.name: Split.of(each) for each in inputs_of(call)}
    return {name: split for name, split in found.items() if split is not None}


@dataclass(frozen=True)
class UnequalRows:
    """A batch whose rows are cut anew.

    ``brought``: by argument, the rows of each of ``ranks``, which split the batch with this one, the rank at ``index``
    among them; ``sizes`` those of the axes that they are along. All arguments have rows in the same proportions.
    """

    splits: dict[str, Split]
    brought: dict[str, tuple[int, ...]]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    index: int

    @property
    def uneven(self) -> dict[str, int]:
        """By argument, how many rows all ranks have of it, where these are not as many on each."""
        return {name: sum(rows) for name, rows in self.brought.items() if sum(rows) % len(self.ranks)}

    def cut(self, arguments: Arguments, exchange: Exchange) -> Arguments:
        """The arguments of this rank with its part of the batch."""
        leaves = [
            replace(leaf, value=self._cut(leaf.name, leaf.value, exchange)) if leaf.name in self.brought else leaf
            for leaf in arguments.leaves
        ]
        return replace(arguments, leaves=leaves)

    def _cut(self, name: str, tensor: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        brought = self.brought[name]
        moved = self._move(tensor.detach(), self.splits[name].dim, brought, self._parts(sum(brought)), exchange)
        return moved.requires_grad_(tensor.requires_grad)

    def restore(self, value: torch.Tensor, output: Output, dim: int, exchange: Exchange) -> torch.Tensor:
        """The rows of a result that belong to what this rank brought; ``dim``: along which it has rows of the batch."""
        brought = next(iter(self.brought.values()))
        if output.shape[dim] % sum(brought):
            return value
        rows = [output.shape[dim] // sum(brought) * each for each in brought]
        if is_sharded(output.placement):
            return self._move(value, dim, self._parts(output.shape[dim]), rows, exchange)
        return value.narrow(dim, sum(rows[: self.index]), rows[self.index]).clone()

    def _parts(self, rows: int) -> list[int]:
        """The number of rows of each rank in a program: cut along one axis after the other."""
        parts = [rows]
        for size in self.sizes:
            parts = [chunk(each, size, k)[1] for each in parts for k in range(size)]
        return parts

    def _move(
        self, tensor: torch.Tensor, dim: int, before: Sequence[int], after: Sequence[int], exchange: Exchange
    ) -> torch.Tensor:
        """Exchange rows between ranks; ``before`` and ``after`` are the numbers of rows that each has."""
        rows = tensor.movedim(dim, 0).contiguous()
        width = prod(rows.shape[1:]) * rows.element_size()
        sent = [width * each for each in _overlaps(before, after, self.index)]
        received = [width * each for each in _overlaps(after, before, self.index)]
        moved = exchange(bytes_of(rows), sent, received, self.ranks)
        return moved.view(rows.dtype).view(after[self.index], *rows.shape[1:]).movedim(0, dim).contiguous()


class Shows(Protocol):
    """The part of ``Captured`` used here: the outputs that users see, by index among those that are no updates."""

    def shown(self) -> list[int]:
        """Their indices."""


class RowsOfResults:
    """Results that have rows of the batch, as programs of even batches split them, by the names of all results.

    A program of an uneven batch may have gathered rows, and cannot say it itself.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int], ...], dict[int, int]] = {}

    def note(self, captured: Shows, program: Program, uneven: Mapping[str, int]) -> None:
        """Remember the results of a program whose batch is even; else raise as ``of`` does."""
        if uneven:
            self.of(captured, program)
        else:
            shown = _shown(captured, program)
            self._known[_signature(shown)] = _split_dims(shown)

    def of(self, captured: Shows, program: Program) -> dict[int, int]:
        """By index, the dim along which results have rows. Raises ``PlacementError`` where that is unknown."""
        shown = _shown(captured, program)
        known = self._known.get(_signature(shown))
        unknown = [output for output in shown.values() if output.shape and not is_sharded(output.placement)]
        if known is None and unknown:
            raise PlacementError(
                f"ranks brought unequal numbers of rows, and {unknown[0].name}, of shape {list(unknown[0].shape)}, may "
                "be rows of the batch or not: no call with equal numbers of rows has shown it yet. Make one first, pad "
                "and mask this batch, or return numbers only"
            )
        dims = _split_dims(shown) if known is None else known
        return {index: dims[k] for k, index in enumerate(shown) if k in dims}


def _shown(captured: Shows, program: Program) -> dict[int, Output]:
    outputs = [output for output in program.outputs if output.kind is not OutputKind.UPDATE]
    return {index: outputs[index] for index in captured.shown()}


def _signature(shown: Mapping[int, Output]) -> tuple[tuple[str, int], ...]:
    return tuple((output.name, len(output.shape)) for output in shown.values())


def _split_dims(shown: Mapping[int, Output]) -> dict[int, int]:
    split = [{p.dim for p in output.placement if isinstance(p, Shard)} for output in shown.values()]
    return {k: dims.pop() for k, dims in enumerate(split) if len(dims) == 1}


def restore(
    returned: Sequence[Any], rows: UnequalRows, program: Program, dims: Mapping[int, int], exchange: Exchange
) -> list[Any]:
    """The results of a program, with the rows that this rank brought; ``dims``: see ``RowsOfResults.of``."""
    outputs = [output for output in program.outputs if output.kind is not OutputKind.UPDATE]
    restored = list(returned)
    for k, dim in dims.items():
        restored[k] = rows.restore(returned[k], outputs[k], dim, exchange)
    return restored


def _overlaps(own: Sequence[int], others: Sequence[int], index: int) -> list[int]:
    """Count the rows of rank ``index``, where ranks have ``own`` many, that each rank has with ``others``."""
    ends = list(accumulate(own))
    start, stop = ends[index] - own[index], ends[index]
    others_end = list(accumulate(others))
    return [max(0, min(stop, end) - max(start, end - rows)) for rows, end in zip(others, others_end, strict=True)]


def find_unequal_rows(
    given: Arguments,
    splits: dict[str, Split],
    mesh: Mesh,
    ranks: Sequence[int],
    all_gather_text: Callable[[str], list[str]],
) -> UnequalRows | None:
    """Find what all ``ranks``, those of ``mesh``, bring, if they differ in the numbers of rows and in nothing else.

    All call it together.
    """
    tensors = {leaf.name: leaf.value for leaf in given.tensors() if leaf.name in splits}
    own = {name: _Brought.of(tensors[name], split) for name, split in splits.items()}
    text = json.dumps({name: asdict(brought) for name, brought in own.items()})
    by_rank = [_read(text) for text in all_gather_text(text)]
    if all(each == by_rank[0] for each in by_rank) or any(list(each) != list(by_rank[0]) for each in by_rank):
        return None
    axes = {split.axes for split in splits.values()}
    if len(axes) != 1:
        return None
    places = _Places.of(mesh, axes.pop())
    rows = {name: places.rows([each[name] for each in by_rank]) for name in splits}
    found = {name: each for name, each in rows.items() if each is not None}
    if len(found) < len(rows) or not _are_proportional(list(found.values())):
        return None
    members, index = places.members()
    return UnequalRows(splits, found, places.sizes, tuple(ranks[k] for k in members), index)


@dataclass(frozen=True)
class _Brought:
    """One argument as a rank brings it: how it is split, its number of rows, and what has to be equal on all ranks."""

    dim: int
    axes: list[int]
    dtype: str
    rest: list[int]  # the shape without the rows
    rows: int

    @classmethod
    def of(cls, tensor: torch.Tensor, split: Split) -> _Brought:
        shape, dim = list(tensor.shape), split.dim
        return cls(dim, list(split.axes), str(tensor.dtype), shape[:dim] + shape[dim + 1 :], shape[dim])


def _read(text: str) -> dict[str, _Brought]:
    return {name: _Brought(**fields) for name, fields in json.loads(text).items()}


@dataclass(frozen=True)
class _Places:
    """The coordinates of all ranks of a mesh, in order, and of this one; ``axes`` split the batch."""

    all: list[tuple[int, ...]]
    own: tuple[int, ...]
    axes: tuple[int, ...]
    sizes: tuple[int, ...]  # of these axes

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[int, ...]) -> _Places:
        everywhere = list(product(*(range(axis.size) for axis in mesh.axes)))
        own = tuple(axis.coordinate for axis in mesh.axes)
        return cls(everywhere, own, axes, tuple(mesh.axes[k].size for k in axes))

    def rows(self, by_rank: Sequence[_Brought]) -> tuple[int, ...] | None:
        """The rows of one argument on the ranks that split it.

        None if ranks differ in more, or where they should not: along an axis that does not split the batch.
        """
        found: dict[tuple[int, ...], int] = {}
        for place, brought in zip(self.all, by_rank, strict=True):
            if replace(brought, rows=by_rank[0].rows) != by_rank[0]:
                return None
            if found.setdefault(tuple(place[k] for k in self.axes), brought.rows) != brought.rows:
                return None
        return tuple(rows for _, rows in sorted(found.items()))

    def members(self) -> tuple[list[int], int]:
        """The positions of the ranks that split the batch with this one, and its own index among them."""
        others = [k for k in range(len(self.own)) if k not in self.axes]
        members = [n for n, place in enumerate(self.all) if all(place[k] == self.own[k] for k in others)]
        return members, members.index(self.all.index(self.own))


def _are_proportional(rows: Sequence[tuple[int, ...]]) -> bool:
    """Whether each rank has the same share of all arguments; of one without any row there are no shares."""
    first = rows[0]
    return all(map(sum, rows)) and all(
        a * sum(first) == b * sum(other) for other in rows for a, b in zip(other, first, strict=True)
    )
