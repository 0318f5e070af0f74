"""Which collectives go into one bucket: the analysis that the three bucket passes share, and the edit's common part.

The groups follow from the graph's structure and from the sizes of operands. Operands are equal in size on all ranks
(uneven shards are padded before they are sent), so every rank forms the same buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ._torch import OpOverload
from .collectives import (
    Collective,
    Kind,
    group_of,
    input_bytes,
    is_wait,
    operands,
    output_bytes,
    reduction_of,
)
from .program import Program
from .roles import Role

Bucket = list[fx.Node]


def buckets(program: Program, kind: Kind, op: Any, max_bytes: int) -> list[Bucket]:
    """Groups of at least two collectives of ``kind``, realised by ``op``, that can be done as one.

    Members agree in axis, dtype, device, reduction and role, and none needs another's result, also not by way of
    other buckets. In graph order, a bucket takes members until its operands or its results exceed ``max_bytes``.
    A collective whose role nobody said is left alone.
    """
    candidates = [node for node in program.collectives() if _may_join(node, kind, op)]
    needs = _needs(program.graph, candidates)
    everything: list[_Open] = []
    latest: dict[Hashable, _Open] = {}
    for number, node in enumerate(candidates):
        key, size = _key(node), max(input_bytes(node), output_bytes(node))
        bucket = latest.get(key)
        if (
            bucket is None
            or bucket.size + size > max_bytes
            or not _independent(bucket, number, needs[number], everything)
        ):
            bucket = latest[key] = _Open()
            everything.append(bucket)
        bucket.add(number, needs[number], size)
    return [[candidates[k] for k in bucket.members] for bucket in everything if len(bucket.members) > 1]


def joined(bucket: Bucket) -> Collective:
    """What is known of the one collective that replaces a bucket."""
    said: list[Collective] = [node.meta["collective"] for node in bucket]
    reasons = list(dict.fromkeys(each.why for each in said if each.why))
    why = "; ".join([f"{len(bucket)} in one", *reasons[:1]]) + (" and the like" if len(reasons) > 1 else "")
    of = tuple(dict.fromkeys(name for each in said for name in each.of))
    return Collective(said[0].kind, said[0].axis, said[0].reduction, said[0].role, why, of)


def caller(bucket: Bucket) -> Callable[..., fx.Node]:
    """A function ``call(op, *args)`` that adds nodes where the last member stands, in its phase."""
    last = bucket[-1]

    def call(op: Any, *args: Any) -> fx.Node:
        with last.graph.inserting_before(last):
            node = last.graph.create_node("call_function", op, args, name=_name(op))
        node.meta = {key: last.meta[key] for key in ("phase", "module") if key in last.meta}
        return node

    return call


def _name(op: Any) -> str:
    """Nodes are called as tracing calls them: ``cat``, not ``cat_default``."""
    return op._schema.name.split("::")[1] if isinstance(op, OpOverload) else op.__name__


def replace_members(bucket: Bucket, results: list[fx.Node]) -> None:
    """Let readers of each member's result read its part of the bucket's, and erase the members with their waits."""
    for member, result in zip(bucket, results, strict=True):
        for wait in list(member.users):
            result.meta = {key: value for key, value in wait.meta.items() if key != "val"}
            wait.replace_all_uses_with(result)
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

    members: list[int] = field(default_factory=list)
    bits: int = 0
    needs: int = 0
    size: int = 0

    def add(self, number: int, needs: int, size: int) -> None:
        self.members.append(number)
        self.bits |= 1 << number
        self.needs |= needs
        self.size += size


def _independent(bucket: _Open, number: int, needs: int, everything: list[_Open]) -> bool:
    """Whether the bucket and candidate ``number``, which needs ``needs``, can be done in one go."""
    return not _closure(needs, everything) & bucket.bits and not _closure(bucket.needs, everything) >> number & 1


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
