"""Divide a share whose nodes are placed into the programs of a bundle, by stage and part.

A value that another stage reads is sent there, to each stage once. What backward reads of forward on one stage waits in
a channel of that rank, a value for each micro-batch in flight. Views are taken again where they are read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from passes import Collective, Input, Kind, Output, OutputKind, Phase, Program, Role
from passes.analysis.aliases import is_view
from passes.ir.bundle import Bundle
from passes.ir.check_bundle import check_bundle
from passes.ir.collectives import WAIT, is_message, is_wait
from passes.runtime.message_collectives import recv, send

from .place_nodes import Part, Placed
from .schedules import Schedule, ended_role, orders, with_ends

aten = torch.ops.aten


def split_program(program: Program, placed: Placed, axis: int, schedule: Schedule) -> Bundle:
    """The bundle of all stages over the mesh axis number ``axis``."""
    parts = {(s, part): _Body(program, placed, s, part) for s in range(placed.count) for part in Part}
    for part in (Part.BACKWARD, Part.FORWARD, Part.UPDATE):
        for stage in range(placed.count):
            parts[stage, part].collect(parts)
    programs, receivers = dict[str, Program](), dict[str, list[str]]()
    senders: dict[str, list[str]] = {}
    for (stage, part), body in parts.items():
        if body.is_empty and part is not Part.UPDATE:
            continue
        role = role_of(part, stage)
        programs[role] = _Writer(body, axis).program(role)
        if part is not Part.UPDATE and body.sent:
            programs[ended_role(role)] = _ending(body, axis, ended_role(role))
            receivers[role] = [role_of(part, other) for other in sorted({other for _, other in body.sent})]
        senders[role] = [role_of(part, other) for other in sorted(set(body.received.values()))]
    micro = program.micro_batches
    assert micro is not None, "a pipeline runs micro-batches"
    found = orders(schedule, placed.count, micro.count, role_of)
    found = [[each for each in order if each[0] in programs] for order in found]
    whole = with_ends(found, receivers, senders)
    calls = [[*order, role_of(Part.UPDATE, stage)] for stage, order in enumerate(whole)]
    bundle = Bundle.of(program.name, programs, {"step": calls}, program.mesh.axes[axis].name, micro_batches=micro)
    check_bundle(bundle)
    return bundle


def role_of(part: str, stage: int) -> str:
    """``forward.0``."""
    return f"{part}.{stage}"


@dataclass
class _Body:
    """What one stage computes in one part: nodes, what it receives, what it takes of forward, and what it sends."""

    whole: Program
    placed: Placed
    stage: int
    part: Part
    computed: dict[fx.Node, None] = field(default_factory=dict)
    received: dict[fx.Node, int] = field(default_factory=dict)  # the stage that each comes from
    kept: dict[fx.Node, None] = field(default_factory=dict)  # taken from forward
    sent: dict[tuple[fx.Node, int], None] = field(default_factory=dict)  # with the stages that receive
    handed_on: dict[fx.Node, None] = field(default_factory=dict)  # to backward
    read: set[fx.Node] = field(default_factory=set)  # inputs

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not any(True for _ in self._own())

    @property
    def is_update(self) -> bool:
        """Whether it runs once."""
        return self.part is Part.UPDATE

    def _own(self) -> Iterable[fx.Node]:
        placed = self.placed
        if self.is_update:
            return (node for node, stages in placed.update.items() if self.stage in stages)
        return (n for n, stage in placed.stages.items() if stage == self.stage and placed.parts[n] is self.part)

    def collect(self, bodies: Mapping[tuple[int, Part], _Body]) -> None:
        """Find all that it needs; lets others send and hand on."""
        self.bodies = bodies
        for node in [*self._own(), *self.handed_on]:
            self._need(node)
        names = {each.name: node for node, each in zip(self.whole.placeholders, self.whole.inputs, strict=True)}
        for value, output in self.outputs:
            if output.kind is OutputKind.UPDATE:
                self._need(names[output.name])
            if isinstance(value, fx.Node):
                self._need(value)

    @cached_property
    def outputs(self) -> list[tuple[Any, Output]]:
        """What the whole program returns of it: everything, and of state what this stage keeps."""
        pairs, placed = zip(self.whole.output_values(), self.whole.outputs, strict=True), self.placed
        if not self.is_update:
            accumulated = [(value, output) for value, output in pairs if output.role is Role.ACCUMULATOR]
            return [(v, o) for v, o in accumulated if (placed.stages[v], placed.parts[v]) == (self.stage, self.part)]
        found = []
        for value, output in pairs:
            home = placed.homes.get(output.name if output.kind is OutputKind.UPDATE else output.of or "")
            is_here = home is None or not output.shape or self.stage in home
            if output.role is not Role.ACCUMULATOR and (is_here or output.kind is OutputKind.NEW):
                found.append((value if is_here else None, output))
        return found

    def _need(self, node: fx.Node) -> None:
        """Get the value of a node into this program, and all that it takes."""
        pending = [node]
        while pending:
            node = pending.pop()
            if node in self.computed or node in self.received or node in self.kept or node in self.read:
                continue
            if node.op == "placeholder":
                self.read.add(node)
            elif self.is_update and node in self.placed.grown and self.stage == self.placed.stages[node]:
                self.read.add(self.placed.grown[node])
                self.computed[node] = None
            elif self._is_here(node):
                self.computed[node] = None
                pending += node.all_input_nodes
            elif self._is_kept(node):
                self.kept[node] = None
                self.bodies[self.stage, Part.FORWARD].handed_on[node] = None
            else:
                self._receive(node)

    def _is_here(self, node: fx.Node) -> bool:
        placed = self.placed
        if self.is_update:
            return self.stage in placed.update.get(node, ()) and node not in placed.grown
        if node in placed.fixed or _is_view_of_values(node):
            return True
        if node in placed.free:
            return self.part is placed.parts[node] or not self._forward_has(node)
        return placed.stages[node] == self.stage and placed.parts[node] is self.part

    def _forward_has(self, node: fx.Node) -> bool:
        """Whether forward of this stage computes a value that follows from arguments: some node there reads it."""
        readers = [user for user in node.users if self.placed.stages.get(user) == self.stage]
        return any(self.placed.parts[user] is Part.FORWARD for user in readers)

    def _is_kept(self, node: fx.Node) -> bool:
        return self.part is Part.BACKWARD and self.placed.parts.get(node) is Part.FORWARD

    def _receive(self, node: fx.Node) -> None:
        source = min(self.placed.update[node]) if self.is_update else self.placed.stages[node]
        assert source != self.stage, f"{node} is computed on another stage"
        self.received[node] = source
        self.bodies[source, self.part].sent[node, self.stage] = None


def _is_view_of_values(node: fx.Node) -> bool:
    """Whether a node can be taken again from its operand wherever that is."""
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_view(node) and is_tensor and not is_wait(node) and node.target is not operator.getitem


class _Writer:
    """Writes the program of one stage and part."""

    def __init__(self, body: _Body, axis: int) -> None:
        self.body, self.axis = body, axis
        self.graph, self.env = fx.Graph(), dict[fx.Node, fx.Node]()
        self.inputs: list[Input] = []
        self.tokens: list[tuple[fx.Node, fx.Node]] = []  # what is sent, with the message that sends it

    def program(self, role: str) -> Program:
        """The program, whose nodes stand in the order of the whole one."""
        whole, body = self.body.whole, self.body
        for node, declared in zip(whole.placeholders, whole.inputs, strict=True):
            if node in body.read:
                self._copy(node)
                self.inputs.append(declared)
        for node in body.kept:
            self._take(node)
        early = [] if body.is_update else [node for node in whole.graph.nodes if node in body.received]
        arriving = [self._receive(node) for node in early]
        for node, started in zip(early, arriving, strict=True):
            self._arrive(node, started)
        for node in whole.graph.nodes:
            if body.is_update and node in body.received:
                self._arrive(node, self._receive(node))
            elif node in body.computed:
                self._compute(node)
            for other in range(body.placed.count):
                if (node, other) in body.sent:
                    self._send(node, other)
        return self._finished(role)

    def _finished(self, role: str) -> Program:
        body = self.body
        values = [self._returned(value, output) for value, output in body.outputs]
        outputs = [output for _, output in body.outputs]
        if body.is_update:
            for _, message in self.tokens:
                self._wait(message)
        else:
            pending = {each: each.name for pair in self.tokens for each in pair}
            pending |= {self.env[node]: node.name for node in body.handed_on}
            values += pending
            outputs += [_pending_output(node, name, body.stage) for node, name in pending.items()]
        self.graph.output(tuple(values))
        return _program(body, self.axis, self.graph, self.inputs, outputs, role)

    def _returned(self, value: Any, output: Output) -> Any:
        """The value of an output, in memory of its own: the next call adds up in that of accumulators."""
        if value is None and output.kind is OutputKind.NEW:
            return self._nothing(output)
        returned = fx.map_arg(value, self.env.__getitem__)
        while isinstance(value, fx.Node) and is_view(value) and value not in self.body.placed.grown:
            value = value.args[0]
        if not self.body.is_update or output.kind is OutputKind.UPDATE or value not in self.body.placed.grown:
            return returned
        return self._new(aten.clone.default, (returned,), value, returned.meta["val"])

    def _copy(self, node: fx.Node) -> None:
        self.env[node] = self.graph.node_copy(node, self.env.__getitem__)

    def _take(self, node: fx.Node) -> None:
        declared = _pending_output(node, node.name, self.body.stage)
        self.env[node] = self.graph.placeholder(declared.name.replace(".", "_"))
        self.env[node].meta = {"val": node.meta["val"]}
        self.inputs.append(_taking(declared))

    def _compute(self, node: fx.Node) -> None:
        if self.body.is_update and node in self.body.placed.grown:
            self.env[node] = self.env[self.body.placed.grown[node]]
        elif node not in self.env:
            self._copy(node)

    def _receive(self, node: fx.Node) -> fx.Node:
        val, source = _dense(node)[0], self.body.received[node]
        arguments = list(val.shape), val.dtype, val.device, source, _channel(node, source, self.body.stage), self.group
        return self._message(recv.default, arguments, node, val, Kind.RECV)

    def _arrive(self, node: fx.Node, started: fx.Node) -> None:
        arrived, (_, order) = self._wait(started, node), _dense(node)
        if order is not None:
            back = sorted(range(len(order)), key=order.__getitem__)
            arrived = self._new(aten.permute.default, (arrived, back), node, arrived.meta["val"].permute(back))
        self.env[node] = arrived

    def _send(self, node: fx.Node, peer: int) -> None:
        sent, (val, order) = self.env[node], _dense(node)
        if order is not None:
            sent = self._new(aten.permute.default, (sent, list(order)), node, val)
        elif not node.meta["val"].is_contiguous():
            sent = self._new(aten.clone.default, (sent,), node, val, {"memory_format": torch.contiguous_format})
        arguments = sent, peer, _channel(node, self.body.stage, peer), self.group
        self.tokens.append((sent, self._message(send.default, arguments, node, val.new_empty([0]), Kind.SEND)))

    @property
    def group(self) -> str:
        """The group of the ranks of all stages."""
        return self.body.whole.mesh.axes[self.axis].group

    def _message(self, op: Any, arguments: tuple[Any, ...], node: fx.Node, val: Any, kind: Kind) -> fx.Node:
        made = self._new(op, arguments, node, val)
        axis, role = self.body.whole.mesh.axes[self.axis].name, Role.GRADIENT if _is_backward(node) else Role.ACTIVATION
        why = f"{node.name} is computed on one stage and read on another one"
        made.meta["collective"] = Collective(kind, axis, role=role, why=why)
        return made

    def _wait(self, message: fx.Node, node: fx.Node | None = None) -> fx.Node:
        return self._new(WAIT, (message,), node or message, message.meta["val"])

    def _nothing(self, output: Output) -> fx.Node:
        """This rank's part of new state that another stage keeps."""
        shape = [0, *output.shape[1:]]
        made = self.graph.call_function(aten.zeros.default, (shape,), {"dtype": output.dtype, "device": self._device})
        made.meta["val"] = next(iter(self.env.values())).meta["val"].new_empty(shape, dtype=output.dtype)
        return made

    @property
    def _device(self) -> torch.device:
        vals = (node.meta.get("val") for node in self.body.whole.placeholders)
        return next(val.device for val in vals if isinstance(val, torch.Tensor))

    def _new(
        self, op: Any, arguments: tuple[Any, ...], node: fx.Node, val: Any, options: Mapping[str, Any] | None = None
    ) -> fx.Node:
        made = self.graph.call_function(op, arguments, dict(options or {}))
        made.meta = {key: node.meta[key] for key in ("phase", "module", "source", "placement") if key in node.meta}
        made.meta["val"] = val
        return made


def _program(
    body: _Body, axis: int, graph: fx.Graph, inputs: Sequence[Input], outputs: Sequence[Output], role: str
) -> Program:
    whole = body.whole
    axes = [replace(each, coordinate=body.stage) if k == axis else each for k, each in enumerate(whole.mesh.axes)]
    made = replace(whole, mesh=replace(whole.mesh, axes=tuple(axes)), name=f"{whole.name}-{role}", micro_batches=None)
    return made.with_graph(graph, inputs, outputs)


def _ending(body: _Body, axis: int, role: str) -> Program:
    """The program that waits for what a micro-batch has sent, and lets go of it."""
    sender = _Writer(body, axis).program(role)
    returned = dict(zip(sender.output_values(), sender.outputs, strict=True))
    messages = [value for value in returned if is_message(value)]
    graph, taken = fx.Graph(), list(dict.fromkeys(each for node in messages for each in (node, node.args[0])))
    for node in taken:
        graph.placeholder(returned[node].name.replace(".", "_")).meta["val"] = node.meta["val"]
    for placeholder, node in zip(graph.find_nodes(op="placeholder"), taken, strict=True):
        if node in messages:
            graph.call_function(WAIT, (placeholder,)).meta["val"] = node.meta["val"]
    graph.output(())
    return _program(body, axis, graph, [_taking(returned[node]) for node in taken], [], role)


def _dense(node: fx.Node) -> tuple[torch.Tensor, list[int] | None]:
    """The value as it is sent, and the order of dims that makes it contiguous, if it is another than its own."""
    val: torch.Tensor = node.meta["val"]
    if val.is_contiguous():
        return val, None
    order = sorted(range(val.ndim), key=val.stride, reverse=True)
    permuted = val.permute(order)
    return (permuted, order) if permuted.is_contiguous() else (val.contiguous(), None)


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("phase") is Phase.BACKWARD


def _channel(node: fx.Node, source: int, target: int) -> str:
    return f"{node.name}.{source}.{target}"


def _pending_output(node: fx.Node, name: str, stage: int) -> Output:
    val = node.meta["val"]
    return Output(OutputKind.PENDING, f"pending.{name}.{stage}", Role.PENDING, tuple(val.shape), val.dtype)


def _taking(output: Output) -> Input:
    return Input(Role.PENDING, output.name, output.shape, output.dtype)
