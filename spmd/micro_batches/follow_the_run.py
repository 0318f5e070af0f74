"""Let the program of the first micro-batch run for the others: the positions of its rows follow from the run's number.

Two shares are compared, of micro-batches of as many rows. Where the second one draws, or cuts, other rows than the
first, of something that the batch has no part in, the rows begin at a number that moves on from run to run.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from passes import Input, PartitionError, Program
from passes.ir.edit import add_input, insert_before
from passes.ir.micro_batches import RUN_NUMBER
from passes.runtime.random import draw

from .lines import described

aten = torch.ops.aten

RUN = "micro-batch"  # the input that says which one runs


def add_run(program: Program) -> fx.Node:
    """The input that says which micro-batch runs."""
    return add_input(program, Input(RUN_NUMBER, RUN), 0)


def follow_the_run(program: Program, second: Program) -> bool:
    """Let the draws and cuts whose rows are others in each micro-batch begin there; all else must be equal.

    Returns whether there are any, so that the program takes the number of the run.
    """
    other: dict[fx.Node, fx.Node] = {}
    moved = []
    if program.node_count != second.node_count:
        raise PartitionError(
            f"the second micro-batch of {program.name} has other ops than the first, which micro_batches does not "
            "support: pass parts of equal rows"
        )
    for node, its in zip(program.graph.nodes, second.graph.nodes, strict=True):
        other[node] = its
        if node.op != its.op or node.target != its.target or not _are_equal(node, its, other):
            raise PartitionError(
                f"{described(node)} computes with the position of a micro-batch in the batch, which micro_batches "
                "does not support: compute it before the step, and pass it as an argument with rows of the batch"
            )
        if _rows(node) != _rows(its):
            moved.append((node, its))
    run = add_run(program) if moved or program.draws else None
    for node, its in moved:
        assert run is not None, "something moves"
        (_move_draw if node.target is draw else _move_cut)(node, its, run)
    return run is not None


def _are_equal(node: fx.Node, its: fx.Node, other: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether two nodes compute the same of the same, but for the rows that they draw or cut."""
    here, there = fx.map_arg((node.args, node.kwargs), other.__getitem__), (its.args, its.kwargs)
    if (at := _positions(node)) is None:
        return bool(here == there)
    rest = [([*args[: at.start], *args[at.stop :]], kwargs) for args, kwargs in (here, there)]
    lengths = [[length for _, length, _ in _rows(each)] for each in (node, its)]
    return bool(rest[0] == rest[1] and lengths[0] == lengths[1])


def _positions(node: fx.Node) -> slice | None:
    """The arguments that say which rows a draw or a cut has."""
    if node.target is draw:
        return slice(3, 4)
    return slice(2, 4) if node.target is aten.slice.Tensor and len(node.args) == 4 else None


def _rows(node: fx.Node) -> list[tuple[int, int, int]]:
    """First index, length and length of the whole, of each dim of what is drawn, or of the one that is cut."""
    if (at := _positions(node)) is None:
        return []
    if node.target is draw:
        return list(node.args[3])  # type: ignore[arg-type]
    whole = node.all_input_nodes[0].meta["val"].shape[node.args[1]]
    start, end = (min(int(each), whole) for each in node.args[at])  # type: ignore[arg-type]
    return [(start, end - start, whole)]


def _move_draw(node: fx.Node, its: fx.Node, run: fx.Node) -> None:
    pairs = zip(_rows(node), _rows(its), strict=True)
    node.update_arg(3, [(_first_row(node, run, start, then), *rest) for (start, *rest), (then, *_) in pairs])


def _move_cut(node: fx.Node, its: fx.Node, run: fx.Node) -> None:
    """A cut becomes a copy, since memory that is planned has views at fixed places."""
    ((start, length, _),), ((then, *_),) = _rows(node), _rows(its)
    first = _first_row(node, run, start, then)
    end = insert_before(node, operator.add, first, length, like=None, name="row_behind", val=start + length)
    node.target = aten.slice_copy.Tensor
    node.args = (*node.args[:2], first, end)
    node.meta["val"] = node.meta["val"].clone(memory_format=torch.contiguous_format)


def _first_row(node: fx.Node, run: fx.Node, start: int, then: int) -> Any:
    """The first row, which moves on from micro-batch to micro-batch if another one follows in the second.

    What computes it has names of its own: a shorter last micro-batch has none, and all else is named as there.
    """
    if then == start:
        return start
    by = insert_before(node, operator.mul, run, then - start, like=None, name="rows_before", val=0)
    return insert_before(node, operator.add, start, by, like=None, name="first_row", val=start)
