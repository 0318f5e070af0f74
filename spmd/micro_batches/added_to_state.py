"""Rows that are added to state by their index, such as counts of classes, as a sum of their own that is added to it.

State is whole in each micro-batch, and each would add to it what the others have added. What is added to zeros is a sum
over rows, known after the last of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from passes import Program
from passes.ir.edit import insert_before, stand_in
from passes.ir.meta import Relation
from passes.ir.ops import Trait, has

aten = torch.ops.aten
_FILLS = (Trait.ZEROS, Trait.ONES, Trait.FULL)
_NOT_SUMMED = (torch.bool, torch.int16)  # by gloo; bools as bytes, of which 256 are none
_ADDS = (aten.index_add.default, aten.scatter_add.default, aten.index_put.default, aten._unsafe_index_put.default)


def add_to_state_last(program: Program, rows: Collection[str]) -> Program:
    """The program with ``state + f(zeros)`` for each ``f(state)`` that adds rows; ``program`` is left as it is.

    ``rows``: the arguments that have rows of the batch.
    """
    if not any(node.target in _ADDS for node in program.graph.nodes):
        return program
    program = program.copy()
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    of_rows = {node for node, each in inputs.items() if each.name in rows}
    state = inputs.keys() - of_rows
    for node in list(program.graph.nodes):
        if of_rows.isdisjoint(node.all_input_nodes):
            continue
        of_rows.add(node)
        if _adds(node) and _is_whole(node.args[0], state):
            of_rows.update(_apart(node))
    return program


def _adds(node: fx.Node) -> bool:
    if node.target not in _ADDS or node.meta["val"].dtype in _NOT_SUMMED:
        return False
    return "index_put" not in str(node.target) or node.args[3:] == (True,)


def _is_whole(node: Any, state: Collection[fx.Node]) -> bool:
    """Whether a value is state as the step has written it so far: of each op there, the first operand was it."""
    size = node.meta["val"].numel()  # a view of state is as whole
    while node not in state:
        first = node.args[0] if node.args and not has(node.target, *_FILLS) else None
        if not isinstance(first, fx.Node) or not _has_size(first, size):
            return False
        node = first
    return True


def _has_size(node: fx.Node, size: int) -> bool:
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) and val.numel() == size


def _apart(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The sum of what ``node`` adds, from zeros, and the state with it, which stands in for ``node``."""
    state, *rest = node.args
    like_state = torch.zeros_like(state.meta["val"])  # type: ignore[union-attr]
    zeros = insert_before(node, aten.zeros_like.default, state, like=node, val=like_state)
    val = torch.zeros_like(like_state)
    added = insert_before(
        node, node.target, zeros, *rest, like=node, relation=Relation.STEP, kwargs=node.kwargs, val=val
    )
    val = node.meta["val"]
    total = insert_before(node, aten.add.Tensor, state, added, like=node, relation=Relation.REPLACEMENT, val=val)
    stand_in(node, total)
    node.graph.erase_node(node)
    return added, total
