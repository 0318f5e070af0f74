"""Which collectives go into one bucket: the analysis that the three bucket passes share, and the edit's common part.

The groups follow from the graph's structure and from sizes that all ranks know alike (``agreed_sizes.py``), so every
rank forms the same buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from ..analysis.agreed_sizes import most_bytes, of_all
from ..analysis.topological import settle
from ..ir.collectives import WAIT, Collective, Kind, group_of, is_wait, operands, reduction_of
from ..ir.edit import insert_before, replace
from ..ir.program import Program
from ..ir.roles import Role
from .packed import Bucket, Call

_Place = tuple[int, int]  # a unit's number, and that of a parameter in it


@dataclass(frozen=True)
class Packing:
    """How collectives of one kind become one: the op, packing of operands, unpacking of the result (``packed.py``)."""

    kind: Kind
    op: Any
    pack: Callable[[Call, Bucket], fx.Node]
    unpack: Callable[[Call, fx.Node, Bucket], list[fx.Node]]


def merge(program: Program, packing: Packing, max_bytes: int, first_bytes: int | None = None) -> int:
    """Put one collective in the place of each bucket, then bring the graph into order; returns how many there are."""
    found = buckets(program, packing.kind, packing.op, max_bytes, first_bytes)
    for bucket in found:
        last = max(bucket)
        call = partial(insert_before, last, like=last)
        merged = call(packing.op, packing.pack(call, bucket), *bucket[0].args[1:])
        merged.meta |= joined(bucket)
        _replace_members(bucket, packing.unpack(call, call(WAIT, merged), bucket))
    settle(program.graph)
    return len(found)


def buckets(program: Program, kind: Kind, op: Any, max_bytes: int, first_bytes: int | None = None) -> list[Bucket]:
    """Groups of at least two collectives of ``kind``, realised by ``op``, that can be done as one.

    Members agree in axis, dtype, device, reduction and role, and none needs another's result, also not by way of
    other buckets. What serves one unit of ``program.units`` goes together, in the unit's order, whatever its size, each
    parameter once. All else goes together in graph order, until operands or results have reached ``max_bytes``; the
    first bucket of gradients, until they have ``first_bytes``. A collective whose role nobody said is left alone.
    """
    candidates = [node for node in program.collectives() if _may_join(node, kind, op)]
    needs = _needs(program.graph, candidates)
    places = _places(program)
    everything: list[_Open] = []
    alike: dict[Hashable, list[_Open]] = defaultdict(list)
    for number, node in enumerate(candidates):
        place = places.get(node.meta["collective"].of)
        others = alike[_key(node), place and place[0]]
        needed = _closure(needs[number], everything)
        bucket = next((each for each in _to_ask(node, others) if each.takes(place) and not needed & each.bits), None)
        if bucket is None:
            early = node.meta["collective"].role is Role.GRADIENT and not others and first_bytes is not None
            bucket = _Open(min(first_bytes or 0, max_bytes) if early else max_bytes)
            everything.append(bucket)
            others.append(bucket)
        bucket.add(number, needs[number], most_bytes(node), place)
    return [[candidates[k] for k in bucket.ordered()] for bucket in everything if len(bucket.members) > 1]


def _to_ask(node: fx.Node, others: list[_Open]) -> list[_Open]:
    """The buckets that ``node`` may join, in this order.

    What is waited for at once, such as a batch norm's statistics, goes where it first can. Gradients and parameters
    are not needed at once: the latest bucket must not wait for what comes much later.
    """
    return others if node.meta["collective"].role is Role.ACTIVATION else others[-1:]


def _places(program: Program) -> dict[tuple[str, ...], _Place]:
    """Where in the units a collective stands, by the names that it serves."""
    return {(name,): (unit, k) for unit, names in enumerate(program.units) for k, name in enumerate(names)}


def joined(bucket: Bucket) -> dict[str, Any]:
    """What is known of the one collective that replaces a bucket, for its ``meta``."""
    said: list[Collective] = [node.meta["collective"] for node in bucket]
    reasons = list(dict.fromkeys(each.why for each in said if each.why))
    others = " and others" if len(reasons) > 1 else ""
    why = "; ".join([*(reason + others for reason in reasons[:1]), f"{len(bucket)} in one"])
    of = tuple(dict.fromkeys(name for each in said for name in each.of))
    collective = Collective(said[0].kind, said[0].axis, said[0].reduction, said[0].role, why, of)
    return {"collective": collective, **of_all(bucket)}


def _replace_members(bucket: Bucket, results: list[fx.Node]) -> None:
    """Let readers of each member's result read its part of the bucket's, and erase the members with their waits."""
    for member, result in zip(bucket, results, strict=True):
        for wait in list(member.users):
            replace(wait, result)
            member.graph.erase_node(wait)
        member.graph.erase_node(member)


def _may_join(node: fx.Node, kind: Kind, op: Any) -> bool:
    said = node.meta.get("collective")
    if node.target is not op or not isinstance(said, Collective) or said.kind is not kind or said.role is Role.UNKNOWN:
        return False
    return bool(node.users) and all(map(is_wait, node.users))


def _key(node: fx.Node) -> Hashable:
    val = operands(node)[0].meta["val"]
    return group_of(node), reduction_of(node), node.meta["collective"].role, val.dtype, val.device


@dataclass
class _Open:
    """A bucket that still takes members. A set of candidates is an int with one bit for each."""

    max_bytes: int
    members: list[int] = field(default_factory=list)
    places: list[_Place] = field(default_factory=list)  # of the members, if they serve a unit
    bits: int = 0
    needs: int = 0
    size: int = 0

    def takes(self, place: _Place | None) -> bool:
        """Whether there is room: for each parameter of a unit once, else until the limit is reached."""
        return self.size < self.max_bytes if place is None else place not in self.places

    def add(self, number: int, needs: int, size: int, place: _Place | None) -> None:
        self.members.append(number)
        self.places += [place] if place else []
        self.bits |= 1 << number
        self.needs |= needs
        self.size += size

    def ordered(self) -> list[int]:
        """The members as they stand in their unit, else as in the graph."""
        if not self.places:
            return self.members
        return [number for _, number in sorted(zip(self.places, self.members, strict=True))]


def _closure(needs: int, everything: list[_Open]) -> int:
    """Who needs one member of a bucket waits for all of them, and for what they need."""
    while True:
        wider = needs
        for bucket in everything:
            if wider & bucket.bits:
                wider |= bucket.bits | bucket.needs
        if wider == needs:
            return needs
        needs = wider


def _needs(graph: fx.Graph, candidates: list[fx.Node]) -> list[int]:
    """For each candidate, the candidates whose results its operand is computed from."""
    number = {node: k for k, node in enumerate(candidates)}
    needs: dict[fx.Node, int] = {}
    for node in graph.nodes:
        needs[node] = 0
        for argument in node.all_input_nodes:
            needs[node] |= needs[argument] | (1 << number[argument] if argument in number else 0)
    return [needs[node] for node in candidates]
