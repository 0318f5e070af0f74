"""Gather parameters again for each pass over the model, so that they are whole only while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

import torch
from torch import fx

from ..analysis.agreed_sizes import of_all
from ..base import Pass
from ..cleanup.merge_equal import MergeEqual
from ..ir.collectives import Kind, is_collective, is_wait, operands
from ..ir.edit import insert_before
from ..ir.meta import Relation
from ..ir.ops import Trait, has
from ..ir.program import Axis, Program
from ..ir.roles import Memory, Phase, Role
from ..runtime.host_memory import to_device
from .form_units import FormUnits

aten = torch.ops.aten


@dataclass(frozen=True)
class Reshard(Pass):
    """Parameters in ``program.reshard`` are gathered for forward, and once more for backward (as in FSDP).

    Each run of readers in one phase gets a gather of its own, with what unpacks its result: so micro-batches gather for
    each forward and for each backward. A gathered value is dead after its last reader in the run. A repeated gather is
    marked (``meta["recompute_of"]``), and no pass merges it back. ``Collective.ahead`` bounds how many units are whole
    at once: a gather may start ``program.prefetch`` units before its own, and one unit's gradients may be on their way.
    All other parameters stay whole after their first use, and all of them if ``program.gathers_once``.
    ``program.limit_gathers`` caps these numbers, and also bounds how early the gathers of what stays whole may start.
    What is copied from host memory to be gathered, or to be read without that, is copied again.

    Of parameters in ``program.kept_by``, that number of consecutive ranks keep what they gathered first, each an
    equal part: the other gathers run among these ranks alone.
    """

    after: ClassVar[tuple[type[Pass], ...]] = (MergeEqual, FormUnits)

    def rewrite(self, program: Program) -> int:
        """Give each run of readers its gather; returns how many gathers and copies there are more."""
        added, resharded = 0, frozenset[str]() if program.gathers_once else program.reshard
        values = program.values()
        offloaded = {name for name, (declared, _) in values.items() if declared.memory is not Memory.DEVICE}
        for node in program.collectives():
            described, reshards = node.meta["collective"], resharded.intersection(_served(node))
            if described.role is Role.GRADIENT:
                early = (reshards and described.kind is Kind.REDUCE_SCATTER) or offloaded.intersection(_served(node))
                node.meta["collective"] = replace(described, ahead=1) if early else described
            elif (described.role, described.kind) == (Role.PARAMETER, Kind.ALL_GATHER):
                if reshards:
                    added += _gather_for_each_run(node, program)
                elif program.limit_gathers is not None:
                    node.meta["collective"] = replace(described, ahead=program.limit_gathers - 1)
        for name in sorted(offloaded & program.reshard):
            _, node = values[name]
            for copy in [user for user in node.users if user.target is to_device and not _is_sent(user)]:
                added += _copy_for_each_run(copy)
        return added


def _prefetch(program: Program) -> tuple[int, int]:
    """The number of units ahead of their own at which gathers may start, in forward and in backward."""
    forward, backward = program.prefetch
    most = program.limit_gathers - 1 if program.limit_gathers is not None else max(program.prefetch)
    return min(forward, most), min(backward, most)


def _served(node: fx.Node) -> tuple[str, ...]:
    served: tuple[str, ...] = node.meta["collective"].of
    return served


def _gather_for_each_run(gather: fx.Node, program: Program) -> int:
    """Let the first run of readers read ``gather`` and each other run a copy of it; returns the number of copies."""
    unpacking = _unpacking(gather)
    runs = list(_runs(unpacking))
    if not runs:
        return 0  # nobody reads it, and no pass has removed it
    (first, _), *others = runs
    described, prefetch = gather.meta["collective"], _prefetch(program)
    kept = _keep(gather, program) if others else None
    for phase, readers in others:
        from_host = [] if kept else _copied(gather)
        again = _repeat([*from_host, gather, *unpacking], readers)[gather]
        why, ahead = described.why.replace("gathered", "gathered again"), _lookahead(phase, prefetch)
        again.meta["collective"] = replace(described, why=why, ahead=ahead)
        again.meta |= of_all([gather])
        if kept is not None:
            kept.let_gather(again)
    _erase_unread(unpacking)
    gather.meta["collective"] = replace(described, ahead=_lookahead(first, prefetch))
    return len(others)


def _copied(gather: fx.Node) -> list[fx.Node]:
    """The nodes that copy the operand of ``gather`` from host memory and bring it into shape, in order, if it is so."""
    (node,), found = operands(gather), list[fx.Node]()
    while has(node.target, Trait.PACKS) and len(node.all_input_nodes) == 1:
        found.append(node)
        if node.target is to_device:
            return found[::-1]
        (node,) = node.all_input_nodes
    return []


def _copy_for_each_run(copy: fx.Node) -> int:
    """Let the first run of readers read ``copy``, of what is not gathered, and each other run another copy."""
    unpacking = _unpacking(copy)
    _, *others = _runs([copy, *unpacking])
    for _, readers in others:
        _repeat([copy, *unpacking], readers)
    _erase_unread(unpacking)
    return len(others)


def _is_sent(copy: fx.Node) -> bool:
    """Whether what was copied from host memory is brought into shape to be gathered, and nothing else reads it."""
    return all(is_collective(user) or (has(user.target, Trait.PACKS) and _is_sent(user)) for user in copy.users)


def _erase_unread(unpacking: list[fx.Node]) -> None:
    for node in reversed(unpacking):
        if not node.users:
            node.graph.erase_node(node)


def _unpacking(gather: fx.Node) -> list[fx.Node]:
    """The nodes that only bring the result of ``gather`` into shape, in order: its wait, views, casts, joined parts."""
    found, pending = {gather: None}, sorted(gather.users)
    while pending:  # in the order of the graph, so that all that a node needs has been seen
        node = pending.pop(0)
        shapes = is_wait(node) or has(node.target, Trait.VIEW, Trait.UNPACKS, Trait.JOINS)
        if shapes and all(needed in found for needed in node.all_input_nodes):
            found[node] = None
            pending = sorted({*pending, *node.users})
    return list(found)[1:]


def _runs(unpacking: list[fx.Node]) -> Iterator[tuple[Phase | None, list[fx.Node]]]:
    """The readers of a gathered value in the order of the graph, cut where the phase changes."""
    inside = set(unpacking)
    readers = sorted({user for node in unpacking for user in node.users if user not in inside})
    for phase, run in groupby(readers, lambda reader: reader.meta.get("phase")):
        yield phase, list(run)


@dataclass(frozen=True)
class _Kept:
    """The part of a gathered value that this rank keeps, and the ranks that have all of it together."""

    part: fx.Node
    ranks: Axis

    def let_gather(self, gather: fx.Node) -> None:
        """Let ``gather`` collect the parts of these ranks, with the same result."""
        gather.args, gather.kwargs = (self.part, self.ranks.size, self.ranks.group), {}
        gather.meta["collective"] = replace(gather.meta["collective"], axis=self.ranks.name)


def _keep(gather: fx.Node, program: Program) -> _Kept | None:
    """Keep a copy of a part, cut on the first dim, of what ``gather`` returns; None if no ranks keep any."""
    sizes = {program.kept_by.get(name) for name in _served(gather)}
    size = sizes.pop()
    assert not sizes, f"{gather} serves parameters that different numbers of ranks keep"
    if size is None:
        return None
    described = gather.meta["collective"]
    ranks = program.mesh.subgroup(described.axis, size)
    whole = next(node for node in gather.users if is_wait(node))
    rows = whole.meta["val"].shape[0] // size
    begin = ranks.coordinate * rows
    bounds = 0, begin, begin + rows
    # A copy, since a view would keep all of it, by an op that no pass takes for the packing of the later gather.
    part = insert_before(whole.next, aten.slice_copy.Tensor, whole, *bounds, like=whole, relation=Relation.SHARE)
    return _Kept(part, ranks)


def _repeat(nodes: list[fx.Node], readers: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Repeat ``nodes``, those that the readers need, before the first of these, and let them read the copies.

    Returns the copies by what they repeat.
    """
    needed = set(readers)
    for node in reversed(nodes):
        if needed.intersection(node.users):
            needed.add(node)
    first, copies = readers[0], dict[fx.Node, fx.Node]()
    for node in nodes:
        if node in needed:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: copies.get(each, each))
            copy = insert_before(first, node.target, *args, like=node, relation=Relation.REPLACEMENT, kwargs=kwargs)
            copy.meta |= {key: first.meta[key] for key in ("phase", "module") if key in first.meta}
            copy.meta["recompute_of"] = node.name
            copies[node] = copy
    for reader in readers:
        reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), lambda each: copies.get(each, each))
    return copies


def _lookahead(phase: Phase | None, prefetch: tuple[int, int]) -> int:
    return prefetch[phase is Phase.BACKWARD]
