"""Parameters that the first run of a call gathers, and hands on to the others, which keep them whole."""

from __future__ import annotations

import operator

from torch import fx

from ..analysis.aliases import is_view
from ..analysis.strides import Layouts
from ..ir.collectives import Kind, is_collective, is_wait, kind_of
from ..ir.ops import Trait, has
from ..ir.program import Input, Program
from ..ir.roles import Role
from .keep_over_runs import Known, keys_of

_MOVES = (Trait.VIEW, Trait.COPIES, Trait.PACKS, Trait.UNPACKS, Trait.JOINS)


def gathers(program: Program) -> list[fx.Node]:
    """The collectives that runs of a call may leave to the first one: they gather parameters as the call finds them."""
    _, gathered = _from_parameters(program, {})
    return [node for node in program.collectives() if node in gathered]


def gathered_for_all(program: Program, known: Known) -> dict[int, list[fx.Node]]:
    """The gathered parameters that are read, by a key that is the same for equal ones in all programs.

    They are as they are last copied: a view of one is none. What leaves the program is none, either. What is not
    contiguous, or follows from more than parameters, is gathered in each run.
    """
    keys, gathered = _from_parameters(program, known)
    end = program.output_node
    bases = {_base(node) for node in gathered if any(user not in keys for user in node.users)}
    bases -= {_base(node) for node in gathered if end in node.users}
    layouts, found = Layouts(program.graph), dict[int, list[fx.Node]]()
    for node in sorted(each for each in bases & gathered if layouts.is_contiguous(each)):
        found.setdefault(keys[node], []).append(node)
    return found


def _from_parameters(program: Program, known: Known) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """The keys of nodes that gather, move and cast parameters, no more; those of them that follow from gathers."""
    keys, gathered = keys_of(program, known, _is_of_parameters, _is_moved), set[fx.Node]()
    for node in keys:
        if _starts(node) or not gathered.isdisjoint(node.all_input_nodes):
            gathered.add(node)
    return keys, gathered


def _is_of_parameters(declared: Input) -> bool:
    return {part.input.role for part in declared.parts} | {declared.role} <= {Role.PARAMETER}


def _is_moved(node: fx.Node) -> bool:
    return bool(node.all_input_nodes) and (_starts(node) or is_wait(node) or has(node.target, *_MOVES))


def _starts(node: fx.Node) -> bool:
    return is_collective(node) and kind_of(node) is Kind.ALL_GATHER


def _base(node: fx.Node) -> fx.Node:
    """The value that a gathered one is a view of."""
    while not is_wait(node):
        (source, *_) = node.all_input_nodes
        if not is_view(source if node.target is operator.getitem else node):
            break
        node = source
    return node
