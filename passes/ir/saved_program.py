"""A program as a text and plain data, which another process reads back and runs node by node.

The text is that of ``print_program``. The data is what it does not say, as far as running needs it: the mesh, what
inputs and outputs are, what collectives are for and the memory that they fill, and where each node is in the step. Of
a pipeline, that is the program of a micro-batch, and those of the rank's own stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import fx

from .._torch import FakeTensorMode
from ..errors import PassError
from .bundle import Bundle, Channel
from .collectives import Collective, kind_of
from .printer import axis_names, print_program, printed_names
from .program import Axis, Input, Mesh, MicroBatches, Output, OutputKind, Part, Program
from .region import regions
from .roles import AxisRole, Role
from .text_graph import TextGraph

_WHERE = ("phase", "module", "source")


def save_program(program: Program) -> dict[str, Any]:
    """``program`` as plain data, ready for JSON. Raises ``PassError`` if it has modules or tensors of its own."""
    own = [node.name for node in program.graph.nodes if node.op in ("get_attr", "call_module")]
    if own:
        raise PassError(f"{program.name} has tensors or modules of its own ({', '.join(own[:3])}), which no text holds")
    outputs = [{"kind": str(each.kind), "name": each.name, "role": each.role.to_data()} for each in program.outputs]
    names = printed_names(program)
    names |= {node: node.name for region in regions(program.graph).values() for node in region.nodes}
    return {
        "name": program.name,
        "text": print_program(program),
        "mesh": {key: [_axis(axis) for axis in getattr(program.mesh, key)] for key in ("axes", "subgroups")},
        "inputs": [_input(*pair) for pair in zip(program.inputs, program.placeholders, strict=True)],
        "outputs": outputs,
        "stages": None if program.stages is None else _stages(program),
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
    for node, each in zip(found.graph.find_nodes(op="placeholder"), saved["inputs"], strict=True):
        if each.get("val"):
            with FakeTensorMode():
                node.meta["val"] = _memory(each["val"])
    outputs = [
        Output(OutputKind(each["kind"]), each["name"], Role.from_data(each["role"])) for each in saved["outputs"]
    ]
    program = Program(fx.GraphModule(torch.nn.Module(), found.graph), inputs, outputs, mesh, name=saved["name"])
    return program if saved["stages"] is None else _with_stages(program, saved["stages"])


def _stages(program: Program) -> dict[str, Any]:
    """The bundle, with the programs of this rank alone."""
    bundle, micro = program.stages, program.micro_batches
    assert isinstance(bundle, Bundle) and micro is not None, "a pipeline runs micro-batches"
    roles = bundle.roles_of(program)
    ends = ("name", "writers", "readers", "sent", "given")
    return {
        "axis": bundle.axis,
        "calls": dict(bundle.calls),
        "channels": [{end: getattr(each, end) for end in ends} for each in bundle.channels],
        "micro_batches": {"count": micro.count, "split": dict(micro.split), "whole": dict(micro.whole)},
        "programs": {role: save_program(bundle.programs[role]) for role in roles},
    }


def _with_stages(program: Program, saved: Mapping[str, Any]) -> Program:
    micro = MicroBatches(**saved["micro_batches"])
    programs = {role: load_program(each) for role, each in saved["programs"].items()}
    calls = {call: tuple(map(tuple, orders)) for call, orders in saved["calls"].items()}
    channels = [Channel(shape=(), dtype=None, placement=(), **_with_tuples(each)) for each in saved["channels"]]
    bundle = Bundle(program.name, programs, calls, tuple(channels), saved["axis"], micro)
    return replace(program, micro_batches=micro, stages=bundle)


def _with_tuples(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, (list, tuple)) else value for key, value in saved.items()}


def _axis(axis: Axis) -> dict[str, Any]:
    own = {each.name: getattr(axis, each.name) for each in fields(axis) if each.name != "rate"}
    return {**own, "roles": [role.to_data() for role in axis.roles]}


def _read_axis(saved: Mapping[str, Any]) -> Axis:
    own = {each.name: saved[each.name] for each in fields(Axis) if each.name in saved}
    return Axis(**{**own, "roles": tuple(map(AxisRole.from_data, saved.get("roles", ())))})


def _input(declared: Input, node: fx.Node) -> dict[str, Any]:
    parts = [{"name": part.input.name, "offset": part.offset, "shape": list(part.shape)} for part in declared.parts]
    val = _described(node.meta["val"]) if declared.role.is_carried else None
    return {"role": declared.role.to_data(), "name": declared.name, "parts": parts, "val": val}


def _read_input(saved: Mapping[str, Any]) -> Input:
    role = Role.from_data(saved["role"])
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
