"""Compare what the ranks pass to a step that compiles: rows, lengths, tables that look like rows, Python values."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from torch.distributed.tensor import Shard

from passes import AxisRole, Mesh, PlacementError, RankMismatchError, Role

from ..ranks.equal_values import contents
from .inputs import BatchInput
from .state import Arguments, Leaf

_SHOWN = 60  # characters of a value
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Compared:
    """The comparison of all ranks' arguments. ``tables``: by name, a sentence for each that looks like a table.

    ``rows``: arguments that differ between ranks, as rows of the batch do. ``differing``: a sentence for each Python
    value that differs; harmless, if the programs are equal all the same. ``one_batch``: a sentence, if all ranks passed
    the same batch.
    """

    tables: dict[str, str]
    rows: list[str]
    differing: list[str]
    one_batch: str = ""


@dataclass(frozen=True)
class _Passed:
    """The arguments of one rank, by name, as text that other ranks can read.

    ``shapes``: of tensors; ``contents``: of those that are taken for rows; ``values``: of plain Python values.
    """

    shapes: dict[str, list[int]]
    contents: dict[str, str]
    values: dict[str, str]

    @classmethod
    def of(cls, arguments: Arguments, inputs: Sequence[BatchInput]) -> _Passed:
        return cls(
            {each.name: _passed_shape(each) for each in inputs},
            {each.name: contents(each.value) for each in inputs if _is_taken_for_rows(each)},
            {leaf.name: _shown(leaf) for leaf in arguments.leaves if isinstance(leaf.value, _PLAIN)},
        )

    def names_tensors_as(self, other: _Passed) -> bool:
        return self.shapes.keys() == other.shapes.keys() and self.contents.keys() == other.contents.keys()


def compare_arguments(
    arguments: Arguments,
    inputs: Sequence[BatchInput],
    mesh: Mesh,
    ranks: Sequence[int],
    all_gather_text: Callable[[str], list[str]],
    known: Container[str] = (),
) -> Compared:
    """Compare the arguments of all ``ranks``, those of ``mesh``, which call this together and raise together.

    ``known``: arguments that were ``rows`` before; they may happen to be the same on all ranks.

    Raises ``RankMismatchError`` if the shapes of a tensor differ, or its contents along an axis that does not split the
    batch; and ``PlacementError`` for a table of one dim, of floating-point numbers other than 0 and 1, that nobody
    named: class weights with as many entries as a rank has rows would be taken for a weight of each row.
    """
    own = _Passed.of(arguments, inputs)
    by_rank = [_Passed(**json.loads(text)) for text in all_gather_text(json.dumps(asdict(own)))]
    differing = _differing_values(by_rank, ranks)
    if not all(each.names_tensors_as(by_rank[0]) for each in by_rank):
        return Compared({}, [], differing)  # on all ranks: the comparison of programs finds what some do not have
    for each in inputs:
        if found := _shape_difference(each, ranks, [other.shapes[each.name] for other in by_rank]):
            raise RankMismatchError(found)
    taken = [each for each in inputs if _is_taken_for_rows(each)]
    for each in taken:
        _check_equal_along_other_axes(each, mesh, ranks, [other.contents[each.name] for other in by_rank])
    rows = [each.name for each in taken if _differ([other.contents[each.name] for other in by_rank])]
    if not rows:
        same = [each for each in taken if each.name not in known and _is_cut(each) and _varies(each)]
        return Compared({}, [], differing, _one_batch(same[0]) if len(by_rank) > 1 and same else "")
    equal = [each for each in taken if each.name not in rows and each.name not in known]
    return Compared(_tables(equal, rows[0]), rows, differing)


def _passed_shape(argument: BatchInput) -> list[int]:
    return list(argument.shape if argument.is_uneven else argument.value.shape)


def _differing_values(by_rank: Sequence[_Passed], ranks: Sequence[int]) -> list[str]:
    """A sentence for each Python value that is another one on some rank, or is passed on some ranks alone."""
    names = dict.fromkeys(name for other in by_rank for name in other.values)  # the same on all ranks
    values = [(name, [other.values.get(name) for other in by_rank]) for name in names]
    return [_passed(name, ranks, given) for name, given in values if _differ(given)]


def _check_equal_along_other_axes(argument: BatchInput, mesh: Mesh, ranks: Sequence[int], given: Sequence[str]) -> None:
    """Raise ``RankMismatchError`` where ranks along an axis that does not split the batch passed other rows."""
    if len(given) < mesh.size:  # one process that stands for all ranks
        return
    position = {place: k for k, place in enumerate(product(*(range(axis.size) for axis in mesh.axes)))}
    for axis, entry in enumerate(argument.placement):
        if isinstance(entry, Shard) or AxisRole.BATCH in mesh.axes[axis].roles:
            continue
        for place, k in position.items():
            first = position[(*place[:axis], 0, *place[axis + 1 :])]
            if given[k] != given[first]:
                raise RankMismatchError(
                    f"{_passed(argument.name, [ranks[first], ranks[k]], [given[first], given[k]])}, but ranks along "
                    f"{mesh.axes[axis].name} must pass equal tensors, each whole: that axis does not split the batch. "
                    f"Let a sampler count the ranks along {_batch_axes(mesh)} alone, or say with inputs= how "
                    f"{argument.name} is placed"
                )


def _batch_axes(mesh: Mesh) -> str:
    return " and ".join(mesh.axes[k].name for k in mesh.axes_with(AxisRole.BATCH)) or "no axis"


def _is_taken_for_rows(argument: BatchInput) -> bool:
    return argument.role is Role.BATCH and not argument.is_named


def _shown(leaf: Leaf) -> str:
    text = repr(leaf.value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _passed(name: str, ranks: Sequence[int], given: Sequence[Any], what: str = "") -> str:
    """The values of the first rank, and of the first that differs."""
    other = next(k for k, value in enumerate(given) if value != given[0])
    return f"rank {ranks[0]} passed {name}{what} {given[0]}, rank {ranks[other]} {given[other]}"


# Shapes


def describe_shapes(
    inputs: Sequence[BatchInput], ranks: Sequence[int], all_gather_text: Callable[[str], list[str]]
) -> str:
    """The first argument whose shapes differ between ``ranks``, with what to do; or nothing. All ranks call this."""
    own = {each.name: _passed_shape(each) for each in inputs}
    gathered = [json.loads(text) for text in all_gather_text(json.dumps(own))]
    if any(other.keys() != own.keys() for other in gathered):
        return ""
    found = (_shape_difference(each, ranks, [other[each.name] for other in gathered]) for each in inputs)
    return next(filter(None, found), "")


def _shape_difference(argument: BatchInput, ranks: Sequence[int], shapes: list[Any]) -> str:
    """Describe what ranks passed of one argument, and what to do, if its shapes differ; else empty."""
    if not _differ(shapes):
        return ""
    rows = {entry.dim % max(1, argument.value.ndim) for entry in argument.placement if isinstance(entry, Shard)}
    outside = [[size for dim, size in enumerate(shape) if dim not in rows] for shape in shapes]
    if rows and not _differ(outside):
        advice = (
            "Ranks may bring unequal numbers of rows, but then in the same proportions of all arguments that are "
            "split: drop the last batch of an epoch (drop_last=True), let a DistributedSampler even it out, or pad it "
            "and mask the loss"
        )
    else:
        advice = (
            "Ranks that pad their own batches must pad to one length: to a fixed one, or to the longest of all ranks "
            "(all_reduce its length with ReduceOp.MAX)"
        )
    return f"{_passed(argument.name, ranks, shapes, ' of shape')}. {advice}"


# Tables


def _tables(equal: Sequence[BatchInput], differing: str) -> dict[str, str]:
    """A sentence for each argument that is the same on all ranks, where the one called ``differing`` is not."""
    found = [each for each in equal if _varies(each)]
    for each in found:
        if each.value.ndim == 1 and each.value.is_floating_point() and not _is_binary(each):
            raise PlacementError(_table(each, differing))
    return {each.name: _table(each, differing) for each in found}


def _is_binary(argument: BatchInput) -> bool:
    """Whether a tensor has zeros and ones only: labels, or a mask, which may be the same on all ranks by chance."""
    return bool(((argument.value == 0) | (argument.value == 1)).all())


def _varies(argument: BatchInput) -> bool:
    """Whether a tensor has several values: a mask of ones says nothing."""
    value = argument.value
    return value.numel() > 0 and bool((value != value.flatten()[0]).any())


def _is_cut(argument: BatchInput) -> bool:
    """Whether ranks hold parts of an argument, of a mesh on which there is more than one."""
    return tuple(argument.shape) != tuple(argument.value.shape)


def _one_batch(argument: BatchInput) -> str:
    return (
        f"all ranks passed the same {argument.name}, of shape {list(argument.value.shape)}: each rank's part of the "
        "batch is to be its own, so that these rows count once for each rank, and a sum over the batch is that many "
        "times too large. Pass other rows on each rank (torch.utils.data.DistributedSampler, or "
        f"{argument.name}.chunk(world_size)[rank])"
    )


def _table(argument: BatchInput, differing: str) -> str:
    name, rows = argument.name, next(entry for entry in argument.placement if isinstance(entry, Shard))
    return (
        f"all ranks passed the same {name}, of shape {list(argument.value.shape)}, while {differing} differs between "
        f"ranks: {name} looks like a table that all rows share, but what inputs does not name is taken for rows of the "
        f"batch. Say which it is: inputs={{'{name}': Replicate()}} for a table, inputs={{'{name}': Shard({rows.dim})}} "
        "for rows"
    )
