"""Print a program as readable Python text that also runs.

The text has a function ``program``: an argument per input, annotated with dtype and shape on this rank; a keyword
argument per mesh axis, which carries the axis' process group name, so that collectives read
``c10d.all_reduce.default(grad, 'sum', dp)``. Above it stands a function for each region that it calls.
"""

from __future__ import annotations

import keyword
import math
import operator
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from .._torch import HigherOrderOperator, OpOverload
from ..runtime import answers, collective_ops, ctc_loss, host_memory, master_copies, places_in_rows, rooms
from .collectives import Collective
from .program import Input, Mesh, Output, OutputKind, Placements, Program
from .region import Region, every_node, regions
from .roles import Memory
from .schemas import position_of, schema

_LEGEND = """Each line reads: name: "dtype[shape on this rank]" = operation  # the user's line, where it changes.
Call it with a value per input and, for each axis of the mesh, the name of its process group."""

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_OPS_ALIASES = {"_c10d_functional": "c10d", collective_ops.NAMESPACE: "transport", host_memory.NAMESPACE: "memory"}
_DEFINED_IN = {  # the modules that define ops of ours
    answers.NAMESPACE: "passes.runtime.answers",
    collective_ops.NAMESPACE: "passes.runtime.message_collectives",
    ctc_loss.NAMESPACE: "passes.runtime.ctc_loss",
    host_memory.NAMESPACE: "passes.runtime.host_memory",
    master_copies.NAMESPACE: "passes.runtime.master_copies",
    places_in_rows.NAMESPACE: "passes.runtime.places_in_rows",
    rooms.NAMESPACE: "passes.runtime.rooms",
}
_MODULES = {"_operator": "operator"}  # a function's ``__module__``, and the module to import it from
# Modules in which torch's functions are looked up, since their ``__module__`` is often a C++ binding.
_HOMES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.Tensor": torch.Tensor,
}


def print_program(program: Program) -> str:
    """``program`` as the text of a module with a function ``program``, and one for each region.

    It runs unchanged, unless the graph has an object without a Python literal (a generator, a closure). A graph with
    constants or modules takes its ``GraphModule`` as the keyword argument ``module``.
    """
    return _Printer(program).text()


def printed_names(program: Program) -> dict[fx.Node, str]:
    """The names that values have in the text: those of their nodes, but for names that the text needs itself."""
    names = _Printer(program).names
    return {node: names[node] for node in program.graph.nodes if node.op != "output"}


def axis_names(mesh: Mesh) -> dict[str, str]:
    """The names that process groups have in the text, those of their axes, by group."""
    axes = (*mesh.axes, *mesh.subgroups)
    gathers = {axis.gathers: f"{_identifier(axis.name)}_gathers" for axis in axes if axis.gathers}
    return {axis.group: _identifier(axis.name) for axis in axes} | gathers


class _Printer:
    """The state of printing: names taken, imports needed, headings shown."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.imports: dict[str, None] = {"import torch": None}
        self.axes = axis_names(program.mesh)
        self.nodes = list(every_node(program.graph))
        self.aliases = _aliases(self.nodes)
        self.functions = _function_names(program.graph)
        defined_in = [module for name, module in _DEFINED_IN.items() if name in self.aliases.values()]
        self.imports |= {f"import {module}": None for module in defined_in}
        reserved = self._reserved()
        self.names = _names(program.graph, reserved)
        for region in self.functions:
            self.names |= _names(region.graph, reserved)
        self.shown: dict[str, str] = {}

    def text(self) -> str:
        functions = [line for region in self.functions for line in self._region(region)]
        self.shown = {}
        body = [line for node in self.program.graph.nodes for line in self._lines(node)]
        signature = self._signature()
        head = [*_header(self.program), "", *sorted(self.imports, key=_import_order), ""]
        aliases = [f"{alias} = torch.ops.{namespace}" for alias, namespace in self.aliases.items()]
        return "\n".join([*head, *aliases, *[""] * bool(aliases), "", *functions, *signature, *body, ""])

    def _region(self, region: Region) -> list[str]:
        """The function of a region, and two empty lines behind it."""
        self.shown = {}
        arguments = [f"    {self._typed(node)}," for node in region.placeholders]
        body = [line for node in region.nodes for line in self._lines(node)]
        results = [f"        {self.names[each]}," for each in region.results]
        head = [f"def {self.functions[region]}(", *arguments, "):"]
        return [*head, *body, "    return (", *results, "    )", "", ""]

    def _reserved(self) -> set[str]:
        modules = {_root(node.target) for node in self.nodes}
        ours = {*self.aliases, *self.axes.values(), *self.functions.values()}
        return {"torch", "math", "sys", "operator", "module", *modules, *ours}

    def _signature(self) -> list[str]:
        lines = ["def program("]
        for node, declared in zip(self.program.placeholders, self.program.inputs, strict=True):
            lines.append(f"    {self._typed(node)},{_comment(_input_comment(declared))}")
        keywords = [f"    {name}: str," for name in self.axes.values()]
        if any(node.op in ("get_attr", "call_module") for node in self.program.graph.nodes):
            keywords.insert(0, "    module: torch.nn.Module,")
        return [*lines, *(["    *,", *keywords] if keywords else []), "):"]

    def _typed(self, node: fx.Node) -> str:
        kind = _type(node.meta.get("val"))
        return f'{self.names[node]}: "{kind}"' if kind else self.names[node]

    def _lines(self, node: fx.Node) -> list[str]:
        if node.op == "placeholder":
            return []
        if node.op == "output":
            return self._return()
        return [*self._headings(node), f"    {self._typed(node)} = {self._call(node)}{_comment(self._remark(node))}"]

    def _headings(self, node: fx.Node) -> list[str]:
        """The phase and the module, where they change."""
        lines = []
        if self._changes("phase", node.meta.get("phase")):
            lines += ["", f"    # ---- {node.meta['phase']} ----"]
        if self._changes("module", node.meta.get("module")):
            lines += [] if lines else [""]
            lines += [f"    # {_one_line(node.meta['module'])}"]
        return lines

    def _remark(self, node: fx.Node) -> str:
        described = node.meta.get("collective")
        source = node.meta.get("source")
        parts = [_why(described)] if isinstance(described, Collective) else []
        parts += [str(source)] if self._changes("source", source) else []
        return "; ".join(parts)

    def _changes(self, what: str, value: Any) -> bool:
        if not value or self.shown.get(what) == str(value):
            return False
        self.shown[what] = str(value)
        return True

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if node.op == "call_module":
            return f"module.get_submodule({node.target!r})({self._arguments(node)})"
        if node.op == "call_method":
            return f"{self._value(node.args[0])}.{node.target}({self._arguments(node, skip=1)})"
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return f"{self.names[node.args[0]]}[{self._value(node.args[1])}]"
        return f"{self._function(node.target)}({self._arguments(node)})"

    def _attribute(self, path: str) -> str:
        if all(part.isidentifier() and not keyword.iskeyword(part) for part in path.split(".")):
            return f"module.{path}"
        self.imports["import operator"] = None
        return f"operator.attrgetter({path!r})(module)"  # it also takes names that are numbers

    def _function(self, target: Any) -> str:
        if isinstance(target, Region):
            return self.functions[target]
        if isinstance(target, HigherOrderOperator):
            return f"torch.ops.higher_order.{target.name()}"
        if isinstance(target, OpOverload):
            alias, _ = _alias(target)
            return f"{alias}.{schema(target).name}.{schema(target).overload}"
        home, name = _home(target)
        if home != "builtins" and home not in _HOMES:
            self.imports[f"import {home}"] = None
        return name if home == "builtins" else f"{home}.{name}"

    def _arguments(self, node: fx.Node, skip: int = 0) -> str:
        groups = _group_positions(node.target)
        positional = [self._argument(value, k in groups) for k, value in enumerate(node.args)][skip:]
        named = [f"{name}={self._argument(value, name in groups)}" for name, value in node.kwargs.items()]
        return ", ".join([*positional, *named])

    def _argument(self, value: Any, is_group: bool) -> str:
        return self.axes[value] if is_group and value in self.axes else self._value(value)

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._value, (value.start, value.stop, value.step)))})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self._value(k)}: {self._value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, (torch.Size, list)):
            return "[" + ", ".join(map(self._value, value)) + "]"
        if isinstance(value, tuple):
            return "(" + ", ".join(map(self._value, value)) + ("," if len(value) == 1 else "") + ")"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            self.imports["import math"] = None
            return "math.nan" if math.isnan(value) else "math.inf" if value > 0 else "-math.inf"
        if value == sys.maxsize and type(value) is int:
            self.imports["import sys"] = None
            return "sys.maxsize"
        if value is Ellipsis:
            return "..."
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if callable(value) and not isinstance(value, torch.dtype):
            return self._function(value)
        return repr(value)

    def _return(self) -> list[str]:
        if not self.program.outputs:
            return ["    return ()"]
        pairs = zip(self.program.output_values(), self.program.outputs, strict=True)
        lines = [f"        {self._value(value)},{_comment(_output_comment(output))}" for value, output in pairs]
        return ["    return (", *lines, "    )"]


def _header(program: Program) -> list[str]:
    units = [f"unit {k}: {_unit(names)}" for k, names in enumerate(program.units)]
    lines = [
        program.name,
        *program.history,
        f"mesh: {program.mesh}",
        *program.how_it_runs,
        *units,
        "",
        *_LEGEND.splitlines(),
    ]
    return [f"# {_one_line(line)}".rstrip() for line in lines]


def _unit(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parameters, {names[0]} to {names[-1]}"


def _import_order(line: str) -> tuple[bool, str]:
    """A sort key: the standard library first, then torch and the rest."""
    return line.split()[1].split(".")[0] not in sys.stdlib_module_names, line


def _names(graph: fx.Graph, reserved: set[str]) -> dict[fx.Node, str]:
    """The nodes' own names, changed where they would shadow a name that the text needs."""
    taken = {node.name for node in graph.nodes} | reserved
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        name = node.name
        while name in reserved or (name != node.name and name in taken):
            name += "_"
        taken.add(name)
        names[node] = name
    return names


def _function_names(graph: fx.Graph) -> dict[Region, str]:
    """The names of the functions of regions, in the order in which these are called first."""
    names: dict[Region, str] = {}
    for region in regions(graph).values():
        name = region.name
        while region not in names and name in {"program", *names.values()}:
            name += "_"
        names.setdefault(region, name)
    return names


def _aliases(nodes: Iterable[fx.Node]) -> dict[str, str]:
    """The alias of each namespace of ops, of called ones and of arguments."""
    ops = [value for node in nodes for value in (node.target, *node.args) if isinstance(value, OpOverload)]
    return dict(sorted({_alias(op) for op in ops}))


def _alias(op: OpOverload) -> tuple[str, str]:
    """The alias of an op's namespace, and the namespace."""
    return _OPS_ALIASES.get(op.namespace, op.namespace), op.namespace


def _root(target: Any) -> str:
    """The first name in the text of a function target."""
    if isinstance(target, OpOverload) or not callable(target):
        return "torch"
    home, name = _home(target)
    return name if home == "builtins" else home.split(".")[0]


def _home(function: Callable[..., Any]) -> tuple[str, str]:
    """The module to import a Python function from, and its name there."""
    public = _public_names().get(id(function))
    if public is not None:
        return public
    name = getattr(function, "__qualname__", repr(function))
    module = getattr(function, "__module__", None) or "torch"
    return _MODULES.get(module, module), name


@cache
def _public_names() -> dict[int, tuple[str, str]]:
    """The path of each function in ``_HOMES``."""
    found: dict[int, tuple[str, str]] = {}
    for path, home in _HOMES.items():
        for name, value in vars(home).items():
            if callable(value) and not name.startswith("__"):
                found.setdefault(id(value), (path, name))
    return found


def _group_positions(target: Any) -> set[int | str]:
    """The positions and names of an op's arguments that name a process group."""
    if not isinstance(target, OpOverload):
        return set()
    position = position_of(target, "group_name")
    return {position, "group_name"} if position is not None else set()


def _type(val: Any) -> str:
    """``f32[4, 8]``, ``float``, ``(f32[4], i64[4])``, or nothing for other values."""
    if isinstance(val, torch.Tensor):
        return f"{short_dtype(val.dtype)}[{', '.join(map(str, val.shape))}]"
    if isinstance(val, (list, tuple)):
        return f"({', '.join(_type(each) or 'None' for each in val)})"
    for kinds, name in (
        ((bool, torch.SymBool), "bool"),
        ((int, torch.SymInt), "int"),
        ((float, torch.SymFloat), "float"),
    ):
        if isinstance(val, kinds):
            return name
    return ""


def short_dtype(dtype: torch.dtype) -> str:
    """``f32`` for ``torch.float32``."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def _input_comment(declared: Input) -> str:
    whole = _whole(declared.shape, declared.dtype, declared.placement)
    written = ", updated in place" if declared.in_place else ""
    if declared.memory is not Memory.DEVICE:
        written = f", in {declared.memory} memory{written}"
    if declared.parts:
        parts = ", ".join(f"{part.input.name} from {part.offset}" for part in declared.parts)
        return f"{declared.role} of {declared.name}: {parts}{written}"
    numbers = ": " + ", ".join(declared.numbers) if declared.numbers else ""
    return f"{declared.role} {declared.name}{whole}{written}{numbers}"


def _output_comment(output: Output) -> str:
    what = "update of" if output.kind is OutputKind.UPDATE else str(output.kind)
    if output.kind is OutputKind.CHANNEL:
        return output.name
    return f"{what} {output.name}{_whole(output.shape, output.dtype, output.placement)}"


def _whole(shape: Iterable[int], dtype: torch.dtype | None, placement: Placements) -> str:
    """The global shape and the placement; nothing before partition, where each value is whole."""
    if not placement or dtype is None:
        return ""
    return f": {short_dtype(dtype)}[{', '.join(map(str, shape))}] as {', '.join(map(repr, placement))}"


def _why(described: Collective) -> str:
    kind, values = described.kind, ", ".join(described.of[:3]) or described.role
    why = described.why or f"{kind} of {values} over {described.axis}"
    return f"{why}; {kind}: {described.by}" if described.by else why


def _comment(text: str) -> str:
    return f"  # {_one_line(text)}" if text else ""


def _one_line(text: object) -> str:
    return " ".join(str(text).splitlines())


def _identifier(name: str) -> str:
    clean = "".join(c if c.isalnum() else "_" for c in name)
    return f"{clean}_" if keyword.iskeyword(clean) else clean if clean.isidentifier() else f"axis_{clean}"
