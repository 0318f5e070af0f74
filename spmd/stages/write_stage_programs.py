"""Write the programs of a pipeline: inputs, what arrives, what is computed, what is sent and handed on."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes import Collective, Input, Kind, Output, OutputKind, PartitionError, Phase, Program, Role
from passes.analysis.aliases import is_view
from passes.ir.collectives import WAIT
from passes.runtime.message_collectives import recv, send

from ..micro_batches.lines import described
from .schedules import ended_role
from .stage_programs import Body, MicroBody, UpdateBody

aten = torch.ops.aten


def write_body(body: Body, axis: int) -> Program:
    """The program of a body, which sends over the mesh axis number ``axis``."""
    return _Writer(body, axis).program()


def write_ending(body: Body, axis: int) -> Program:
    """The program that waits for what a micro-batch has sent, and lets go of it."""
    writer = _Writer(body, axis)
    writer.end(body)
    return writer.finished([], [], ended_role(body.role))


@dataclass(frozen=True)
class _Message:
    """Values that one stage sends to another, one after the other. ``sent``: each as it lies then."""

    nodes: tuple[fx.Node, ...]
    source: int
    target: int

    @property
    def channel(self) -> str:
        return f"{self.nodes[0].name}.{self.source}.{self.target}"

    @property
    def sent(self) -> list[torch.Tensor]:
        return [_dense(node)[0] for node in self.nodes]

    @property
    def val(self) -> torch.Tensor:
        """What is sent, as a fake tensor."""
        first = self.sent[0]
        return first if len(self.nodes) == 1 else first.new_empty([sum(each.numel() for each in self.sent)])


def _messages(body: Body, nodes: Iterable[fx.Node], source: int, target: int) -> list[_Message]:
    """Micro-batches send each value when it is there; what runs once, all of one dtype together."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in body.whole.graph.nodes:
        if node in set(nodes):
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise PartitionError(
                    f"{described(node)} is a number that one stage of a pipeline computes and another one reads: "
                    "return it as a tensor, or compute it of arguments"
                )
            groups.setdefault(node.meta["val"].dtype if isinstance(body, UpdateBody) else node, []).append(node)
    return [_Message(tuple(group), source, target) for group in groups.values()]


def _sent_by(body: Body) -> list[_Message]:
    peers = sorted({other for _, other in body.sent})
    return [m for k in peers for m in _messages(body, [n for n, other in body.sent if other == k], body.stage, k)]


def _received_by(body: Body) -> list[_Message]:
    peers = sorted(set(body.received.values()))
    return [m for k in peers for m in _messages(body, [n for n, o in body.received.items() if o == k], k, body.stage)]


class _Writer:
    """Writes one program, whose nodes stand in the order of the whole one."""

    def __init__(self, body: Body, axis: int) -> None:
        self.body, self.axis = body, axis
        self.graph, self.env = fx.Graph(), dict[fx.Node, fx.Node]()
        self.inputs: list[Input] = []
        self.pending: dict[str, fx.Node] = {}  # what later programs of the stage take, by name

    def program(self) -> Program:
        body = self.body
        for node, declared in zip(body.whole.placeholders, body.whole.inputs, strict=True):
            if node in body.read:
                self._copy(node)
                self.inputs.append(declared)
        for node, source in body.kept.items():
            self.env[node] = self._take(_handed_on(node, source), node.meta["val"])
        waits = [] if body.before is None else list(self._take_messages_of(body.before))
        arriving = [(message, self._receive(message)) for message in _received_by(body)]
        for message, started in arriving:
            self._unpack(message, self._wait(started, message.nodes[0]))
        leaving = _sent_by(body)
        for node in body.whole.graph.nodes:
            if node in body.computed:
                self._compute(node)
            for message in leaving if isinstance(body, MicroBody) else ():
                if message.nodes == (node,):
                    self._send(message)
        for message in leaving if isinstance(body, UpdateBody) else ():
            self._send(message)
        values = [self._returned(value, output) for value, output in body.outputs]
        for token in waits:
            self._wait(token, token)
        self.pending |= {_handed_on(node, body): self.env[node] for node in body.handed_on}
        return self.finished(values, [output for _, output in body.outputs], body.role)

    def finished(self, values: Sequence[Any], outputs: Sequence[Output], role: str) -> Program:
        """The program of what was written so far."""
        whole, rank = self.body.whole, self.body.rank
        pending = [_pending_output(name, node.meta["val"]) for name, node in self.pending.items()]
        self.graph.output((*values, *self.pending.values()))
        axes = [replace(each, coordinate=rank) if k == self.axis else each for k, each in enumerate(whole.mesh.axes)]
        names = {each.name for each in self.inputs}
        units = [tuple(name for name in unit if name in names) for unit in whole.units]
        made = replace(
            whole,
            mesh=replace(whole.mesh, axes=tuple(axes)),
            name=f"{whole.name}-{role}",
            units=tuple(filter(None, units)),
            micro_batches=None,
        )
        return made.with_graph(self.graph, self.inputs, [*outputs, *pending])

    def _copy(self, node: fx.Node) -> None:
        self.env[node] = self.graph.node_copy(node, self.env.__getitem__)

    def _compute(self, node: fx.Node) -> None:
        grown = self.body.placed.grown if isinstance(self.body, UpdateBody) else {}
        if node in grown:
            self.env[node] = self.env[grown[node]]
        else:
            self._copy(node)

    def _returned(self, value: Any, output: Output) -> Any:
        """The value of an output, in memory of its own: the next call adds up in that of accumulators."""
        if value is None and output.kind is OutputKind.NEW:
            return self._nothing(output)
        returned = fx.map_arg(value, self.env.__getitem__)
        while isinstance(value, fx.Node) and is_view(value) and value not in self.body.placed.grown:
            value = value.args[0]
        lives_on = isinstance(self.body, UpdateBody) and output.kind is not OutputKind.UPDATE
        if not lives_on or value not in self.body.placed.grown:
            return returned
        return self._new(aten.clone.default, (returned,), value, returned.meta["val"])

    def _nothing(self, output: Output) -> fx.Node:
        """This rank's part of new state that another stage keeps."""
        vals = (node.meta.get("val") for node in self.body.whole.placeholders)
        like = next(val for val in vals if isinstance(val, torch.Tensor))
        shape = [0, *output.shape[1:]]
        made = self.graph.call_function(aten.zeros.default, (shape,), {"dtype": output.dtype, "device": like.device})
        made.meta["val"] = like.new_empty(shape, dtype=output.dtype)
        return made

    # Messages

    def _receive(self, message: _Message) -> fx.Node:
        val = message.val
        return self._message(
            recv.default, (list(val.shape), val.dtype, val.device, self._rank(message.source)), message, val
        )

    def _unpack(self, message: _Message, arrived: fx.Node) -> None:
        """Give each node its value, with the strides that it has on its own stage."""
        parts = [arrived]
        if len(message.nodes) > 1:
            sizes = [each.numel() for each in message.sent]
            vals = arrived.meta["val"].split(sizes)
            split = self._new(aten.split_with_sizes.default, (arrived, sizes), arrived, list(vals))
            parts = [self._new(operator.getitem, (split, k), arrived, val) for k, val in enumerate(vals)]
        for node, part, val in zip(message.nodes, parts, message.sent, strict=True):
            order = _dense(node)[1]
            value = part if part is arrived else self._new(aten.view.default, (part, list(val.shape)), node, val)
            if order is not None:
                back = sorted(range(len(order)), key=order.__getitem__)
                value = self._new(aten.permute.default, (value, back), node, val.permute(back))
            self.env[node] = value

    def _send(self, message: _Message) -> None:
        """Start to send; the value and what to wait for are handed on."""
        sent = [self._as_sent(node) for node in message.nodes]
        operand = sent[0]
        if len(sent) > 1:
            vals = [each.meta["val"] for each in sent]
            flat = [
                self._new(aten.reshape.default, (each, [-1]), each, val.reshape(-1))
                for each, val in zip(sent, vals, strict=True)
            ]
            operand = self._new(aten.cat.default, (flat,), message.nodes[0], message.val)
        token = self._message(send.default, (operand, self._rank(message.target)), message, message.val.new_empty([0]))
        self.pending |= {f"sending.{message.channel}": operand, f"sent.{message.channel}": token}

    def _as_sent(self, node: fx.Node) -> fx.Node:
        sent, (val, order) = self.env[node], _dense(node)
        if order is not None:
            return self._new(aten.permute.default, (sent, list(order)), node, val)
        if node.meta["val"].is_contiguous():
            return sent
        return self._new(aten.clone.default, (sent,), node, val, {"memory_format": torch.contiguous_format})

    def end(self, body: Body) -> None:
        """Wait for all that another program has sent."""
        for token in self._take_messages_of(body):
            self._wait(token, token)

    def _take_messages_of(self, body: Body) -> Iterator[fx.Node]:
        for message in _sent_by(body):
            self._take(f"sending.{message.channel}", message.val)
            yield self._take(f"sent.{message.channel}", message.val.new_empty([0]))

    def _take(self, name: str, val: Any) -> fx.Node:
        declared = _pending_output(name, val)
        self.inputs.append(Input(Role.PENDING, declared.name, declared.shape, declared.dtype))
        node = self.graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = val
        return node

    def _rank(self, stage: int) -> int:
        return stage % self.body.placed.ranks

    def _message(self, op: Any, arguments: tuple[Any, ...], message: _Message, val: Any) -> fx.Node:
        axis, first = self.body.whole.mesh.axes[self.axis], message.nodes[0]
        made = self._new(op, (*arguments, message.channel, axis.group), first, val)
        role = Role.GRADIENT if first.meta.get("phase") is Phase.BACKWARD else Role.ACTIVATION
        kind = Kind.SEND if op is send.default else Kind.RECV
        why = f"stage {message.source} computes it, and stage {message.target} reads it"
        made.meta["collective"] = Collective(kind, axis.name, role=role, why=why)
        return made

    def _wait(self, message: fx.Node, node: fx.Node) -> fx.Node:
        return self._new(WAIT, (message,), node, message.meta["val"])

    def _new(
        self, op: Any, arguments: tuple[Any, ...], node: fx.Node, val: Any, options: Mapping[str, Any] | None = None
    ) -> fx.Node:
        made = self.graph.call_function(op, arguments, dict(options or {}))
        made.meta = {key: node.meta[key] for key in ("phase", "module", "source", "placement") if key in node.meta}
        made.meta["val"] = val
        return made


def _dense(node: fx.Node) -> tuple[torch.Tensor, list[int] | None]:
    """The value as it is sent, and the order of dims that makes it contiguous, if it is another than its own."""
    val: torch.Tensor = node.meta["val"]
    if val.is_contiguous():
        return val, None
    order = sorted(range(val.ndim), key=val.stride, reverse=True)
    permuted = val.permute(order)
    return (permuted, order) if permuted.is_contiguous() else (val.contiguous(), None)


def _handed_on(node: fx.Node, body: Body) -> str:
    return f"kept.{node.name}.{body.role}"


def _pending_output(name: str, val: Any) -> Output:
    return Output(OutputKind.PENDING, f"pending.{name}", Role.PENDING, tuple(val.shape), val.dtype)
