"""Offload: state lives in host memory, and copies between host and device are nodes of one rank's graph.

In comes a partitioned program, computed on the device all of it. Forward, backward and collectives stay there: a
parameter in host memory is copied before its part is cast, padded and gathered. What updates state in host memory is
computed on the host: a gradient is copied there once it is reduced. Which side an op is on follows from its phase and
its operands, never from sizes, so it is the same on all ranks; and where host and device are one, from nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes import Memory, PartitionError, Phase, Program, Role, fill_vals
from passes.ir.collectives import is_collective, is_wait
from passes.ir.edit import insert_before
from passes.ir.effects import is_pure
from passes.ir.meta import Relation
from passes.ir.program import output_values
from passes.runtime.host_memory import to_device, to_host, wait_copy
from passes.runtime.random import draw

from .._torch import tree_map
from .plan import Plan

_CPU = torch.device("cpu")


def offload(program: Program, plan: Plan) -> None:
    """Let the state that ``plan`` puts into host memory live there. Edits ``program``.

    Raises ``PartitionError`` for a name that is no parameter.
    """
    if not plan.memory:
        return
    parameters = {declared.name for declared in program.inputs if declared.role is Role.PARAMETER}
    if wrong := sorted(plan.memory.keys() - parameters):
        raise PartitionError(f"the plan's memory must name parameters, but these are none: {wrong[:8]}")
    program.inputs = [replace(declared, memory=plan.memory_of(declared)) for declared in program.inputs]
    pairs = list(zip(program.placeholders, program.inputs, strict=True))
    device = next(n.meta["val"].device for n, declared in pairs if declared.memory is not Memory.DEVICE)
    on_host = _on_host(program.graph, {n for n, declared in pairs if declared.memory is not Memory.DEVICE})
    copies = _Copies(program.graph, plan, on_host, device)
    for node in list(program.graph.nodes):
        if node.op == "call_function":
            copies.insert_for(node)
    copies.insert_for_outputs([plan.memory_of(output) is not Memory.DEVICE for output in program.outputs])
    _move(on_host)
    fill_vals(program)


def _on_host(graph: fx.Graph, given: set[fx.Node]) -> set[fx.Node]:
    """The nodes whose values are in host memory: ``given``, and what is computed there.

    An op is computed on the host if an operand with dims is there, or else one of the others. What is made from nothing
    is made where it is read.
    """
    on_device, found = _on_device(graph), set(given)
    for node in graph.nodes:
        if node.target is getitem and node.args[0] in found:
            found.add(node)  # wherever it is read
        if node.op != "call_function" or node in on_device or node.target is getitem:
            continue
        operands = [operand for operand in node.all_input_nodes if _is_tensor(operand) and not _is_made(operand)]
        with_dims = [operand for operand in operands if _has_dims(operand)]
        if any(operand in found for operand in with_dims or operands):
            found.add(node)
    for node in graph.nodes:
        if _is_made(node) and node not in on_device and node.users and all(user in found for user in node.users):
            found.add(node)
    return found


def _on_device(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of forward and backward, collectives, and what only brings a value to where these read it."""
    found = set[fx.Node]()
    for node in reversed(graph.nodes):
        phase, users = node.meta.get("phase"), list(node.users)
        brings = phase is None and users and all(user in found for user in users)
        if phase in (Phase.FORWARD, Phase.BACKWARD) or is_collective(node) or is_wait(node) or brings:
            found.add(node)
    return found


@dataclass
class _Copies:
    """Inserts copies where a value is read on the other side: one for each value and side."""

    graph: fx.Graph
    plan: Plan
    on_host: set[fx.Node]
    device: torch.device
    _copies: dict[fx.Node, fx.Node] = field(default_factory=dict)  # on the other side, by value
    _waits: dict[fx.Node, fx.Node] = field(default_factory=dict)  # for those on the host

    def insert_for(self, node: fx.Node) -> None:
        """Let ``node`` read copies of what is not on its side."""
        if node.target is getitem:
            return  # it is where its results are
        for operand in [each for each in node.all_input_nodes if _is_tensor(each)]:
            copy = self._on_side(operand, node in self.on_host, node)
            if copy is not operand:
                node.replace_input_with(operand, copy)

    def insert_for_outputs(self, to_host: list[bool]) -> None:
        """Let the graph return each value on its side."""
        end = self.graph.output_node()
        values = output_values(self.graph)
        pairs = zip(values, to_host, strict=True)
        end.args = (tuple(self._on_side(v, host, end) if _is_tensor(v) else v for v, host in pairs),)

    def _on_side(self, value: fx.Node, host: bool, reader: fx.Node) -> fx.Node:
        if (value in self.on_host) is host or (host and self._is_there(value)):
            return value
        return self._to_host(value, reader) if host else self._to_device(value, reader)

    def _is_there(self, value: fx.Node) -> bool:
        """Whether a value that is not offloaded is in host memory anyway, as counters of optimizers are."""
        return self.device != _CPU and value.meta["val"].device == _CPU

    def _to_device(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """A copy right before the first reader, since it takes memory of the device."""
        if value not in self._copies:
            self._copies[value] = _read_by(reader, _copy(reader, to_device, value, self.device))
        return self._copies[value]

    def _to_host(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """A copy that starts as soon as there is something to copy, and that the first reader waits for."""
        if value not in self._copies:
            first = reader if value.op == "placeholder" else value.next
            copy = _copy(first, to_host, value, self._pins(value))
            wait = _read_by(reader, _copy(reader, wait_copy, copy))
            self.on_host |= {copy, wait}
            self._copies[value], self._waits[value] = copy, wait
        return self._waits[value]

    def _pins(self, value: fx.Node) -> bool:
        """Whether a value arrives in pinned memory: a gradient as its parameter asks, others if any does."""
        memory = self.plan.memory.get(value.meta.get("grad_of", ""))
        return Memory.PINNED in ([memory] if memory is not None else self.plan.memory.values())


def _copy(before: fx.Node, op: Any, value: fx.Node, *options: Any) -> fx.Node:
    """A node with the value of another one; where a part of a parameter is updated stays with that one."""
    copy = insert_before(before, op, value, *options, like=value, relation=Relation.REPLACEMENT)
    for key in ("part_of", "update_of"):
        copy.meta.pop(key, None)
    return copy


def _read_by(reader: fx.Node, node: fx.Node) -> fx.Node:
    """``node``, as a part of what its first reader belongs to."""
    node.meta |= {key: reader.meta[key] for key in ("phase", "module") if key in reader.meta}
    return node


def _move(on_host: set[fx.Node]) -> None:
    """Let what is on the host be computed there; its fake values, which may lie otherwise too, are left to infer."""
    for node in on_host:
        if node.op == "placeholder" or node.target is draw:  # which draws, if it is run
            node.meta["val"] = tree_map(_as_on_host, node.meta["val"])
        elif _is_tensor(node):
            del node.meta["val"]
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": _CPU}


def _as_on_host(val: Any) -> Any:
    if not isinstance(val, torch.Tensor):
        return val
    with val.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=_CPU)


def _is_tensor(value: Any) -> bool:
    """Whether a value of the graph is a tensor, or several."""
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(val, torch.Tensor) or (isinstance(val, (list, tuple)) and bool(val))


def _has_dims(node: fx.Node) -> bool:
    val = node.meta["val"]
    return not isinstance(val, torch.Tensor) or val.ndim > 0


def _is_made(node: fx.Node) -> bool:
    """Whether a tensor is made from nothing."""
    made = node.op == "call_function" and is_pure(node) and not any(map(_is_tensor, node.all_input_nodes))
    return made and isinstance(node.meta.get("val"), torch.Tensor)
