"""A program as JSON, with all its meta, and back. No text runs: ops are looked up by name, functions in a table.

Process groups are written by the name of their axis and named by the mesh of the call that reads the program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from passes import Input, Memory, Mesh, Output, OutputKind, Part, Program, Role, print_program
from passes._torch import SYMBOLIC_FUNCTIONS
from passes.ir.collectives import Collective, Kind
from passes.ir.meta import KEYS
from passes.ir.origin import Origin
from passes.ir.program import MicroBatches
from passes.ir.region import Island
from passes.ir.roles import Phase
from passes.ir.schemas import position_of
from passes.runtime import (
    answers,
    arena,
    collective_ops,
    ctc_loss,
    host_memory,
    master_copies,
    places_in_rows,
    random,
    rooms,
)

from .._torch import FakeTensorMode, LazyGraphModule, OpOverload
from ..partitioner.assignment import Assignment
from ..placements import OWN_PLACEMENTS
from .not_cached import NotCachedError

_OURS = (
    *(collective_ops.NAMESPACE, ctc_loss.NAMESPACE, host_memory.NAMESPACE),
    *(master_copies.NAMESPACE, places_in_rows.NAMESPACE, rooms.NAMESPACE, answers.NAMESPACE),
)
_NAMESPACES = {"aten", "prims", "profiler", "_c10d_functional", "spmd", *_OURS}  # of ops that a program may call
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(arena.reserve, arena.view_at, arena.whole, random.draw, random.draw_from_tensor),
    *(operator.getitem, operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.neg, operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.and_, operator.or_, operator.not_, math.floor, math.ceil, math.trunc),
)
_META = {key.name for key in KEYS}


def program_to_data(program: Program) -> dict[str, Any]:
    """``program`` as plain data, but for its mesh. Raises ``NotCachedError`` for what no data can be."""
    if any(axis.ordered for axis in program.mesh.axes):
        raise NotCachedError("its sums have an order that does not depend on the number of ranks")
    earlier = {role: program_to_data(each) for role, each in program.earlier.items()}
    return {**_Writer(program).data(), "micro_batches": _runs(program.micro_batches), "earlier": earlier}


def program_from_data(data: Mapping[str, Any], mesh: Mesh) -> Program:
    """The program of ``program_to_data``, on a mesh with the same axes. Its graph is read when somebody looks at it."""
    reader = _Reader(mesh)
    program = StoredProgram(
        graph_module=None,  # type: ignore[arg-type]
        inputs=list(map(reader.input, data["inputs"])),
        outputs=list(map(reader.output, data["outputs"])),
        mesh=mesh,
        history=list(data["history"]),
        name=data["name"],
        notes=list(data["notes"]),
        units=tuple(map(tuple, data["units"])),
        reshard=frozenset(data["reshard"]),
        kept_by=dict(data["kept_by"]),
        prefetch=tuple(data["prefetch"]),
        limit_gathers=data["limit_gathers"],
        room=data["room"],
        stored=tuple(map(tuple, data["stored"])),
        fixed=frozenset(data["fixed"]),
        writes=None if data["writes"] is None else frozenset(data["writes"]),
        gathers_once=data["gathers_once"],
        micro_batches=_read_runs(data["micro_batches"]),
        earlier={role: program_from_data(each, mesh) for role, each in data["earlier"].items()},
    )
    del program.graph_module
    program.read_graph = lambda: LazyGraphModule(torch.nn.Module(), reader.graph(data))
    program.assigned, program.stored_nodes = data["assignment"], len(data["nodes"])
    return program


def printed(program: Program) -> str:
    """The text of a program and of earlier ones of a call, without names, which say in which order calls came."""
    own = (program, *program.earlier.values())
    return "\n".join(print_program(replace(each, name="program")) for each in own)


class StoredProgram(Program):
    """A program whose graph is made when it is first looked at: of the three of a warm start, one runs.

    ``assigned``: the text of its assignment.
    """

    read_graph: Callable[[], fx.GraphModule]
    assigned: str | None = None
    stored_nodes: int = 0
    _assignment: Any = None

    @property
    def node_count(self) -> int:
        """The number of nodes, for which the graph need not be made."""
        return len(self.graph.nodes) if "graph_module" in vars(self) else self.stored_nodes

    @property
    def assignment(self) -> Any:
        """The assignment of the captured program; read when it is first asked for."""
        if self._assignment is None and self.assigned is not None:
            self._assignment = Assignment.read(self.assigned)
        return self._assignment

    @assignment.setter
    def assignment(self, assignment: Any) -> None:
        self._assignment = assignment

    def __getattr__(self, name: str) -> Any:
        if name != "graph_module":
            raise AttributeError(f"a Program has no attribute {name!r}")
        self.graph_module = self.read_graph()
        return self.graph_module


@dataclass
class _Writer:
    program: Program
    vals: dict[str, int] = field(default_factory=dict)  # the tables of the data: each spec, and each text, once
    texts: dict[str, int] = field(default_factory=dict)
    islands: dict[Island, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index: dict[fx.Node, int] = {}  # of each node in its own graph
        axes = (*self.program.mesh.axes, *self.program.mesh.subgroups)
        self.groups = {axis.group: [axis.name, "group"] for axis in axes if axis.group}
        self.groups |= {axis.gathers: [axis.name, "gathers"] for axis in axes if axis.gathers}

    def data(self) -> dict[str, Any]:
        program = self.program
        nodes = self.nodes(program.graph)
        islands = [[island.name, self.nodes(island.graph)] for island in [*self.islands]]
        return {
            "name": program.name,
            "history": program.history,
            "notes": program.notes,
            "units": program.units,
            "reshard": sorted(program.reshard),
            "kept_by": dict(program.kept_by),
            "prefetch": program.prefetch,
            "limit_gathers": program.limit_gathers,
            "room": program.room,
            "stored": program.stored,
            "fixed": sorted(program.fixed),
            "writes": None if program.writes is None else sorted(program.writes),
            "gathers_once": program.gathers_once,
            "assignment": _assigned(program.assignment),
            "inputs": [_input(each) for each in program.inputs],
            "outputs": [_output(each) for each in program.outputs],
            "vals": list(self.vals),
            "texts": list(self.texts),
            "nodes": nodes,
            "islands": islands,
        }

    def nodes(self, graph: fx.Graph) -> list[list[Any]]:
        self.index |= {node: k for k, node in enumerate(graph.nodes)}
        return [self.node(node) for node in graph.nodes]

    def node(self, node: fx.Node) -> list[Any]:
        """Name, kind, target, arguments and meta."""
        group = position_of(node.target, "group_name") if isinstance(node.target, OpOverload) else None
        args = [self.argument(value, k == group) for k, value in enumerate(node.args)]
        kwargs = {key: self.argument(value, key == "group_name") for key, value in node.kwargs.items()}
        return [node.name, self.text(node.op), self.text(self.target(node)), args, kwargs, self.meta(node)]

    def text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def target(self, node: fx.Node) -> str:
        if node.op in ("placeholder", "output"):
            return str(node.target)
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            return f"op:{_op(node.target)}"
        if node.op == "call_function" and id(node.target) in _names_of_functions():
            return f"function:{_names_of_functions()[id(node.target)]}"
        if type(node.target) is Island:
            return f"island:{self.islands.setdefault(node.target, len(self.islands))}"
        raise NotCachedError(f"its program has {node.name}, which calls {node.target}, no op of torch's")

    def argument(self, value: Any, is_group: bool = False) -> Any:
        if is_group:
            if value not in self.groups:
                raise NotCachedError(f"its program communicates in a process group of no axis, {value!r}")
            return {"group": self.groups[value]}
        if isinstance(value, fx.Node):
            return {"n": self.index[value]}
        if isinstance(value, (list, tuple)):
            return {"t" if type(value) is tuple else "l": list(map(self.argument, value))}
        if isinstance(value, dict):
            return {"d": [[self.argument(k), self.argument(v)] for k, v in value.items()]}
        if isinstance(value, slice):
            return {"slice": list(map(self.argument, (value.start, value.stop, value.step)))}
        if isinstance(value, OpOverload):
            return {"op": _op(value)}
        return scalar_to_data(value)

    def meta(self, node: fx.Node) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.meta.items():
            if key == "val":
                val = self.val(value)
                found |= {} if val is None else {key: val}
            elif key == "collective":
                found[key] = _collective(value)
            elif key == "placement":
                found[key] = placement_to_data(value)
            elif key == "in_time":
                found[key] = placement_to_data((value,))
            elif key == "computes":
                found[key] = _op(value)
            elif key == "origin":
                found[key] = [self.part(getattr(value, each.name)) for each in fields(value)]
            elif key in _META or "." in key:
                found[key] = self.text(str(value)) if isinstance(value, str) else {"value": scalar_to_data(value)}
        return found

    def part(self, value: Any) -> Any:
        """A field of an origin: a text by its number in a list, anything else as it is."""
        return [self.text(str(value))] if isinstance(value, str) else scalar_to_data(value)

    def val(self, val: Any) -> Any:
        """The spec of a fake tensor by its number, a number as it is; None for anything else, which nothing reads."""
        if isinstance(val, torch.Tensor):
            return {"v": self.vals.setdefault(_spec(val), len(self.vals))}
        if isinstance(val, (list, tuple)):
            return {"t" if isinstance(val, tuple) else "l": list(map(self.val, val))}
        if isinstance(val, (torch.SymFloat, torch.SymInt)):
            return val.node.hint
        return val if isinstance(val, (bool, int, float)) else None


@dataclass
class _Reader:
    mesh: Mesh
    mode: Any = field(default_factory=FakeTensorMode)

    def graph(self, data: Mapping[str, Any]) -> fx.Graph:
        self.vals = [self.fake(spec) for spec in data["vals"]]
        self.texts: list[str] = data["texts"]
        self.islands = [Island(name, self.read(nodes)) for name, nodes in data["islands"]]
        return self.read(data["nodes"])

    def read(self, nodes: Sequence[Sequence[Any]]) -> fx.Graph:
        """A graph by its nodes."""
        self.nodes: list[fx.Node] = []
        graph = fx.Graph()
        for name, op, target, args, kwargs, meta in nodes:
            values = tuple(map(self.argument, args))
            named = {key: self.argument(value) for key, value in kwargs.items()}
            kind, named_target = self.texts[op], self.texts[target]
            called = self.called(named_target) if kind == "call_function" else named_target
            node = graph.create_node(kind, called, values, named, name=name)
            if node.name != name:
                raise ValueError(f"two nodes are called {name}")
            node.meta = {key: self.meta(key, value) for key, value in meta.items()}
            self.nodes.append(node)
        return graph

    def called(self, text: str) -> Any:
        kind, _, number = text.partition(":")
        return self.islands[int(number)] if kind == "island" else target_of(text)

    def fake(self, spec: str) -> Any:
        dtype, shape, stride, device = spec.split(";")
        sizes, strides = ([int(each) for each in text.split(",") if each] for text in (shape, stride))
        with self.mode:
            return torch.empty_strided(sizes, strides, dtype=_dtype(dtype), device=device)

    def argument(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, of),) = value.items()
        match kind:
            case "n":
                return self.nodes[of]
            case "l":
                return list(map(self.argument, of))
            case "t":
                return tuple(map(self.argument, of))
            case "d":
                return {self.argument(k): self.argument(v) for k, v in of}
            case "slice":
                return slice(*map(self.argument, of))
            case "op":
                return _find_op(of)
            case "group":
                name, which = of
                axes = (*self.mesh.axes, *self.mesh.subgroups)
                return next(getattr(axis, which) for axis in axes if axis.name == name)
        return scalar_from_data(value)

    def meta(self, key: str, value: Any) -> Any:
        match key:
            case "val":
                return self.val(value)
            case "collective":
                return _read_collective(value)
            case "placement":
                return placement_from_data(value)
            case "in_time":
                return placement_from_data(value)[0]
            case "computes":
                return _find_op(value)
            case "phase":
                return Phase(self.texts[value])
            case "origin":
                number, phase, *others = map(self.part, value)
                return Origin(number, Phase(phase), *others)
        return scalar_from_data(value["value"]) if isinstance(value, dict) else self.texts[value]

    def part(self, value: Any) -> Any:
        return self.texts[value[0]] if isinstance(value, list) else scalar_from_data(value)

    def val(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, of),) = value.items()
        if kind == "v":
            return self.vals[of]
        found = map(self.val, of)
        return tuple(found) if kind == "t" else list(found)

    def input(self, data: Mapping[str, Any]) -> Input:
        parts = [Part(self.input(each), offset, tuple(shape)) for each, offset, shape in data["parts"]]
        own = {"memory": Memory(data["memory"]), "numbers": tuple(data["numbers"]), "parts": tuple(parts)}
        return Input(**{**_read_declared(data), **own, "wire": scalar_from_data(data["wire"])})

    def output(self, data: Mapping[str, Any]) -> Output:
        return Output(**{**_read_declared(data), "kind": OutputKind(data["kind"])})


def _runs(micro: MicroBatches | None) -> Any:
    """Micro-batches of a program as data.

    Raises ``NotCachedError`` where ranks divide the runs: each has its own, and the name of a group of its process.
    """
    return micro and {each.name: _of_runs(getattr(micro, each.name)) for each in fields(micro)}


def _of_runs(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"by name": [[name, scalar_to_data(each)] for name, each in value.items()]}
    return scalar_to_data(value)


def _read_runs(data: Any) -> MicroBatches | None:
    return data and MicroBatches(**{name: _read_of_runs(each) for name, each in data.items()})


def _read_of_runs(data: Any) -> Any:
    match data:
        case {"by name": items}:
            return {name: scalar_from_data(each) for name, each in items}
    return scalar_from_data(data)


def _read_declared(data: Mapping[str, Any]) -> dict[str, Any]:
    dtype = None if data["dtype"] is None else _dtype(data["dtype"])
    own = {"role": Role.from_data(data["role"]), "shape": tuple(data["shape"]), "dtype": dtype}
    return {**data, **own, "placement": placement_from_data(data["placement"])}


def _assigned(assignment: Any) -> str | None:
    if assignment is not None and type(assignment) is not Assignment:
        raise NotCachedError("its assignment is one of the user's")
    return None if assignment is None else assignment.text()


def _input(declared: Input) -> dict[str, Any]:
    found = {each.name: getattr(declared, each.name) for each in fields(declared)}
    found["parts"] = [[_input(part.input), part.offset, part.shape] for part in declared.parts]
    found["wire"] = scalar_to_data(declared.wire)
    return _declared(found)


def _output(declared: Output) -> dict[str, Any]:
    return _declared({each.name: getattr(declared, each.name) for each in fields(declared)})


def _declared(found: dict[str, Any]) -> dict[str, Any]:
    dtype = found["dtype"]
    found["dtype"] = None if dtype is None else str(dtype).removeprefix("torch.")
    found["role"] = found["role"].to_data()
    found["placement"] = placement_to_data(found["placement"])
    return found


def _collective(described: Collective) -> dict[str, Any]:
    found = {each.name: getattr(described, each.name) for each in fields(described)}
    return {**found, "role": described.role.to_data()}


def _read_collective(data: Mapping[str, Any]) -> Collective:
    return Collective(
        **{**data, "kind": Kind(data["kind"]), "role": Role.from_data(data["role"]), "of": tuple(data["of"])}
    )


def placement_to_data(placement: Sequence[Any]) -> list[list[Any]]:
    """An entry for each axis."""
    return list(map(_entry, placement))


def _entry(entry: Any) -> list[Any]:
    for name, (cls, options) in _PLACEMENTS.items():
        if type(entry) is cls:
            return [name, *(getattr(entry, option) for option in options)]
    raise NotCachedError(f"its program has a placement of another kind, {entry!r}")


_PLACEMENTS: dict[str, tuple[type, tuple[str, ...]]] = {
    **OWN_PLACEMENTS,
    "shard": (Shard, ("dim",)),
    "replicate": (Replicate, ()),
    "partial": (Partial, ("reduce_op",)),
}


def placement_from_data(data: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The placement of ``placement_to_data``."""
    return tuple(_PLACEMENTS[kind][0](*options) for kind, *options in data)


_TORCH: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def scalar_to_data(value: Any) -> Any:
    """A number, text or setting of torch's as plain data; lists and tuples of them, too."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return {"t" if type(value) is tuple else "l": list(map(scalar_to_data, value))}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is ...:
        return {"ellipsis": True}
    for kind, cls in _TORCH.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    raise NotCachedError(f"it has a {type(value).__name__}, {value!r:.60}, which is no plain data")


def scalar_from_data(data: Any) -> Any:
    """The value of ``scalar_to_data``. Raises ``ValueError`` for anything else."""
    if not isinstance(data, dict):
        return data
    ((kind, of),) = data.items()
    match kind:
        case "t":
            return tuple(map(scalar_from_data, of))
        case "l":
            return list(map(scalar_from_data, of))
        case "complex":
            return complex(*of)
        case "device":
            return torch.device(of)
        case "ellipsis":
            return ...
    value = getattr(torch, of, None)
    if kind not in _TORCH or not isinstance(value, _TORCH[kind]):
        raise ValueError(f"no value is written as {data}")
    return value


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = scalar_from_data({"dtype": name})
    return found


def _spec(val: torch.Tensor) -> str:
    """``float32;4,8;8,1;cpu``. Raises ``NotCachedError`` for sizes that are not known."""
    if any(not isinstance(each, int) for each in (*val.shape, *val.stride())):
        raise NotCachedError("its program serves other sizes of its arguments, too")
    shape, stride = (",".join(map(str, each)) for each in (val.shape, val.stride()))
    return f"{str(val.dtype).removeprefix('torch.')};{shape};{stride};{val.device}"


def _op(op: OpOverload) -> str:
    """``aten.add.Tensor``. Raises ``NotCachedError`` for an op that is neither torch's nor ours."""
    namespace, _, rest = op.name().partition("::")
    name, _, overload = rest.partition(".")
    if namespace not in _NAMESPACES:
        raise NotCachedError(f"its program calls {op.name()}, which is no op of torch's")
    return f"{namespace}.{name}.{overload or 'default'}"


@cache
def _find_op(text: str) -> Any:
    namespace, name, overload = text.split(".")
    if namespace not in _NAMESPACES:
        raise ValueError(f"{text} is no op that a program may call")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def target_of(text: str) -> Any:
    """The op or function that a node calls, from its text. Raises ``ValueError`` for any other."""
    kind, _, name = text.partition(":")
    if kind == "op":
        return _find_op(name)
    if kind != "function" or name not in _functions():
        raise ValueError(f"{text} is no function that a program may call")
    return _functions()[name]


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    known = (*_FUNCTIONS, *sorted(SYMBOLIC_FUNCTIONS, key=lambda each: each.__name__))
    return {f"{each.__module__}.{each.__qualname__}": each for each in known}


@cache
def _names_of_functions() -> dict[int, str]:
    return {id(function): name for name, function in _functions().items()}
