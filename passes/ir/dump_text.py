"""Read the text of a program back: its statements by name, each with what it computes and where in the step."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_PHASE = re.compile(r"^    # ---- (?P<phase>.*) ----$")
_MODULE = re.compile(r"^    # (?P<module>.*)$")
_FUNCTION = re.compile(r"^def (?P<name>\w+)\($")
_CALL = re.compile(r" = (?P<name>\w+)\(")
_RESULT = re.compile(r" = (?P<call>\w+)\[(?P<number>\d+)\]")


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


@dataclass(frozen=True)
class Assignment:
    """A line of code without the names that are known where it stands: ``pieces`` are text, name, text, name, ..."""

    name: str
    kind: str
    pieces: tuple[str, ...]

    @classmethod
    def of(cls, code: str) -> Assignment:
        """Of the text of an assignment. Raises ``ValueError`` for any other."""
        try:
            body = ast.parse(code).body
        except SyntaxError as error:
            raise ValueError(str(error)) from error
        match body:
            case [ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value)]:
                return cls(name, ast.unparse(annotation), _pieces(value))
            case [ast.Assign(targets=[ast.Name(id=name)], value=value)]:
                return cls(name, "", _pieces(value))
        raise ValueError("no assignment")

    def with_places(self, known: Container[str]) -> tuple[str, tuple[str, ...]]:
        """The expression with ``_`` for each value in it, and the values' names."""
        names = self.pieces[1::2]
        if not all(name in known for name in names):
            parts = [*self.pieces]
            parts[1::2] = ["_" if name in known else name for name in names]
            return "".join(parts), tuple(name for name in names if name in known)
        return "_".join(self.pieces[::2]), names


Functions = Mapping[str, Sequence[Statement]]  # of a text's regions, by name
Memo = dict[str, Assignment]  # by their code, what reading several stages of one program need not parse again


def read_statements(text: str, memo: Memo | None = None, inline: bool = True) -> list[Statement]:
    """The inputs, values and outputs of what ``print_program`` wrote. Raises ``ValueError`` for any other text.

    In the place of a region's call stand the statements inside, ``inline``; else the call, which computes what its
    function says, and its results.
    """
    lines, memo = text.splitlines(), {} if memo is None else memo
    starts = {found["name"]: k for k, line in enumerate(lines) if (found := _FUNCTION.match(line))}
    if "program" not in starts or "):" not in lines[starts["program"] :]:
        raise ValueError(_why_none(text))
    functions = {}
    for name, start in starts.items():
        end = lines.index("):", start)
        functions[name] = list(_Reader(lines, memo).statements(start + 1, end))
    program = functions.pop("program")
    return list(_inlined(program, functions) if inline else _with_functions(program, functions))


def _with_functions(program: list[Statement], functions: Functions) -> Iterator[Statement]:
    """The statements of a program, of which calls of functions also say what these are."""
    for each in program:
        called = functions.get(_called(each), ())
        yield replace(each, computes="\n".join([each.computes, *(inside.text for inside in called)]))


def _inlined(program: list[Statement], functions: Functions) -> Iterator[Statement]:
    """The statements of a program, with those of its functions in the place of calls."""
    results: dict[str, list[str]] = {}  # of calls, by the names that these have inside
    known_as: dict[str, str] = {}
    for each in program:
        called = functions.get(_called(each))
        reads = tuple(known_as.get(name, name) for name in each.reads)
        if called is not None:
            arguments = [inside.name for inside in called if inside.role == "input"]
            own = dict(zip(arguments, reads, strict=False))
            inside = [replace(s, reads=tuple(own.get(name, name) for name in s.reads)) for s in called]
            yield from (s for s in inside if not s.role)
            results[each.name] = [s.reads[0] for s in inside if s.role == "output"]
        elif (found := _RESULT.search(each.text)) and found["call"] in results:
            known_as[each.name] = results[found["call"]][int(found["number"])]
        else:
            yield replace(each, reads=reads)


def _called(statement: Statement) -> str:
    """The name of the function that a statement calls, if it may call one of the text."""
    found = None if statement.role else _CALL.search(statement.text)
    return found["name"] if found else ""


def _why_none(text: str) -> str:
    """Why a text is no printed program."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"it is no Python text: {error}"
    return "it has no function called program"


@dataclass
class _Reader:
    """Reads line by line: phase and module are those of the last headings."""

    lines: list[str]
    memo: Memo
    known: set[str] = field(default_factory=set)

    def statements(self, start: int, end: int) -> Iterator[Statement]:
        """The inputs stand in front of ``end``, all else below it."""
        for line in self.lines[start:end]:
            if line == "    *,":
                break
            yield self._input(line.strip())
        phase = module = ""
        for k, line in enumerate(self.lines[end + 1 :], start=end + 1):
            if found := _PHASE.match(line):
                phase = found["phase"]
            elif found := _MODULE.match(line):
                module = found["module"]
            elif line.startswith("    return ("):
                yield from self._outputs(k)
                return
            elif line:
                yield self._value(k, phase, module)
        raise ValueError("it has no return")

    def _input(self, text: str) -> Statement:
        name = re.split("[:,]", text, maxsplit=1)[0]
        self.known.add(name)
        return Statement(name, text, text.partition(":")[2], role="input")

    def _value(self, line: int, phase: str, module: str) -> Statement:
        text = self.lines[line].strip()
        each = self._assignment(text, line)
        expression, reads = each.with_places(self.known)
        self.known.add(each.name)
        return Statement(each.name, text, f"{each.kind} {expression}", reads, "", phase, module)

    def _assignment(self, code: str, line: int) -> Assignment:
        if code not in self.memo:
            try:
                self.memo[code] = Assignment.of(code)
            except ValueError:
                text = self.lines[line]
                raise ValueError(f"line {line + 1} is no statement of a printed program: {text}") from None
        return self.memo[code]

    def _outputs(self, start: int) -> Iterator[Statement]:
        """An output goes by what it is for the user: "update of model.weight: ...", not by the value returned."""
        if self.lines[start] == "    return ()":
            return
        for k, line in enumerate(self.lines[start + 1 : self.lines.index("    )", start)]):
            value, _, what = line.strip().partition("  # ")
            assigned = self._assignment(f"_ = {value.removesuffix(',')}", start + 1 + k)
            expression, reads = assigned.with_places(self.known)
            name, computes = what.partition(":")[0] or f"output {k}", f"{what} {expression}"
            yield Statement(name, line.strip(), computes, reads, role="output")


def _pieces(value: ast.expr) -> tuple[str, ...]:
    """The text of an expression, cut at each name."""

    class Cuts(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            return ast.Name(f"\0{node.id}\0")

    return tuple(ast.unparse(Cuts().visit(value)).split("\0"))
