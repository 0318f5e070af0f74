"""Keep parameters whole over the runs of a call: the first run gathers them, and hands them on to the others."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from ..analysis.aliases import is_view
from ..analysis.strides import Layouts
from ..cleanup.dead_code import DeadCode
from ..ir.collectives import Kind, is_collective, is_wait, kind_of
from ..ir.edit import add_input, insert_before
from ..ir.meta import Relation
from ..ir.ops import Trait, has
from ..ir.program import Input, Output, OutputKind, Program
from ..ir.roles import Role

aten = torch.ops.aten
_MOVES = (Trait.VIEW, Trait.COPIES, Trait.PACKS, Trait.UNPACKS, Trait.JOINS)


def gathers(program: Program) -> list[fx.Node]:
    """The collectives that runs of a call may leave to the first one: they gather parameters as the call finds them."""
    _, gathered = _from_parameters(program, {})
    return [node for node in program.collectives() if node in gathered]


def gather_once(program: Program) -> None:
    """Give the first run of a split program a program of its own, the only one that gathers parameters.

    It copies each whole parameter, as the others read it, into memory that is an input of all. What is not contiguous,
    or follows from more than parameters, is gathered in each run as before.
    """
    micro = program.micro_batches
    assert micro is not None and micro.accumulating is not None, "a program that is split into runs"
    others, known = [micro.accumulating, program], dict[str, int]()
    opening = replace(micro.accumulating.copy(), name=f"{program.name}-gathering")
    by_key = _whole(opening, known)
    found = [_whole(each, known) for each in others]
    for number, (key, nodes) in enumerate(by_key.items()):
        val = nodes[0].meta["val"]
        declared = Input(Role.GATHERED, f"gathered.{number}", tuple(val.shape), val.dtype)
        _keep(opening, declared, nodes)
        for each, values in zip(others, found, strict=True):
            held = add_input(each, declared, val)
            for node in values.get(key, ()):
                node.replace_all_uses_with(held)
    for each in [opening, *others] if by_key else ():
        DeadCode().rewrite(each)
    if by_key:
        program.micro_batches = replace(micro, opening=opening)


def _keep(program: Program, declared: Input, nodes: Sequence[fx.Node]) -> None:
    """Let the readers of these nodes, which have one value, read it where it stays."""
    first, *others = nodes
    held = add_input(program, declared, first.meta["val"])
    kept = insert_before(
        first.next, aten.copy.default, held, first, like=first, relation=Relation.SHARE, val=first.meta["val"]
    )
    first.replace_all_uses_with(kept, lambda user: user is not kept)
    for node in others:
        node.replace_all_uses_with(kept)
    output = Output(OutputKind.UPDATE, declared.name, Role.GATHERED, declared.shape, declared.dtype)
    program.set_outputs([*program.output_values(), kept], [*program.outputs, output])


def _whole(program: Program, known: dict[str, int]) -> dict[int, list[fx.Node]]:
    """The gathered values that are read, by a key that is the same for equal ones in all programs that share ``known``.

    They are as they are last copied: a view of one is none. What leaves the program is none, either.
    """
    keys, gathered = _from_parameters(program, known)
    end = program.output_node
    bases = {_base(node) for node in gathered if any(user not in keys for user in node.users)}
    bases -= {_base(node) for node in gathered if end in node.users}
    layouts, found = Layouts(program.graph), dict[int, list[fx.Node]]()
    for node in sorted(each for each in bases & gathered if layouts.is_contiguous(each)):
        found.setdefault(keys[node], []).append(node)
    return found


def _from_parameters(program: Program, known: dict[str, int]) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """The keys of nodes that gather, move and cast parameters, no more; those of them that follow from gathers."""
    keys: dict[fx.Node, int] = {}
    gathered = set[fx.Node]()
    for declared, node in zip(program.inputs, program.placeholders, strict=True):
        if {part.input.role for part in declared.parts} | {declared.role} <= {Role.PARAMETER}:
            keys[node] = known.setdefault(f"input {declared.name}", len(known))
    for node in program.graph.nodes:
        starts = is_collective(node) and kind_of(node) is Kind.ALL_GATHER
        moves = starts or is_wait(node) or (node.op == "call_function" and has(node.target, *_MOVES))
        if moves and node.all_input_nodes and keys.keys() >= {*node.all_input_nodes}:
            args = fx.map_arg((node.args, dict(node.kwargs)), lambda each: f"%{keys[each]}")
            keys[node] = known.setdefault(f"{node.target} {args}", len(known))
            if starts or not gathered.isdisjoint(node.all_input_nodes):
                gathered.add(node)
    return keys, gathered


def _base(node: fx.Node) -> fx.Node:
    """The value that a gathered one is a view of."""
    while not is_wait(node):
        (source, *_) = node.all_input_nodes
        if not is_view(source if node.target is operator.getitem else node):
            break
        node = source
    return node
