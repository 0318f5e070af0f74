"""Communicate once in a call that runs several times: the first run keeps a value, and the others read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from ..cleanup.dead_code import DeadCode
from ..ir.edit import add_input, insert_before
from ..ir.meta import Relation
from ..ir.program import Input, Output, OutputKind, Program
from ..ir.roles import Role

aten = torch.ops.aten

Known = dict[str, int]  # the keys of values, the same for equal values of several programs
Find = Callable[[Program, Known], dict[int, list[fx.Node]]]


def keep_over_runs(first: Program, others: Sequence[Program], role: Role, name: str, find: Find) -> bool:
    """Let the first run of a call compute values for all runs, whose programs are these; whether there are any.

    ``find``: the nodes that have such a value, by key. The first run copies each value into memory that is an input of
    all, of this ``role`` and ``name``, with a number.
    """
    known = Known()
    by_key, found = find(first, known), [find(each, known) for each in others]
    for number, (key, nodes) in enumerate(by_key.items()):
        val = nodes[0].meta["val"]
        declared = Input(role, f"{name}.{number}", tuple(val.shape), val.dtype)
        _keep(first, declared, nodes)
        for each, values in zip(others, found, strict=True):
            held = add_input(each, declared, val)
            for node in values.get(key, ()):
                node.replace_all_uses_with(held)
    for each in [first, *others] if by_key else ():
        DeadCode().rewrite(each)
    return bool(by_key)


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
    output = Output(OutputKind.UPDATE, declared.name, declared.role, declared.shape, declared.dtype)
    program.set_outputs([*program.output_values(), kept], [*program.outputs, output])


def keys_of(
    program: Program, known: Known, takes: Callable[[Input], bool], follows: Callable[[fx.Node], bool]
) -> dict[fx.Node, int]:
    """The keys of the inputs that ``takes`` names, and of all ``follows`` names that are computed from these alone."""
    keys: dict[fx.Node, int] = {}
    for declared, node in zip(program.inputs, program.placeholders, strict=True):
        if takes(declared):
            keys[node] = known.setdefault(f"input {declared.name}", len(known))
    for node in program.graph.nodes:
        if node.op == "call_function" and keys.keys() >= {*node.all_input_nodes} and follows(node):
            args = fx.map_arg((node.args, dict(node.kwargs)), lambda each: f"%{keys[each]}")
            keys[node] = known.setdefault(f"{node.target} {args}", len(known))
    return keys
