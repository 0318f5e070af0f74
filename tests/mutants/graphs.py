"""Wrong versions of a pass, made by one edit of what it leaves: operators over any graph, and where they apply.

An operator edits the node of a given name in the program of one rank, and says whether it could.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, fx

from passes import Program
from passes.ir.collectives import is_collective, is_wait, operands
from passes.ir.ops import Trait, has
from passes.runtime.arena import view_at

aten = torch.ops.aten
Values = Mapping[str, Any]  # of a right program's nodes, by name
Operator = Callable[[Program, fx.Node, Values], bool]


def dropped(program: Program, node: fx.Node, values: Values) -> bool:
    """A node is left out: its readers read an operand of its instead, or what a write would have written over."""
    source = operands(node.args[0])[0] if is_wait(node) and operands(node.args[0]) else None  # type: ignore[arg-type]
    others = [source] if source is not None else node.all_input_nodes
    for other in others:
        if is_collective(node) or not _same_type(node, other) or _same_value(values, node.name, other.name):
            continue
        node.replace_all_uses_with(other)
        if not is_wait(node):
            program.graph.erase_node(node)
        return True
    return False


def swapped(program: Program, node: fx.Node, values: Values) -> bool:
    """A node reads another value of the same type, which is there already."""
    if is_wait(node):
        return False
    read = [each for each in node.args if isinstance(each, fx.Node)]
    for operand in read or node.all_input_nodes:
        for other in _before(node):
            if _same_type(other, operand) and not _same_value(values, other.name, operand.name):
                node.replace_input_with(operand, other)
                return True
    return False


def off_by_one(program: Program, node: fx.Node, values: Values) -> bool:
    """A position, a length or an offset among the arguments is one too many."""
    found = list[int]()

    def moved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(moved, value))
        if type(value) is int and not found:
            found.append(value)
            return value + 1
        return value

    args = tuple(moved(each) for each in node.args)
    node.args = args
    return bool(found)


def stale(program: Program, node: fx.Node, values: Values) -> bool:
    """What is in flight is read before it has come; what a write leaves is read before that."""
    if is_wait(node) and node.users:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        program.graph.erase_node(node)
        return True
    readers = [each for each in node.users if each.op == "call_function"]
    if not has(node.target, Trait.MUTABLE) or not readers:
        return False
    first = min(readers)
    written = node.all_input_nodes[0]
    first.replace_input_with(node, written)
    node.prepend(first)
    return True


def other_rank(program: Program, node: fx.Node, values: Values) -> bool:
    """One rank alone has its own sign of a value."""
    val = node.meta.get("val")
    if is_collective(node) or node.target is view_at or not node.users:
        return False
    if not isinstance(val, Tensor) or not val.is_floating_point():
        return False
    own = program.mesh.axes[-1].coordinate
    with program.graph.inserting_after(node):
        scaled = program.graph.call_function(aten.mul.Tensor, (node, -1.0 if own else 1.0))
    scaled.meta["val"] = val
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    return True


def other_axis(program: Program, node: fx.Node, values: Values) -> bool:
    """A collective runs along another axis of the mesh."""
    groups = [axis.group for axis in program.mesh.axes]
    for k, each in enumerate(node.args):
        if isinstance(each, str) and each in groups and len(groups) > 1:
            node.update_arg(k, groups[(groups.index(each) + 1) % len(groups)])
            return True
    return False


OPERATORS: dict[str, Operator] = {
    "dropped": dropped,
    "stale": stale,
    "other axis": other_axis,
    "other rank": other_rank,
    "off by one": off_by_one,
    "swapped": swapped,
}


def edit(operator: str, program: Program, name: str, values: Values) -> bool:
    """Apply an operator to the node of this name; whether it could be."""
    node = next((each for each in program.graph.nodes if each.name == name), None)
    return node is not None and OPERATORS[operator](program, node, values)


def touched(before: Program, after: Program) -> list[str]:
    """The nodes of ``after`` that are new, changed or moved; all where that is no more than one."""
    was = {node.name: _described(node) for node in before.graph.nodes}
    now = {node.name: _described(node) for node in after.graph.nodes if node.op == "call_function"}
    found = [name for name, described in now.items() if was.get(name) != described]
    if not found:
        kept, order = [name for name in was if name in now], [name for name in now if name in was]
        found = [one for one, other in zip(kept, order, strict=True) if one != other]
    return found if len(found) > 1 else [*now]


def in_turn(names: Sequence[str], seed: str) -> list[str]:
    """The names in an order drawn by seed."""
    return Random(seed).sample(list(names), len(names))


def _described(node: fx.Node) -> tuple[Any, ...]:
    return node.op, node.target, str(node.args), str(node.kwargs)


def _before(node: fx.Node) -> list[fx.Node]:
    """The nodes before this one, the nearest first."""
    earlier = []
    for each in node.graph.nodes:
        if each is node:
            break
        earlier.append(each)
    return [each for each in reversed(earlier) if not is_collective(each)]


def _same_type(one: Any, other: Any) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


def _same_value(values: Values, one: str, other: str) -> bool:
    """Whether two nodes have about the same values, so that it makes no difference which is read."""
    a, b = values.get(one), values.get(other)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return bool(values) and (a is None or b is None)  # no values are known of a program that is run in parts
    return torch.allclose(a.double(), b.double(), equal_nan=True)
