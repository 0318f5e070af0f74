"""Read the text of a program back: its statements by name, each with what it computes and where in the step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_PHASE = re.compile(r"^    # ---- (?P<phase>.*) ----$")
_MODULE = re.compile(r"^    # (?P<module>.*)$")


@dataclass(frozen=True)
class Statement:
    """One value of a program. ``name``: its own; ``text``: the whole line, as it is printed.

    ``computes``: type and expression, with a place for each of ``reads``, the values that it is computed from.
    ``role``: "input", "output" or "" for a computed one; ``phase`` and ``module``: the headings that it stands below.
    """

    name: str
    text: str
    computes: str
    reads: tuple[str, ...] = ()
    role: str = ""
    phase: str = ""
    module: str = ""

    @property
    def where(self) -> str:
        """Phase and module, in one line."""
        return ", ".join(part for part in (self.phase, self.module) if part)


@dataclass
class _Headings:
    """The phase and the module that hold from a line on."""

    lines: list[str]
    phase: str = ""
    module: str = ""
    done: int = field(default=0)

    def at(self, line: int) -> tuple[str, str]:
        """Those of the statement in this line; to be asked in order."""
        for text in self.lines[self.done : line - 1]:
            if found := _PHASE.match(text):
                self.phase = found["phase"]
            elif found := _MODULE.match(text):
                self.module = found["module"]
        self.done = line
        return self.phase, self.module


def read_statements(text: str) -> list[Statement]:
    """The inputs, values and outputs of what ``print_program`` wrote. Raises ``ValueError`` for any other text."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"it is no Python text: {error}") from error
    function = next((each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "program"), None)
    if function is None:
        raise ValueError("it has no function called program")
    return list(_statements(function, text.splitlines()))


def _statements(function: ast.FunctionDef, lines: list[str]) -> Iterator[Statement]:
    for argument in function.args.args:
        text = lines[argument.lineno - 1].strip()
        yield Statement(argument.arg, text, text.partition(":")[2], role="input")
    known = {argument.arg for argument in function.args.args}
    headings = _Headings(lines)
    for each in function.body:
        phase, module = headings.at(each.lineno)
        match each:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
                kind = ast.unparse(annotation)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                kind = ""
            case ast.Return(value=ast.Tuple(elts=values)):
                yield from _outputs(values, known, lines)
                continue
            case _:
                raise ValueError(f"line {each.lineno} is no statement of a printed program: {lines[each.lineno - 1]}")
        expression, reads = _with_places(value, known)
        known.add(name)
        yield Statement(name, lines[each.lineno - 1].strip(), f"{kind} {expression}", reads, "", phase, module)


def _outputs(values: list[ast.expr], known: set[str], lines: list[str]) -> Iterator[Statement]:
    """An output goes by what it is for the user: "update of model.weight: ...", not by the value that is returned."""
    for k, value in enumerate(values):
        text = lines[value.lineno - 1].strip()
        what = text.partition("  # ")[2]
        expression, reads = _with_places(value, known)
        yield Statement(what.partition(":")[0] or f"output {k}", text, f"{what} {expression}", reads, role="output")


def _with_places(value: ast.expr, known: set[str]) -> tuple[str, tuple[str, ...]]:
    """An expression with ``_`` for each value in it, and the values' names."""
    reads: list[str] = []

    class Places(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            if node.id not in known:
                return node
            reads.append(node.id)
            return ast.Name("_")

    return ast.unparse(Places().visit(value)), tuple(reads)
