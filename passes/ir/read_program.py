"""Read a program from its text, which somebody may have edited.

What the text cannot say (fake values, phases, what a collective is for) comes from the program that the same step
compiles to now: a line that is unchanged stands for the same node. The values of all other lines, and of those that
read them, are inferred anew.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
from collections.abc import Mapping
from typing import Any

from torch import fx

from ..errors import PassError
from .check import check
from .dump_text import Statement, read_statements
from .infer_shapes import fill_vals
from .printer import axis_names, print_program
from .program import Program
from .roles import Phase

_MESH = re.compile(r"^# mesh: (.*)$", re.MULTILINE)


def read_program(text: str, like: Program) -> tuple[Program, int]:
    """The program that ``text`` is, and how many of its lines are not those of ``like``.

    ``text``: what ``print_program`` wrote of a program such as ``like``, edited. It is code: its imports run. Raises
    ``PassError`` with the line where it is no such text, where inputs, results or mesh are others than those of
    ``like``, and where the graph is not well formed; ``like`` is not changed.
    """
    own = print_program(like)
    try:
        given, expected = read_statements(text), read_statements(own)
    except ValueError as error:
        raise PassError(f"the text is no program: {error}") from error
    _fits(text, given, own, expected)
    nodes = [*like.placeholders, *(node for node in like.graph.nodes if node.op not in ("placeholder", "output"))]
    values = [each for each in expected if each.role != "output"]
    known = {each.name: (each, node) for each, node in zip(values, nodes, strict=True)}
    reader = _Reader(text, like, known)
    program, count = reader.read(), reader.edited
    fill_vals(program)
    check(program, like)
    return program, count


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


class _Reader:
    """Builds a graph, line by line. ``edited``: how many lines are not those of ``like``."""

    def __init__(self, text: str, like: Program, known: Mapping[str, tuple[Statement, fx.Node]]) -> None:
        self.lines, self.like, self.known = text.splitlines(), like, known
        self.statements = {each.name: each for each in read_statements(text)}
        tree = ast.parse(text)
        self.scope = _scope(tree)
        self.function = next(each for each in tree.body if isinstance(each, ast.FunctionDef))
        self.groups = {name: group for group, name in axis_names(like.mesh).items()}
        self.graph, self.values = fx.Graph(), dict[str, fx.Node]()
        self.changed: set[fx.Node] = set()
        self.edited = 0

    def read(self) -> Program:
        """The program, without the vals of lines that are not those of ``like``."""
        for argument in self.function.args.args:
            node = self.graph.node_copy(self.known[argument.arg][1])
            self.values[argument.arg] = node
        outputs: list[Any] = []
        for line in self.function.body:
            match line:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._add(name, value)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._add(name, value)
                case ast.Return(value=ast.Tuple(elts=values)):
                    outputs = [self._value(each) for each in values]
        self.graph.output(tuple(outputs))
        program = self.like.with_graph(self.graph, self.like.inputs, self.like.outputs)
        program.note_collectives()
        return program

    def _add(self, name: str, value: ast.expr) -> None:
        if name in self.values:
            raise self._error(value, f"{name} is computed twice: give the second one a name of its own")
        op, target, args, kwargs = self._call(value)
        before, old = self.known.get(name, (None, None))
        node = self.graph.create_node(op, target, args, kwargs, name=old.name if old else name)
        self.values[name] = node
        given = self.statements[name]
        is_known = before is not None and (before.computes, before.reads) == (given.computes, given.reads)
        self.edited += not is_known
        if is_known and old is not None and not any(each in self.changed for each in node.all_input_nodes):
            node.meta = dict(old.meta)
            return
        self.changed.add(node)
        if old is not None and old.target == target:
            node.meta = {key: value for key, value in old.meta.items() if key != "val"}
        else:
            node.meta = self._headings(given)

    def _headings(self, given: Statement) -> dict[str, Any]:
        """What the headings say of a new line."""
        found: dict[str, Any] = {"phase": Phase(given.phase)} if given.phase in list(Phase) else {}
        return found | ({"module": given.module} if given.module else {})

    def _call(self, value: ast.expr) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
        """Kind, target and arguments of a node."""
        match value:
            case ast.Subscript(value=ast.Name(id=name), slice=key) if name in self.values:
                return "call_function", operator.getitem, (self.values[name], self._value(key)), {}
            case ast.Call(func=ast.Call(func=ast.Attribute(attr="attrgetter"), args=[path])):
                return "get_attr", self._constant(path), (), {}
            case ast.Call(func=ast.Call(func=ast.Attribute(value=ast.Name(id="module")), args=[path])):
                return "call_module", self._constant(path), *self._arguments(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if name in self.values:
                args, kwargs = self._arguments(value)
                return "call_method", method, (self.values[name], *args), kwargs
            case ast.Call():
                return "call_function", self._constant(value.func), *self._arguments(value)
            case ast.Attribute() if ast.unparse(value).startswith("module."):
                return "get_attr", ast.unparse(value).removeprefix("module."), (), {}
        raise self._error(value, "a line of a program calls one op, or takes one element: name = op(...)")

    def _arguments(self, call: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            raise self._error(call, "write out the arguments instead of * and **")
        kwargs = {str(each.arg): self._value(each.value) for each in call.keywords}
        return tuple(map(self._value, call.args)), kwargs

    def _value(self, value: ast.expr) -> Any:
        """An argument: a value of the program, a literal, or several of these."""
        match value:
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Name(id=name) if name in self.groups:
                return self.groups[name]
            case ast.List(elts=values):
                return list(map(self._value, values))
            case ast.Tuple(elts=values):
                return tuple(map(self._value, values))
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {self._constant(key): self._value(each) for key, each in pairs if key is not None}
            case ast.Call(func=ast.Name(id="slice"), args=values):
                return slice(*map(self._value, values))
        return self._constant(value)

    def _constant(self, value: ast.expr) -> Any:
        """A literal, an op, or another name of the imports."""
        inside = [each.id for each in ast.walk(value) if isinstance(each, ast.Name)]
        if computed := [name for name in inside if name in self.values]:
            raise self._error(value, f"{computed[0]} is read inside of an expression: give that a line of its own")
        try:
            return eval(compile(ast.Expression(value), "<program>", "eval"), self.scope)
        except Exception as error:
            raise self._error(value, f"{type(error).__name__}: {error}") from error

    def _error(self, value: ast.expr, why: str) -> PassError:
        return PassError(f"line {value.lineno}: {self.lines[value.lineno - 1].strip()}\n    {why}")


def _scope(tree: ast.Module) -> dict[str, Any]:
    """What the lines above the function define: imports, and short names of ops."""
    head: list[ast.stmt] = [each for each in tree.body if isinstance(each, (ast.Import, ast.ImportFrom, ast.Assign))]
    scope: dict[str, Any] = dict(vars(builtins))
    exec(compile(ast.Module(head, []), "<program>", "exec"), scope)
    return scope
