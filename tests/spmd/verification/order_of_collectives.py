"""The order in which ranks start collectives, which has to be one.

Each communicator pairs the first collective of a rank with the first of each other; and kernels of two communicators
that ranks start in different orders may wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import fx

from passes import PassError, Program
from passes.ir.collectives import group_of, input_bytes, is_collective, moved, reduction_of
from passes.memory.pieces import tensors
from passes.schedule.streams import Launch, StreamProgram


def check_order_of_collectives(programs: Sequence[Program], streams: Sequence[StreamProgram]) -> None:
    """Raise ``PassError`` unless all ranks start the same collectives in the same order."""
    first, *others = [_collectives(*each) for each in zip(programs, streams, strict=True)]
    for rank, other in enumerate(others, start=1):
        for k, (one, two) in enumerate(zip_longest(first, other)):
            if one != two:
                start = "expected all ranks to start the same collectives in the same order, but as number"
                raise PassError(f"{start} {k + 1} rank 0 starts {one}, and rank {rank} starts {two}")


def _collectives(program: Program, streams: StreamProgram) -> list[tuple[object, ...]]:
    """What has to be equal on all ranks of each collective, in the order of their starts."""
    number = {node: k for k, node in enumerate(program.collectives())}
    launches = [each for each in streams.operations if isinstance(each, Launch) and is_collective(each.node)]
    return [(each.stream, number[each.node], *_described(program, each.node)) for each in launches]


def _described(program: Program, node: fx.Node) -> tuple[object, ...]:
    axis = program.mesh.axis_of_group(group_of(node))
    dtypes = tuple(tensor.dtype for each in moved(node) for tensor in tensors(each.meta["val"]))
    return axis.name if axis is not None else "", node.target, reduction_of(node), dtypes, input_bytes(node)
