"""``docs/legality.md`` has the sentences of the checkers, in their order, and the default passes as they are declared.

The sentences are read from the source: each ``raise`` that a checker reaches, in the order of its calls, with … for
what an f-string puts in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from passes import Pass, default
from tests.harness.parsed import nodes, parsed

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "legality.md").read_text()
HOLE = "…"
# The heading of each checker's sentences, its file, the function that they begin with, and a raise that is passed on.
CHECKERS = {
    "A program": ("passes/ir/check.py", "check", ()),
    "Programs that work together": ("passes/ir/check_bundle.py", "check_bundle", ()),
    "Operations on a GPU": ("passes/schedule/happens_before.py", "check_streams", ("… is none of the operations",)),
    "A pipeline": ("passes/runner.py", "run", ()),
}
LETTERS = "GMNFVCRP"


@dataclass
class Sentences:
    """What a function of a file raises, with all that it calls there, each function once."""

    functions: dict[str, ast.FunctionDef]
    found: list[str] = field(default_factory=list)
    visited: set[str] = field(default_factory=set)

    def read(self, name: str) -> None:
        if name in self.functions and name not in self.visited:
            self.visited.add(name)
            for statement in self.functions[name].body:
                self._visit(statement)

    def _visit(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self._visit(child)
        match node:
            case ast.Raise(exc=ast.Call(args=[message, *_])):
                self.found.append(self._text(message))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                self.read(name)

    def _text(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=value):
                return str(value)
            case ast.JoinedStr(values=values):
                return "".join(map(self._text, values))
            case ast.BinOp(left=left, right=right):
                return self._text(left) + self._text(right)
            case ast.Call(func=ast.Attribute(attr=name)) if name in self.functions:  # a method that makes the sentence
                returned = [each.value for each in ast.walk(self.functions[name]) if isinstance(each, ast.Return)]
                assert returned[0] is not None
                return self._text(returned[0])
            case _:
                return HOLE


def section(heading: str) -> str:
    """The text below a heading of the page."""
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the tables in a text, without headings."""
    for line in text.splitlines():
        if line.startswith("| ") and not re.match(r"\| (---|must hold|pass )", line):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("heading", CHECKERS)
def test_the_page_has_what_a_checker_says_in_its_order(heading: str) -> None:
    path, name, others = CHECKERS[heading]
    functions = {node.name: node for node in nodes(ROOT / path) if isinstance(node, ast.FunctionDef)}
    sentences = Sentences(functions)
    sentences.read(name)
    raised = [each for each in sentences.found if each != HOLE and each not in others]
    shown = [cells[1].strip("`") for cells in rows(section(heading))]
    assert raised == shown
    assert all(cells[0].endswith(".") for cells in rows(section(heading)))


@pytest.mark.parametrize("heading", CHECKERS)
def test_every_sentence_of_a_checker_is_read(heading: str) -> None:
    """None is raised where the walk through the calls does not come."""
    path, name, _ = CHECKERS[heading]
    sentences = Sentences({node.name: node for node in nodes(ROOT / path) if isinstance(node, ast.FunctionDef)})
    sentences.read(name)
    raising = [node for node in ast.walk(parsed(ROOT / path)) if isinstance(node, ast.Raise)]
    assert len(sentences.found) == len([node for node in raising if isinstance(node.exc, ast.Call)])


def test_the_table_has_the_default_passes_in_their_order() -> None:
    table = [*rows(section("The default passes"))]
    assert [cells[0] for cells in table] == [f"`{type(each).__name__}`" for each in default()]
    for each, (_, assumes, leaves, mind, order, numerics) in zip(default(), table, strict=True):
        assert numerics == each.numerics and order == declared_order(each), each
        needs = assumes.partition("needs ")[2]
        assert classes_in(assumes) == {other.__name__ for other in (*each.after, *each.needs)}, each
        assert {other.__name__ for other in each.needs} == classes_in(needs), each
        assert re.findall(r"knows ([a-z ]+)", assumes) == [fact.value for fact in each.facts], each
        assert leaves and (mind.startswith("nothing") or set(re.findall(r"\b[A-Z]\b", mind)) <= {*LETTERS}), each
        assert mind.startswith("nothing") or re.match(r"[A-Z]\b", mind), each


def classes_in(text: str) -> set[str]:
    """The names of passes in a cell."""
    return set(re.findall(r"`([A-Z]\w+)`", text))


def declared_order(each: Pass) -> str:
    words = [word for word, is_so in (("last", each.last), ("keeps", each.keeps_order)) if is_so]
    return ", ".join(words) or "free"


def test_each_letter_has_its_part_of_the_checker() -> None:
    assert re.findall(r"^\*\*[\w ,-]+ \(([A-Z])\)\.\*\*", section("A program"), re.MULTILINE) == [*LETTERS]
