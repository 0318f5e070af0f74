"""Pack the members of a bucket for one collective, unpack them from its result, and recognise both.

The function that builds a layout and the one that matches it stand side by side. There are two layouts: flat, the
members one after the other (total,); and in columns, a row for each rank (ranks, total), each member some columns.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir.collectives import group_size_of, is_wait, operands
from ..ir.ops import Trait, has
from ..runtime.host_memory import to_host, wait_copy

aten = torch.ops.aten

Bucket = list[fx.Node]  # collectives that are merged into one
Call = Callable[..., fx.Node]  # inserts a node: op, arguments


def pack_flat(call: Call, bucket: Bucket) -> fx.Node:
    """The operands of all members, one after the other: (total,)."""
    return call(aten.cat.default, [call(aten.reshape.default, operands(member)[0], [-1]) for member in bucket])


def packed_flat(cat: fx.Node, known: Container[fx.Node]) -> list[fx.Node]:
    """The values among ``known`` that ``cat`` puts one after the other, each whole; empty if it does anything else."""
    given = cat.args[0]
    assert isinstance(given, (list, tuple))
    sources = [_flattened(operand, known) for operand in given]
    found = [source for source in sources if source is not None]
    return found if len(found) == len(given) else []


def _flattened(value: Any, known: Container[fx.Node]) -> fx.Node | None:
    """The value among ``known`` whose elements a one-dimensional value has, in order if that is contiguous."""
    if not isinstance(value, fx.Node) or value.meta["val"].dim() != 1:
        return None
    node = value
    while node not in known:
        source = node.args[0] if has(node.target, Trait.FLATTENS) else None
        if not isinstance(source, fx.Node):
            return None
        node = source
    return node


def unpack_flat(call: Call, flat: fx.Node, bucket: Bucket) -> list[fx.Node]:
    """The result of each member, cut out of (total,)."""
    shapes = _shapes(bucket)
    parts = call(aten.split_with_sizes.default, flat, [math.prod(shape) for shape in shapes])
    return [call(aten.view.default, call(operator.getitem, parts, k), shape) for k, shape in enumerate(shapes)]


def is_unpacked(node: fx.Node) -> bool:
    """Whether a value is a collective's result or a contiguous part of it, as ``unpack_flat`` cuts it out."""
    passed_on = (to_host, wait_copy)  # which keep strides
    while (has(node.target, Trait.TAKES_PARTS) or node.target in passed_on) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return is_wait(node)


def pack_columns(call: Call, bucket: Bucket) -> fx.Node:
    """The operands of all members side by side, in row r the parts for rank r: (ranks, total)."""
    ranks = group_size_of(bucket[0])
    return call(aten.cat.default, [call(aten.reshape.default, operands(each)[0], [ranks, -1]) for each in bucket], 1)


def packed_columns(packed: fx.Node, ranks: int) -> Sequence[fx.Node]:
    """The members that ``pack_columns`` put side by side, (ranks, columns) each; empty if it made no such thing."""
    if packed.target is not aten.cat.default or packed.args[1:] != (1,) or packed.meta["val"].shape[0] != ranks:
        return []
    return [member for member in packed.args[0] if isinstance(member, fx.Node)]  # type: ignore[union-attr]


def unpack_columns(call: Call, gathered: fx.Node, bucket: Bucket) -> list[fx.Node]:
    """The result of each member, copied out of its columns in a row from each rank: (ranks * total,) in memory."""
    ranks = group_size_of(bucket[0])
    rows = call(aten.view.default, gathered, [ranks, -1])  # [ranks, total]
    # From the results, since an operand may be another bucket's new node, which has no val yet.
    sizes = [member.meta["val"].numel() // ranks for member in bucket]
    parts = call(aten.split_with_sizes_copy.default, rows, sizes, 1)  # a copy: a member's columns lie apart
    pairs = enumerate(_shapes(bucket))
    return [call(aten.view.default, call(operator.getitem, parts, k), shape) for k, shape in pairs]


@dataclass(frozen=True)
class UnpackedColumns:
    """The nodes of ``unpack_columns``: the view as rows, and the op that copies the columns of each member."""

    rows: fx.Node
    parts: fx.Node

    @property
    def sizes(self) -> list[int]:
        """The number of columns of each member."""
        return list(self.parts.args[1])  # type: ignore[arg-type]

    @property
    def members(self) -> list[fx.Node]:
        """The ``getitem`` of each member, (ranks, columns)."""
        return list(self.parts.users)

    @classmethod
    def of(cls, gather: fx.Node, ranks: int) -> UnpackedColumns | None:
        """The nodes that unpack the result of ``gather``; None if anything else reads it."""
        wait = _only_user(gather)
        rows = _only_user(wait) if wait is not None and is_wait(wait) else None
        parts = _only_user(rows) if rows is not None and rows.target is aten.view.default else None
        if rows is None or parts is None or parts.target is not aten.split_with_sizes_copy.default:
            return None
        val = rows.meta["val"]
        by_column = val.ndim == 2 and val.shape[0] == ranks and parts.args[2:] == (1,)
        return cls(rows, parts) if by_column and all(user.target is operator.getitem for user in parts.users) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _shapes(bucket: Bucket) -> list[list[int]]:
    """The shapes of the members' results."""
    return [list(member.meta["val"].shape) for member in bucket]
