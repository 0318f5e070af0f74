"""Read a program from its text, which somebody may have edited.

What the text cannot say (fake values, phases, what a collective is for) comes from the program that the same step
compiles to now: a line that is unchanged stands for the same node. The values of all other lines, and of those that
read them, are inferred anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx

from ..errors import PassError
from .check import check
from .dump_text import Statement, read_statements
from .infer_shapes import fill_vals
from .meta import Relation, carried
from .printer import axis_names, print_program
from .program import Program
from .region import Region, regions
from .roles import Phase
from .text_graph import TextGraph

_MESH = re.compile(r"^# mesh: (.*)$", re.MULTILINE)


def read_program(text: str, like: Program) -> tuple[Program, int]:
    """The program that ``text`` is, and how many of its lines are not those of ``like``.

    ``text``: what ``print_program`` wrote of a program such as ``like``, edited. It is code: its imports run. Raises
    ``PassError`` with the line where it is no such text, where inputs, results or mesh are others than those of
    ``like``, and where the graph is not well formed; ``like`` is not changed.
    """
    own = print_program(like)
    expected = read_statements(own, inline=False)
    found = TextGraph(text, {name: group for group, name in axis_names(like.mesh).items()})
    _fits(text, read_statements(text, inline=False), own, expected)
    nodes = [*like.placeholders, *(node for node in like.graph.nodes if node.op not in ("placeholder", "output"))]
    values = [each for each in expected if each.role != "output"]
    known = {each.name: (each, node) for each, node in zip(values, nodes, strict=True)}
    count = _take_meta(found, known)
    program = like.with_graph(found.graph, like.inputs, like.outputs)
    program.note_collectives()
    fill_vals(program)
    for node, region in regions(program.graph).items():
        if region in found.regions.values():
            _fill_inside(region, list(node.args))
    check(program, like)
    return program, count


def _take_meta(found: TextGraph, known: Mapping[str, tuple[Statement, fx.Node]]) -> int:
    """Give nodes the meta of those that they stand for; returns how many lines are not known.

    A line that is not known, or reads one, has no val.
    """
    count, changed = 0, set[fx.Node]()
    for name, node in found.values.items():
        given = found.statements[name]
        before, old = known.get(name, (None, None))
        is_known = before is not None and (before.computes, before.reads) == (given.computes, given.reads)
        count += not is_known
        if old is not None and isinstance(node.target, Region) and isinstance(old.target, Region):
            if is_known:
                node.target = old.target
            else:
                _take_meta_inside(node.target, old.target)
        if old is None:
            node.meta = _headings(given)
        else:  # another op under a name is to compute what the one before did
            node.meta = dict(old.meta) if old.target == node.target else carried(old, Relation.REPLACEMENT)
        if not is_known or any(each in changed for each in node.all_input_nodes):
            changed.add(node)
            node.meta.pop("val", None)
    return count


def _take_meta_inside(region: Region, old: Region) -> None:
    """Give the nodes of an edited region the meta of those that they stand for, but for vals."""
    known = {node.name: node for node in old.nodes}
    for node in region.nodes:
        if node.name in known:
            node.meta = carried(known[node.name], Relation.REPLACEMENT)


def _fill_inside(region: Region, operands: list[Any]) -> None:
    """Infer the vals in a region that was read."""
    for node, operand in zip(region.placeholders, operands, strict=True):
        node.meta["val"] = operand.meta["val"]
    fill_vals(Program.from_graph(region.module))


def _headings(given: Statement) -> dict[str, Any]:
    """The meta that the headings give a new line."""
    found: dict[str, Any] = {"phase": Phase(given.phase)} if given.phase in list(Phase) else {}
    return found | ({"module": given.module} if given.module else {})


def _fits(text: str, given: list[Statement], own: str, expected: list[Statement]) -> None:
    """Raise ``PassError`` if mesh, inputs or outputs differ; of outputs, what they are, not how they are computed."""
    meshes = [found[1] if (found := _MESH.search(each)) else "none" for each in (text, own)]
    if meshes[0] != meshes[1]:
        raise PassError(f"the text is a program for the mesh {meshes[0]}, and this call's mesh is {meshes[1]}")
    for role in ("input", "output"):
        here, there = (
            [each.text if role == "input" else each.name for each in statements if each.role == role]
            for statements in (given, expected)
        )
        if here != there:
            lost = [f"    expected: {each}" for each in there if each not in here]
            new = [f"    got:      {each}" for each in here if each not in there]
            lines = [*lost[:5], *new[:5]] or ["    the same in another order"]
            raise PassError("\n".join([f"the {role}s of the text are not those of this call:", *lines]))
