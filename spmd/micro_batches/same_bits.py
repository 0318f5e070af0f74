"""Partition a program whose sums over rows do not depend on the number of ranks, to the last bit.

A sum of floats depends on its order. The global batch is cut into parts, always the same ones; a rank has several that
follow each other, and computes each with ops of the same sizes, whatever the number of ranks. What is summed over rows
is a partial sum for each part, and a balanced tree over all of them: its lower levels are accumulators of a rank, and
each level above is a sum over an axis of two ranks, which has one order. A run may compute a few parts side by side,
which are a subtree. More ranks along an axis: ``spread.py``. State that styles split is computed whole:
``state_in_parts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from torch.distributed.tensor import Shard

from passes import AxisRole, PartitionError, Program, Role

from ..partitioner.plan import Plan
from .accumulate import check_sums
from .spread import partition_and_spread
from .state_in_parts import keep_parts, with_whole_state
from .time_axis import partition_in_time

OWNS = (
    *("bits", "virtual", "same_bits", "spread", "Spread", "together", "tree", "ascend", "subtrees"),
    *("gather_rows", "return_rows", "own_rows"),
)
"""Identifiers of equal bits. No further file may name one (``tests/test_structure.py``)."""


def partition_with_same_bits(program: Program, plan: Plan, virtual: int, runs: int = 1) -> Program:
    """One rank's share, to be run for each of its parts, or ``runs`` times if these are several.

    Raises ``PartitionError`` where ranks or rows do not fit.
    """
    _check_wire(program, plan)
    over = program.mesh.axes_with(AxisRole.BATCH)
    ranks = prod(program.mesh.axes[k].size for k in over)
    spread = [k for k in over if program.mesh.axes[k].size > 2]
    if 2 * ranks > virtual and not spread:
        raise PartitionError(
            f'bits="same" takes at least two virtual parts on each rank, but has virtual={virtual} for {ranks} ranks: '
            f"pass virtual={2 * ranks} or more, the same on any number of ranks"
        )
    together = virtual // (runs * _subtrees(ranks)) if runs > 1 else None
    if together == 0:
        raise PartitionError(
            f'bits="same" with micro_batches={runs} takes a virtual part for each of them on each rank, but has '
            f"virtual={virtual} for {ranks} ranks: pass virtual={runs * _subtrees(ranks)} or more, or micro_batches="
            f"{virtual // _subtrees(ranks)} or fewer, which has the same bits"
        )
    for each in (i for i in program.inputs if i.role is Role.BATCH):
        dims = [p.dim for k, p in enumerate(each.placement) if k in over and isinstance(p, Shard)]
        if dims and each.shape[dims[0]] % virtual:
            raise PartitionError(
                f'bits="same" cuts the global batch into {virtual} equal parts, but {each.name} has '
                f"{each.shape[dims[0]]} rows: pass a multiple of {virtual}, or drop the last batch"
            )
    program = replace(program, same_bits=True)
    with _explained(virtual):
        if spread:
            return partition_and_spread(program, plan, virtual, spread[0], together)
        return _in_parts(program, plan, virtual // ranks, together)


def _in_parts(program: Program, plan: Plan, count: int, together: int | None) -> Program:
    """The share of a rank that computes ``count`` parts of the batch."""
    over = program.mesh.axes_with(AxisRole.BATCH)
    ordered = [replace(axis, ordered=k in over) for k, axis in enumerate(program.mesh.axes)]
    program = replace(program, mesh=replace(program.mesh, axes=tuple(ordered)))
    levels = (count // (together or 1) - 1).bit_length()
    local = partition_in_time(program, with_whole_state(program, plan), count, levels=levels, together=together)
    if local.micro_batches is not None:
        check_sums(local, set())
    keep_parts(local, plan)
    return local


@contextmanager
def _explained(virtual: int) -> Iterator[None]:
    """Say of a refusal why there are micro-batches at all, as no option of the user has that name."""
    try:
        yield
    except PartitionError as error:
        error.add_note(
            f'bits="same" computes the batch in {virtual} parts, as micro-batches: without it, it stays whole'
        )
        raise


def _subtrees(ranks: int) -> int:
    """The number of equal subtrees of which each rank has one or, if there are more ranks than that, about one."""
    return 1 << (ranks.bit_length() - 1)


def _check_wire(program: Program, plan: Plan) -> None:
    """Raise ``PartitionError`` for what would be rounded, or computed elsewhere, where there are several ranks."""
    dtypes = {i.name: i.dtype for i in program.inputs if i.role is Role.PARAMETER and i.dtype is not None}
    sent = {name: plan.reduce_dtypes.get(name) or dtype for name, dtype in dtypes.items()}
    rounded = next((name for name, dtype in dtypes.items() if sent[name] is not dtype), None)
    if rounded is not None:
        raise PartitionError(
            f'expected gradients to be reduced in their own dtype with bits="same", but {rounded} has '
            f"{dtypes[rounded]}, and its gradient {sent[rounded]}: leave out reduce_dtype, and let policies have "
            f"reduce_dtype={dtypes[rounded]}"
        )
    if plan.options.get("gather_dtype") is not None:
        raise PartitionError('expected no gather_dtype with bits="same": one rank by itself rounds no parameters')
    if plan.memory and with_whole_state(program, plan).placements != plan.placements:
        raise PartitionError('expected no offload_policy with bits="same" where state is split: leave out one of them')
