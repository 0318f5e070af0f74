"""Checks of an assignment that is handed over: each error names the node, its op, and the user's line.

Whether a rule lists an option is checked where it is looked up (``cheapest_option.py``); here is all the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from operator import or_
from typing import Any

from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import OutputKind, PartitionError
from passes.ir.program import Placements

from .assignment import Assignment, Choice, Move, MoveKind, shown
from .calls import Calls
from .parameters import Parameters
from .values import Value, leaves, results


def check_axes(calls: Calls, given: Assignment) -> None:
    """Raise ``PartitionError`` unless an assignment is over the axes of the mesh."""
    if given.axes != calls.axes:
        raise PartitionError(
            f"expected an assignment over the mesh axes {list(calls.axes)}, got one over {list(given.axes)}"
        )


def check_names(calls: Calls, given: Assignment, choices: Collection[str], outputs: Collection[str]) -> None:
    """Raise ``PartitionError`` for names that are no nodes of the program with a choice, and no outputs of it."""
    for found, there, kind in ((given.choices, choices, "node"), (given.outputs, outputs, "output")):
        if wrong := [name for name in found if name not in there]:
            close = get_close_matches(wrong[0], there, 4) or list(there)[:4]
            raise PartitionError(
                f"the assignment names {wrong[:4]}, but the program has no such {kind} that is computed on parts; "
                f"close to {wrong[0]!r} it has {close}"
            )


def check_sizes(calls: Calls, node: fx.Node, given: Choice, operands: Sequence[Value]) -> None:
    """Raise ``PartitionError`` unless a choice has a placement for each operand and each result."""
    val = results(node.meta["val"])
    for field, placements, count in (("reads", given.reads, len(operands)), ("gives", given.gives, len(val))):
        if placements is not None and not given.decomposed and len(placements) != count:
            what = "tensor operands" if field == "reads" else "results"
            raise PartitionError(
                f"{calls.describe(node)} has {count} {what}, but is assigned {field}={shown(placements)}"
            )
    moved = [move.placement for move in (*(given.first or ()), *(given.then or ()))]
    axes = len(calls.axes)
    if any(p is not None and len(p) != axes for p in (*given.placements, *moved)):
        raise PartitionError(
            f"{calls.describe(node)} needs one placement per mesh axis {list(calls.axes)} for each tensor, but is "
            f"assigned {shown([p for p in (*given.placements, *moved) if p is not None and len(p) != axes])}"
        )


def check_moves(
    calls: Calls, node: fx.Node, moves: Sequence[Move], parameters: Parameters, values: Mapping[fx.Node, Any]
) -> None:
    """Raise ``PartitionError`` for a move of an operand that is not of its kind, and where a rounded one is read."""
    operands = [leaf for leaf in leaves(node) if isinstance(values[leaf], Value)]
    for move in moves:
        named = move.index < len(operands) and parameters.name(operands[move.index]) is not None
        fits = {
            MoveKind.PARAMETER: named,
            MoveKind.PART: named,
            MoveKind.GRADIENT: move.index < len(operands) and node in calls.context.complete_gradients,
            MoveKind.ROWS: move.index < len(operands),
            MoveKind.HEADS: move.index < len(operands),
        }.get(move.kind, False)
        if not fits:
            raise PartitionError(f"{calls.describe(node)} has no operand {move.index} that is a {move.kind} to move")
        check_placement(calls, node, move, [values[leaf] for leaf in operands])
    own = {move.index for move in moves if move.kind is MoveKind.PART}
    for k, leaf in enumerate(operands):
        if k not in own and not parameters.is_gathered(leaf, node) and parameters.rounded(leaf, values[leaf]):
            raise PartitionError(
                f"{calls.describe(node)} updates the parameter {parameters.name(leaf)}, of which ranks have only "
                f"their own part unrounded: its first moves must have part({k}, ...)"
            )


def check_placement(calls: Calls, node: fx.Node, move: Move, values: Sequence[Any]) -> None:
    """Raise ``PartitionError`` for a move of no value, or to a placement that its value cannot have."""
    value = values[move.index] if 0 <= move.index < len(values) else None
    dims = len(value.shape) if isinstance(value, Value) else 0
    sums = value.primary if isinstance(value, Value) and move.kind is not MoveKind.ROWS else ()
    fits = (isinstance(p, Replicate) or (isinstance(p, Shard) and 0 <= p.dim < dims) for p in move.placement)
    stays = (k < len(sums) and p == sums[k] for k, p in enumerate(move.placement))
    if not isinstance(value, Value) or not all(map(or_, fits, stays)):
        raise PartitionError(
            f"{calls.describe(node)} has no value {move.index} that can be moved to {shown([move.placement])}"
        )


def check_result_moves(calls: Calls, node: fx.Node, moves: Sequence[Move], value: Any, first: Sequence[Move]) -> None:
    """Raise ``PartitionError`` for a move of a result that is not of its kind. ``first``: the moves of operands."""
    held, context = results(value), calls.context
    for move in moves:
        fits = {
            MoveKind.GRADIENT: node in context.complete_gradients,
            MoveKind.UPDATE: node in context.updated_in_parts,
            MoveKind.ROWS: any(each.kind is MoveKind.ROWS for each in first),  # rows that were gathered to be cut
            MoveKind.SUM: True,
        }.get(move.kind, False)
        if not fits or move.index >= len(held) or not isinstance(held[move.index], Value):
            raise PartitionError(f"{calls.describe(node)} has no result {move.index} that is a {move.kind} to move")
        check_placement(calls, node, move, held)


def check_constraint(calls: Calls, node: fx.Node, given: Choice, placement: Placements) -> None:
    """Raise ``PartitionError`` if a choice for a ``spmd.constrain`` is other than the user's."""
    if given.gives is not None and given.gives != (placement,):
        raise PartitionError(
            f"{calls.describe(node)} constrains its value to {shown([placement])}, but is assigned "
            f"gives={shown(given.gives)}"
        )


def check_output(calls: Calls, name: str, given: Placements, usual: Placements) -> Placements:
    """``given``, if an output may have it. Raises ``PartitionError`` else: only a result may, replicated."""
    if name.startswith(f"{OutputKind.RESULT} ") and given == calls.context.replicated:
        return given
    raise PartitionError(
        f"the output {name!r} is assigned {shown([given])}, but has {shown([usual])}"
        + (f" or {shown([calls.context.replicated])}" if name.startswith(f"{OutputKind.RESULT} ") else "")
    )
