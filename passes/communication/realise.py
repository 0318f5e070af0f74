"""Choose the ops that perform each collective, by what they cost on the backend of its axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..analysis.agreed_sizes import most_bytes
from ..analysis.collective_algorithms import BUILT_IN, Algorithm, Table, algorithms_along
from ..analysis.topological import settle
from ..base import Fact, Numerics, Pass
from ..ir.collectives import Kind, c10d, communicate_in, group_of, is_wait, kind_of, operands, reduction_of
from ..ir.program import Axis, Program
from . import realise_by_members, realise_by_messages
from .bucket_all_gather import BucketAllGather
from .bucket_all_reduce import BucketAllReduce
from .bucket_reduce_scatter import BucketReduceScatter
from .realisation import Realisation

aten = torch.ops.aten

_KINDS = {c10d.all_reduce.default, c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default}


@dataclass(frozen=True)
class Realise(Pass):
    """Each collective is performed by the algorithm that is cheapest for its axis and size, by ``table``.

    On gloo a reduce_scatter becomes an exchange of parts and their sum in the order of ranks, an all_gather a broadcast
    of each part. Where the ranks of an axis are on one host, data moves through shared memory, member by member of a
    bucket, which is then neither packed nor unpacked. On NCCL the members of a bucket are sent in one launch where that
    costs less than to pack or unpack them, and gathers communicate in the process group that an axis has for them
    (``Axis.gathers``). Other backends keep their ops, and so does gloo for tensors on a GPU. The semantics stay in
    ``meta["collective"]``.

    ``backend`` overrides that of the axes, to see on fake ranks what another backend would do. A compiler that plans
    memory by itself must know that operands are read until the wait; without this pass it sees torch's own ops only.
    """

    table: Table = BUILT_IN
    backend: str | None = None
    numerics: ClassVar[Numerics] = "reassociates"
    facts: ClassVar[frozenset[Fact]] = frozenset({Fact.SHARED_AXES})
    after: ClassVar[tuple[type[Pass], ...]] = (BucketAllGather, BucketReduceScatter, BucketAllReduce)

    def rewrite(self, program: Program) -> int:
        """Choose for all, then rewrite; returns how many other ops perform now, or another process group."""
        tasks = [each for node in program.collectives() if (each := self._choose(program, node))]
        sinking = set[fx.Node]().union(*map(_written, tasks))
        settle(program.graph, sinking)
        return len(tasks) + sum(_gathers_apart(program, node) for node in program.collectives())

    def _choose(self, program: Program, node: fx.Node) -> Realisation | None:
        axis = program.mesh.axis_of_group(group_of(node))
        if axis is None or node.target not in _KINDS or not node.users or not all(map(is_wait, node.users)):
            return None
        algorithm = self._cheapest(node, axis, self.backend or axis.backend)
        return None if algorithm is Algorithm.NATIVE else Realisation(node, algorithm, axis)

    def _cheapest(self, node: fx.Node, axis: Axis, backend: str) -> Algorithm:
        kind, link = kind_of(node), self.table.link(axis, backend)
        algorithms = [each for each in algorithms_along(axis, kind, backend) if _can_perform(each, node, axis)]
        if Algorithm.COALESCED in algorithms:
            members = realise_by_members.copied(node, axis.size)
            pays = self.table.coalesces(axis, backend, kind, most_bytes(node), members)
            return Algorithm.COALESCED if pays else Algorithm.NATIVE
        return link.cheapest(kind, most_bytes(node), algorithms) if link else Algorithm.NATIVE


def _gathers_apart(program: Program, node: fx.Node) -> bool:
    """Let a gather communicate in the process group for gathers, if there is one; whether that is so."""
    axis = program.mesh.axis_of_group(group_of(node))
    if axis is None or not axis.gathers or kind_of(node) is not Kind.ALL_GATHER:
        return False
    communicate_in(node, axis.gathers)
    return True


def _can_perform(algorithm: Algorithm, node: fx.Node, axis: Axis) -> bool:
    """Whether an algorithm can move the operand of ``node``, and can reduce as that does, if it does."""
    if algorithm is Algorithm.NATIVE:
        return True
    val, reduction = operands(node)[0].meta["val"], reduction_of(node)
    # gloo was measured with tensors on the CPU; it copies those on a GPU there
    suits = realise_by_members.copied(node, axis.size) if algorithm is Algorithm.COALESCED else val.device.type == "cpu"
    known = realise_by_members.REDUCTIONS.get(algorithm, realise_by_messages.REDUCTIONS)
    return bool(suits) and (reduction is None or (reduction in known and val.dtype is not torch.bool))


def _written(task: Realisation) -> set[fx.Node]:
    """Write the ops, for all readers, and erase the collective. Returns the nodes to sink to their first readers."""
    sinking = (
        realise_by_members.write(task)
        if task.algorithm in realise_by_members.REDUCTIONS
        else realise_by_messages.write(task)
    )
    operand = task.operand
    for node in (*task.node.users, task.node):
        node.graph.erase_node(node)
    if not operand.users and operand.target is aten.cat.default:
        operand.graph.erase_node(operand)  # it packed members that are sent where they lie now
    return sinking
