"""Merge collectives into buckets: the analysis and the edit that the three bucket passes share.

Buckets follow from the graph's structure and from sizes that all ranks agree on (``agreed_sizes.py``), so every rank
forms the same ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from ..analysis.agreed_sizes import most_bytes, of_all
from ..analysis.reachability import ancestors_among, reached
from ..analysis.topological import settle
from ..ir.collectives import WAIT, Collective, Kind, group_of, is_wait, operands, reduction_of
from ..ir.edit import insert_before, replace
from ..ir.ops import Trait, has
from ..ir.program import Program
from ..ir.roles import Role
from ..runtime.arena import ALIGNMENT
from .packed import Bucket, Call

aten = torch.ops.aten
_Index = tuple[int, int]  # of a unit, and of a parameter in it


@dataclass(frozen=True)
class Packing:
    """The merger of collectives of one kind: the op, and functions that pack operands and unpack the result."""

    kind: Kind
    op: Any
    pack: Callable[[Call, Bucket], fx.Node]
    unpack: Callable[[Call, fx.Node, Bucket], list[fx.Node]]


def merge(program: Program, packing: Packing, max_bytes: int, first_bytes: int | None = None) -> int:
    """Put one collective in the place of each bucket, then bring the graph into order; returns how many there are."""
    found = buckets(program, packing.kind, packing.op, max_bytes, first_bytes)
    late = set[fx.Node]()
    for bucket in found:
        last = max(bucket)
        late |= _readers_before(last, bucket) if packing.kind is not Kind.ALL_GATHER else set()
        call = partial(insert_before, last, like=last)
        merged = call(packing.op, packing.pack(call, bucket), *bucket[0].args[1:])
        merged.meta |= joined(bucket)
        results = packing.unpack(call, call(WAIT, merged), bucket)
        if program.same_bits and packing.kind is not Kind.ALL_GATHER:
            results = _aligned(call, bucket, results)
        _replace_members(bucket, results)
    settle(program.graph, late)
    return len(found)


def _aligned(call: Call, bucket: Bucket, parts: list[fx.Node]) -> list[fx.Node]:
    """Copies of those ``parts`` of a bucket that kernels would round by where they begin, and that begin anywhere."""
    found, offset = [], 0
    for member, part in zip(bucket, parts, strict=True):
        of_products = any(_is_multiplied(wait) for wait in member.users)
        found.append(call(aten.clone.default, part) if of_products and offset % ALIGNMENT else part)
        offset += next(iter(member.users)).meta["val"].nbytes
    return found


def _is_multiplied(value: fx.Node) -> bool:
    """Whether a value, or a view of it, is read by more than pointwise ops."""
    readers = [reader for reader in value.users if reader.op == "call_function"]
    if any(not has(reader.target, Trait.VIEW, Trait.POINTWISE, Trait.MUTABLE) for reader in readers):
        return True
    return any(has(reader.target, Trait.VIEW) and _is_multiplied(reader) for reader in readers)


def _readers_before(last: fx.Node, bucket: Bucket) -> set[fx.Node]:
    """Readers of results of ``bucket`` that stand before its ``last`` member: they have to wait for all of them.

    These nodes move down to it. If it moved up to them, so would all that its operands need, in front of all else.
    """
    waits = [wait for member in bucket for wait in member.users]
    return {*reached(waits, lambda node: [reader for reader in node.users if reader < last])} - {*waits}


def buckets(program: Program, kind: Kind, op: Any, max_bytes: int, first_bytes: int | None = None) -> list[Bucket]:
    """Groups of at least two collectives of ``kind``, performed by ``op``, that can be merged.

    Members agree in axis, dtype, device, reduction and role, in whether all runs of a call have the same, and none
    depends on another's result, directly or through other buckets. Collectives for one unit of ``program.units`` go
    together, in the unit's order, whatever their size, each parameter once. All others go together in graph order,
    until operands or results have reached ``max_bytes``; the first bucket of gradients, until they have
    ``first_bytes``. A collective of unknown role is left alone.
    """
    candidates = [node for node in program.collectives() if _may_join(node, kind, op)]
    needs = ancestors_among(program.graph, candidates)
    indices, varying = _indices(program), program.varying()
    opened: list[_Open] = []
    by_key: dict[Hashable, list[_Open]] = defaultdict(list)
    for number, node in enumerate(candidates):
        index = indices.get(node.meta["collective"].of)
        others = by_key[_key(node), node in varying, index and index[0]]
        needed = _closure(needs[number], opened)
        bucket = next((each for each in _to_try(node, others) if each.takes(index) and not needed & each.bits), None)
        if bucket is None:
            is_first = node.meta["collective"].role is Role.GRADIENT and not others and first_bytes is not None
            bucket = _Open(min(first_bytes or 0, max_bytes) if is_first else max_bytes)
            opened.append(bucket)
            others.append(bucket)
        bucket.add(number, needs[number], most_bytes(node), index)
    return [[candidates[k] for k in bucket.ordered()] for bucket in opened if len(bucket.members) > 1]


def _to_try(node: fx.Node, others: list[_Open]) -> list[_Open]:
    """The buckets that ``node`` may join, in this order.

    A result that is waited for at once, such as a batch norm's statistics, joins the first bucket that it can.
    Gradients and parameters join the latest one only, or an early bucket would wait for what comes much later.
    """
    return others if node.meta["collective"].role is Role.ACTIVATION else others[-1:]


def _indices(program: Program) -> dict[tuple[str, ...], _Index]:
    """The index of a collective in the units, by the names that it serves."""
    return {(name,): (unit, k) for unit, names in enumerate(program.units) for k, name in enumerate(names)}


def joined(bucket: Bucket) -> dict[str, Any]:
    """The ``meta`` of the one collective that replaces a bucket."""
    described: list[Collective] = [node.meta["collective"] for node in bucket]
    first, reasons = described[0], list(dict.fromkeys(each.why for each in described if each.why))
    others = " and others" if len(reasons) > 1 else ""
    why = "; ".join([*(reason + others for reason in reasons[:1]), f"{len(bucket)} in one"])
    of = tuple(dict.fromkeys(name for each in described for name in each.of))
    collective = Collective(first.kind, first.axis, first.reduction, first.role, why, of, ahead=first.ahead)
    again = {"recompute_of": bucket[0].meta["recompute_of"]} if "recompute_of" in bucket[0].meta else {}
    return {"collective": collective, **of_all(bucket), **again}


def _replace_members(bucket: Bucket, results: list[fx.Node]) -> None:
    """Let readers of each member's result read its part of the bucket's, and erase the members with their waits."""
    for member, result in zip(bucket, results, strict=True):
        for wait in list(member.users):
            replace(wait, result, wait.meta.get("val"))
            member.graph.erase_node(wait)
        member.graph.erase_node(member)


def _may_join(node: fx.Node, kind: Kind, op: Any) -> bool:
    described = node.meta.get("collective")
    if node.target is not op or not isinstance(described, Collective):
        return False
    if described.kind is not kind or described.role is Role.UNKNOWN:
        return False
    return bool(node.users) and all(map(is_wait, node.users))


def _key(node: fx.Node) -> Hashable:
    val, described = operands(node)[0].meta["val"], node.meta["collective"]
    again = "recompute_of" in node.meta
    return group_of(node), reduction_of(node), described.role, described.ahead, again, val.dtype, val.device


@dataclass
class _Open:
    """A bucket that still takes members. A set of candidates is an int with one bit for each."""

    max_bytes: int
    members: list[int] = field(default_factory=list)
    indices: list[_Index] = field(default_factory=list)  # of the members, if they serve a unit
    bits: int = 0
    needs: int = 0
    size: int = 0

    def takes(self, index: _Index | None) -> bool:
        """Whether there is room: for each parameter of a unit once, else until the limit is reached."""
        return self.size < self.max_bytes if index is None else index not in self.indices

    def add(self, number: int, needs: int, size: int, index: _Index | None) -> None:
        self.members.append(number)
        self.indices += [index] if index else []
        self.bits |= 1 << number
        self.needs |= needs
        self.size += size

    def ordered(self) -> list[int]:
        """The members as they stand in their unit, else as in the graph."""
        if not self.indices:
            return self.members
        return [number for _, number in sorted(zip(self.indices, self.members, strict=True))]


def _closure(needs: int, opened: list[_Open]) -> int:
    """``needs`` with all members of each bucket that has one of them, and with what those need."""
    while True:
        wider = needs
        for bucket in opened:
            if wider & bucket.bits:
                wider |= bucket.bits | bucket.needs
        if wider == needs:
            return needs
        needs = wider
