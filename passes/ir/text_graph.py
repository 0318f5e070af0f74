"""The graph of a program, from its text: what ``print_program`` wrote, or somebody edited."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from ..errors import PassError
from .dump_text import read_statements
from .region import Island, Region


class TextGraph:
    """A graph, built line by line. ``values``: its nodes by their names in the text, inputs first; they have no meta.

    ``regions``: those that it calls, by name.

    ``groups``: the process group of each axis, by the name that it has in the text. The text is code: its imports run.
    Raises ``PassError`` with the line for what is no line of a program.
    """

    def __init__(self, text: str, groups: Mapping[str, str]) -> None:
        try:
            statements = read_statements(text, inline=False)
        except ValueError as error:
            raise PassError(f"the text is no program: {error}") from error
        self.statements = {each.name: each for each in statements if each.role != "output"}
        tree = ast.parse(text)
        self._lines, self._groups, self._scope = text.splitlines(), groups, _scope(tree)
        self.regions: dict[str, Region] = {}
        functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
        for function in sorted(functions, key=lambda each: each.name == "program"):
            self.graph, self.values = fx.Graph(), dict[str, fx.Node]()
            self._read(function)
            if function.name != "program":
                region = Island(function.name, self.graph)
                self.regions[function.name] = region if region.outs else Region(function.name, self.graph)

    def _read(self, function: ast.FunctionDef) -> None:
        for argument in function.args.args:
            self.values[argument.arg] = self.graph.create_node("placeholder", argument.arg, name=argument.arg)
        for line in function.body:
            match line:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._add(name, value)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._add(name, value)
                case ast.Return(value=ast.Tuple(elts=values)):
                    self.graph.output(tuple(map(self._value, values)))

    def _add(self, name: str, value: ast.expr) -> None:
        if name in self.values:
            raise self._error(value, f"{name} is computed twice: give the second one a name of its own")
        op, target, args, kwargs = self._call(value)
        self.values[name] = self.graph.create_node(op, target, args, kwargs, name=name)

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
            case ast.Call(func=ast.Name(id=name)) if name in self.regions:
                return "call_function", self.regions[name], *self._arguments(value)
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
            case ast.Name(id=name) if name in self._groups:
                return self._groups[name]
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
            return eval(compile(ast.Expression(value), "<program>", "eval"), self._scope)
        except Exception as error:
            raise self._error(value, f"{type(error).__name__}: {error}") from error

    def _error(self, value: ast.expr, why: str) -> PassError:
        return PassError(f"line {value.lineno}: {self._lines[value.lineno - 1].strip()}\n    {why}")


def _scope(tree: ast.Module) -> dict[str, Any]:
    """The names that the lines above the function define: imports, and short names of ops."""
    head: list[ast.stmt] = [each for each in tree.body if isinstance(each, (ast.Import, ast.ImportFrom, ast.Assign))]
    scope: dict[str, Any] = dict(vars(builtins))
    exec(compile(ast.Module(head, []), "<program>", "exec"), scope)
    return scope
