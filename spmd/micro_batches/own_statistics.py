"""Statistics that each micro-batch has of its own, instead of those of the whole batch.

A sum over rows that a run needs before all have run, such as a batch norm's, is taken to be that of the run's own rows,
times the number of runs. What is computed from it differs from run to run; where it leaves them, as a gradient or as
new state, it is the mean over all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx
from torch.distributed.tensor import Replicate

from passes import Collective, Kind, PartitionError, Phase, Program, Role
from passes.analysis.reachability import ancestors
from passes.ir.collectives import WAIT, c10d, group_of, is_collective
from passes.ir.edit import insert_before

from .accumulate import TIME
from .lines import described

aten = torch.ops.aten


def keep_own(
    program: Program, sums: Collection[fx.Node], early: Collection[fx.Node], joined: Collection[fx.Node], count: int
) -> None:
    """Let ``early``, and those of ``sums`` that values are computed from together with them, be those of each run.

    ``joined``: rows that each run returns.
    """
    own, inside = set(early), ancestors([*(node for node in program.graph.nodes if _is_in_time(node)), *joined])
    reached = _reached(program.graph, sums, inside)
    while True:
        met = (reached[node] for node in program.graph.nodes if node not in sums and not reached[node].isdisjoint(own))
        more = own.union(*met)
        if more == own:
            break
        own = more
    for value in list(program.graph.nodes):
        readers = [reader for reader in value.users if _leaves(value, reader, inside)]
        if readers and not reached[value].isdisjoint(own):
            _average(value, readers, count)
    for node in own:
        _take(node, count)
    lines = ", ".join(dict.fromkeys(map(described, early)))
    note = f'statistics="per_micro_batch": each of {count} micro-batches has sums of its own: {lines}'
    program.notes = [*program.notes, note]


def _is_in_time(node: fx.Node) -> bool:
    return is_collective(node) and group_of(node) == TIME


def _reached(graph: fx.Graph, sums: Collection[fx.Node], inside: Collection[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """The sums that each node is computed from in its run."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        given = (found[each] for each in node.all_input_nodes if not _leaves(each, node, inside))
        found[node] = {node} if node in sums else set[fx.Node]().union(*given)
    return found


def _leaves(value: fx.Node, reader: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether ``reader`` comes after the runs: it updates, is the end, or reads a gradient that no run needs there."""
    placement = value.meta.get("placement")
    if not placement or placement[-1] != Replicate():
        return False
    if "grad_of" in value.meta and reader not in inside:
        return True
    return reader.op == "output" or reader.meta.get("phase") is Phase.UPDATE


def _average(value: fx.Node, readers: Sequence[fx.Node], count: int) -> None:
    """Let ``readers`` read the mean of a value over the runs: a sum, which is accumulated as any other."""
    val, before = value.meta["val"], value.next
    if not val.is_floating_point():
        raise PartitionError(
            f"{described(value)} is computed from statistics that each micro-batch has of its own, and leaves the step "
            f"as {val.dtype}, of which there is no mean: keep the batch whole (micro_batches=1)"
        )
    share = insert_before(before, aten.div.Scalar, value, count, like=value, val=val)
    started = insert_before(before, c10d.all_reduce.default, share, "sum", TIME, like=value, val=val)
    of = (value.meta["grad_of"],) if "grad_of" in value.meta else ()
    role = Role.GRADIENT if of else Role.ACTIVATION
    started.meta["collective"] = Collective(Kind.ALL_REDUCE, TIME, "sum", role, "mean over micro-batches", of)
    mean = insert_before(before, WAIT, started, like=value, val=val)
    for node in (share, started, mean):
        node.meta.pop("grad_of", None)
    mean.meta |= {key: value.meta[key] for key in ("placement", "grad_of", "captured") if key in value.meta}
    for reader in readers:
        reader.replace_input_with(value, mean)


def _take(node: fx.Node, count: int) -> None:
    """Let the readers of a sum read that of the run's own rows, times the number of runs."""
    (wait,) = node.users
    own = insert_before(node, aten.mul.Scalar, node.args[0], count, like=wait, val=wait.meta["val"])
    own.meta |= {key: wait.meta[key] for key in ("placement", "captured") if key in wait.meta}
    wait.replace_all_uses_with(own)
    node.graph.erase_node(wait)
    node.graph.erase_node(node)
