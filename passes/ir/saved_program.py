"""A program as a text and plain data, which another process reads back and runs node by node.

The text is that of ``print_program``. The data is what it does not say, as far as running needs it: the mesh, what
inputs and outputs are, what collectives are for and the memory that they fill, and where each node is in the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import fx

from .._torch import FakeTensorMode
from ..errors import PassError
from .collectives import Collective, kind_of
from .printer import axis_names, print_program, printed_names
from .program import Axis, Input, Mesh, Output, OutputKind, Part, Program
from .rates import UNMEASURED
from .region import regions
from .roles import AxisRole, Role
from .text_graph import TextGraph

_WHERE = ("phase", "module", "source")


def save_program(program: Program) -> dict[str, Any]:
    """``program`` as plain data, ready for JSON. Raises ``PassError`` if it has modules or tensors of its own."""
    own = [node.name for node in program.graph.nodes if node.op in ("get_attr", "call_module")]
    if own:
        raise PassError(f"{program.name} has tensors or modules of its own ({', '.join(own[:3])}), which no text holds")
    outputs = [{"kind": str(each.kind), "name": each.name} for each in program.outputs]
    names = printed_names(program)
    names |= {node: node.name for region in regions(program.graph).values() for node in region.nodes}
    return {
        "name": program.name,
        "text": print_program(program),
        "mesh": {key: [_axis(axis) for axis in getattr(program.mesh, key)] for key in ("axes", "subgroups")},
        "inputs": [_input(each) for each in program.inputs],
        "outputs": outputs,
        "collectives": {names[node]: _collective(node) for node in program.collectives()},
        "where": {name: [str(node.meta.get(key) or "") for key in _WHERE] for node, name in names.items()},
    }


def load_program(saved: Mapping[str, Any]) -> Program:
    """Load a program of ``save_program``. Nodes have no other meta than phase, module, source and collectives.

    Its text is code, which runs. Raises ``PassError`` where it is none.
    """
    mesh = Mesh(*(tuple(map(_read_axis, saved["mesh"][key])) for key in ("axes", "subgroups")))
    found = TextGraph(saved["text"], {name: group for group, name in axis_names(mesh).items()})
    for name, node in found.values.items():
        node.meta = {key: value for key, value in zip(_WHERE, saved["where"].get(name, ()), strict=False) if value}
        if name in saved["collectives"]:
            described = saved["collectives"][name]
            node.meta["collective"] = Collective(kind_of(node), described["axis"], why=described["why"])
            with FakeTensorMode():
                node.meta["val"] = _memory(described["val"])
    for node in (inside for region in found.regions.values() for inside in region.nodes):
        node.meta = {key: value for key, value in zip(_WHERE, saved["where"].get(node.name, ()), strict=False) if value}
    inputs = [_read_input(each) for each in saved["inputs"]]
    outputs = [Output(OutputKind(each["kind"]), each["name"]) for each in saved["outputs"]]
    return Program(fx.GraphModule(torch.nn.Module(), found.graph), inputs, outputs, mesh, name=saved["name"])


def _axis(axis: Axis) -> dict[str, Any]:
    return {key: value for key, value in asdict(replace(axis, rate=UNMEASURED)).items() if key != "rate"}


def _read_axis(saved: Mapping[str, Any]) -> Axis:
    return Axis(**{**saved, "roles": tuple(map(AxisRole, saved.get("roles", ())))})


def _input(declared: Input) -> dict[str, Any]:
    parts = [{"name": part.input.name, "offset": part.offset, "shape": list(part.shape)} for part in declared.parts]
    return {"role": str(declared.role), "name": declared.name, "parts": parts}


def _read_input(saved: Mapping[str, Any]) -> Input:
    role = Role(saved["role"])
    parts = [Part(Input(role, each["name"]), each["offset"], tuple(each["shape"])) for each in saved["parts"]]
    return Input(role, saved["name"], parts=tuple(parts))


def _collective(node: fx.Node) -> dict[str, Any]:
    known: Collective = node.meta["collective"]
    return {"axis": known.axis, "why": known.why, "val": _described(node.meta["val"])}


def _described(val: Any) -> Any:
    if isinstance(val, (list, tuple)):
        return [_described(each) for each in val]
    return {
        "dtype": str(val.dtype).removeprefix("torch."),
        "shape": list(val.shape),
        "stride": list(val.stride()),
        "device": str(val.device),
    }


def _memory(described: Any) -> Any:
    """A tensor without data, or several."""
    if isinstance(described, list):
        return [_memory(each) for each in described]
    dtype = getattr(torch, described["dtype"])
    return torch.empty_strided(described["shape"], described["stride"], dtype=dtype, device=described["device"])
