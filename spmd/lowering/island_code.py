"""The C++ of an island: Inductor writes its loops, and one function of ours calls them on a table of addresses.

Inductor returns a Python module that allocates temporaries, launches kernels on them, and returns. We take the kernels,
and write these launches in C++: ``extern "C" int island_3(void** at)``, where ``at`` has the addresses of operands, of
memory for results, and of temporaries. So a call of an island costs one call of a C function. What does anything
else, such as to call an op of aten, cannot be taken.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from passes import Island
from passes.memory.offsets import aligned
from passes.runtime.arena import extent

from .._torch import FakeTensorMode, ShapeEnv, inductor_code, inductor_graph

_SKIPPED = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment")


class NoKernelError(Exception):
    """An island that Inductor cannot make of kernels alone."""


@dataclass(frozen=True)
class IslandCode:
    """``text``: C++ that defines the function ``name``. The last ``outs`` operands are memory for results.

    ``temporaries``: the bytes of each, whose addresses stand behind those of all operands.
    """

    name: str
    text: str
    kernels: int
    outs: int
    temporaries: tuple[int, ...] = ()


def island_code(island: Island, name: str) -> IslandCode:
    """The code of an island that writes into given memory. Raises ``NoKernelError`` where there is none."""
    text, operands = inductor_text(island)
    return _Module(text, operands).code(name, len(island.outs))


def inductor_text(island: Island) -> tuple[str, list[str]]:
    """What Inductor writes for an island, and the names of its operands there. Raises ``NoKernelError``."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    vals = [node.meta["val"] for node in island.placeholders]
    with mode, torch.no_grad():
        examples = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in vals]
        try:
            graph = inductor_graph(island.module, examples)
            text = inductor_code(graph, examples, mode)
        except Exception as error:  # Inductor's own, of many kinds
            raise NoKernelError(f"{type(error).__name__}: {error}") from error
    return text, [node.name for node in graph.graph.find_nodes(op="placeholder")]


class _Module:
    """The Python module that Inductor wrote, read line by line."""

    def __init__(self, text: str, operands: Sequence[str]) -> None:
        self.tree = ast.parse(text)
        self.kernels: dict[str, tuple[list[str], str]] = {}  # by name: the types of the arguments, and the source
        self.places = {name: (f"at[{k}]", 0) for k, name in enumerate(operands)}  # address, and elements behind it
        self._count, self.temporaries, self.calls = len(operands), list[int](), list[str]()

    def code(self, name: str, outs: int) -> IslandCode:
        """The function called ``name``, and its kernels."""
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=kernel)], value=ast.Call(func=called, args=[types, source])):
                    if ast.unparse(called) == "async_compile.cpp_pybinding":
                        self.kernels[kernel] = ast.literal_eval(types), ast.literal_eval(source)
        functions = [each for each in ast.walk(self.tree) if isinstance(each, ast.FunctionDef)]
        self._read(next(each for each in functions if each.name == "call"))
        sources = [_named(source, f"{name}_{kernel}") for kernel, (_, source) in self.kernels.items()]
        calls = [f"        {name}_{call}" for call in self.calls]
        function = [f'extern "C" int {name}(void** at) {{', "    try {", *calls, "        return 0;"]
        function += ["    } catch (...) {", "        return 1;", "    }", "}", ""]
        return IslandCode(name, "\n".join([*sources, *function]), len(self.calls), outs, tuple(self.temporaries))

    def _read(self, function: ast.FunctionDef) -> None:
        for line in function.body:
            match line:
                case ast.Delete() | ast.Return() | ast.Assign(value=ast.Name(id="args")):
                    pass
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="clear"))):
                    pass
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.places[name] = self._place(value)
                case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args)) if name in self.kernels:
                    types = self.kernels[name][0]
                    pairs = [(kind, *self._place(arg)) for kind, arg in zip(types, args, strict=True)]
                    values = [f"({kind}){address} + {offset}" for kind, address, offset in pairs]
                    self.calls.append(f"{name}({', '.join(values)});")
                case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in _SKIPPED:
                    pass
                case _:
                    raise NoKernelError(f"Inductor leaves it to Python: {ast.unparse(line)}")

    def _place(self, value: ast.expr) -> tuple[str, int]:
        match value:
            case ast.Name(id=name) if name in self.places:
                return self.places[name]
            case ast.Call(func=ast.Name(id="empty_strided_cpu"), args=[shape, stride, dtype]):
                return self._temporary(ast.literal_eval(shape), ast.literal_eval(stride), ast.unparse(dtype)), 0
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[source, _, _, ast.Constant(value=int(offset))]):
                address, before = self._place(source)
                return address, before + offset
        raise NoKernelError(f"Inductor passes to a kernel: {ast.unparse(value)}")

    def _temporary(self, shape: Sequence[int], stride: Sequence[int], dtype: str) -> str:
        size: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
        self.temporaries.append(aligned(max(1, extent(shape, stride)) * size.itemsize))
        return f"at[{self._count + len(self.temporaries) - 1}]"


def _named(source: str, name: str) -> str:
    """The source of a kernel, under a name of its own, and without the header that all of them need."""
    lines = [line for line in source.strip().splitlines() if not line.startswith("#include")]
    return re.sub(r"\bkernel\(", f"{name}(", "\n".join(lines), count=1)
