"""Contents of each piece of memory: parameters, gathered ones, gradients, optimizer state, activations, or others.

That is what capture and partitioner recorded: roles of inputs and outputs, what a collective carries, whose gradient a
value is. It holds for the memory of a value and for copies on the way to a collective or from one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.collectives import Collective, is_collective, operands
from ..ir.ops import Trait, has
from ..ir.program import Input, Program
from ..ir.roles import Holds, Memory, Phase, Role
from ..ir.schemas import name_of
from ..runtime.arena import view_at, whole
from ..runtime.host_memory import to_host
from .pieces import Pieces

aten = torch.ops.aten


_COLLECTIVES = {Role.PARAMETER: Holds.GATHERED, Role.GRADIENT: Holds.GRADIENTS}
_CARRIES = (Trait.ALIAS, Trait.UNDECLARED_VIEW, Trait.COPIES, Trait.JOINS, Trait.PACKS, Trait.UNPACKS)


def holds(program: Program, pieces: Pieces) -> dict[fx.Node, Holds]:
    """The kind of value that each piece holds, by the node that names it."""
    found: dict[fx.Node, Holds] = {}
    for declared, node in zip(program.inputs, program.placeholders, strict=True):
        found[node] = _of_input(declared) or Holds.OTHER
    marked = _marked(program)
    for node in program.graph.nodes:
        if node in marked:
            for piece in pieces.found[node]:
                found.setdefault(piece, marked[node])
    for node in program.graph.nodes:
        computes = node.meta.get("phase") in (Phase.FORWARD, Phase.BACKWARD)
        found.setdefault(node, Holds.ACTIVATIONS if computes else Holds.OTHER)
    return found


def names(program: Program, pieces: Pieces) -> dict[fx.Node, str]:
    """The name of each piece: the user's for inputs and for what collectives serve, else op and module."""
    found = {node: declared.name for declared, node in zip(program.inputs, program.placeholders, strict=True)}
    for node in program.graph.nodes:
        served = _served(node)
        carried = [node, *operands(node)] if is_collective(node) else [node]
        for piece in {piece for each in carried for piece in pieces.found[each]} if served else ():
            found.setdefault(piece, f"{served[0]} and {len(served) - 1} more" if served[1:] else served[0])
    for node in program.graph.nodes:
        found.setdefault(node, _described(node))
    return found


def _served(node: fx.Node) -> tuple[str, ...]:
    """The parameters whose values or gradients a node has."""
    described = node.meta.get("collective")
    if isinstance(described, Collective) and described.role in _COLLECTIVES:
        return described.of
    return (node.meta["grad_of"],) if "grad_of" in node.meta else ()


def _described(node: fx.Node) -> str:
    writer = next(iter(node.users)) if node.target is view_at else node
    op = writer.meta.get("computes", writer.target)
    name = name_of(op) if writer.op == "call_function" else str(op)
    return f"{name} at {writer.meta['module']}" if writer.meta.get("module") else name


def _marked(program: Program) -> dict[fx.Node, Holds]:
    """The nodes whose role is recorded, and those that carry their elements on, or did so before."""
    inputs = zip(program.inputs, program.placeholders, strict=True)
    marked = {node: kind for declared, node in inputs if (kind := _of_input(declared)) is not None}
    marked |= {node: kind for node in program.graph.nodes if (kind := _recorded(node)) is not None}
    for value, output in zip(program.output_values(), program.outputs, strict=True):
        if isinstance(value, fx.Node) and output.role.holds is not None:
            marked.setdefault(value, output.role.holds)
    for node in reversed(program.graph.nodes):
        if node in marked and node.target is not to_host and (is_collective(node) or _carries(node)):
            for operand in operands(node) if is_collective(node) else node.all_input_nodes:
                marked.setdefault(operand, marked[node])
    for node in program.graph.nodes:
        kinds = {marked.get(operand) for operand in node.all_input_nodes if operand.target is not view_at}
        kind = kinds.pop() if len(kinds) == 1 and _carries(node) else None
        if kind is not None:
            marked.setdefault(node, kind)
    return marked


def _of_input(declared: Input) -> Holds | None:
    return declared.role.holds if declared.memory is Memory.DEVICE else Holds.OFFLOADED


def _recorded(node: fx.Node) -> Holds | None:
    if node.target is to_host:
        return Holds.OFFLOADED
    described = node.meta.get("collective")
    if isinstance(described, Collective) and described.role in _COLLECTIVES:
        return _COLLECTIVES[described.role]
    return Holds.GRADIENTS if "grad_of" in node.meta else None


def _carries(node: fx.Node) -> bool:
    """Whether the elements of the result are those of the operands, as they are or rounded."""
    op: Any = node.meta.get("computes", node.target)
    return op in (whole, aten.copy_.default) or (has(op, *_CARRIES) and not has(op, Trait.MUTABLE))
