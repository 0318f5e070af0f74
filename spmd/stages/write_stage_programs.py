"""Write the programs of a pipeline: inputs, what arrives, what is computed, what is sent and handed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes import Input, Output, OutputKind, Program, Role
from passes.analysis.aliases import is_view

from .bodies import Body, MicroBody, UpdateBody
from .schedules import ended_role, started_role
from .send_recv import Message, MessageWriter, received_by, sent_by

aten = torch.ops.aten


def receives_early(body: Body, axis: int) -> bool:
    """Whether a program of its own starts to receive what a micro-batch reads, while the one before it computes.

    gloo moves a message once both ends have started it, and each end may compute then. On NCCL it would hold up what
    its process group exchanges after it.
    """
    return isinstance(body, MicroBody) and bool(body.received) and body.whole.mesh.axes[axis].backend != "nccl"


def write_body(body: Body, axis: int) -> Program:
    """The program of a body, which sends over the mesh axis number ``axis``."""
    return _Writer(body, axis).program()


def write_start(body: Body, axis: int) -> Program:
    """The program that starts to receive what a micro-batch reads, while the one before it computes."""
    writer = _Writer(body, axis)
    writer.pending = {_arriving(message): writer.receive(message) for message in received_by(body)}
    return writer.finished([], [], started_role(body.role))


def write_ending(body: Body, axis: int) -> Program:
    """The program that waits for what a micro-batch has sent, and lets go of it."""
    writer = _Writer(body, axis)
    writer.end(body)
    return writer.finished([], [], ended_role(body.role))


class _Writer(MessageWriter):
    """Writes one program, whose nodes stand in the order of the whole one."""

    def __init__(self, body: Body, axis: int) -> None:
        super().__init__(body, axis)
        self.inputs: list[Input] = []

    def program(self) -> Program:
        body = self.body
        for node, declared in zip(body.whole.placeholders, body.whole.inputs, strict=True):
            if node in body.read:
                self._copy(node)
                self.inputs.append(declared)
        for node, source in body.kept.items():
            self.env[node] = self._take(_handed_on(node, source), node.meta["val"])
        waits = [] if body.before is None else list(self._take_messages_of(body.before))
        arriving = [(message, self._started(message)) for message in received_by(body)]
        for message, started in arriving:
            self.unpack(message, self.wait(started, message.nodes[0]))
        leaving = sent_by(body)
        for node in body.whole.graph.nodes:
            if node in body.computed:
                self._compute(node)
            for message in leaving if isinstance(body, MicroBody) else ():
                if message.nodes == (node,):
                    self.send(message)
        for message in leaving if isinstance(body, UpdateBody) else ():
            self.send(message)
        values = [self._returned(value, output) for value, output in body.outputs]
        for token in waits:
            self.wait(token, token)
        self.pending |= {_handed_on(node, body): self.env[node] for node in body.handed_on}
        return self.finished(values, [output for _, output in body.outputs], body.role)

    def _started(self, message: Message) -> fx.Node:
        """Receive a message, in a program of its own if that starts early."""
        if receives_early(self.body, self.axis):
            return self._take(_arriving(message), message.val)
        return self.receive(message)

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
        return self.new(aten.clone.default, (returned,), value, returned.meta["val"])

    def _nothing(self, output: Output) -> fx.Node:
        """This rank's part of new state that another stage keeps."""
        vals = (node.meta.get("val") for node in self.body.whole.placeholders)
        like = next(val for val in vals if isinstance(val, torch.Tensor))
        shape = [0, *output.shape[1:]]
        made = self.graph.call_function(aten.zeros.default, (shape,), {"dtype": output.dtype, "device": like.device})
        made.meta["val"] = like.new_empty(shape, dtype=output.dtype)
        return made

    def end(self, body: Body) -> None:
        """Wait for all that another program has sent."""
        for token in self._take_messages_of(body):
            self.wait(token, token)

    def _take_messages_of(self, body: Body) -> Iterator[fx.Node]:
        for message in sent_by(body):
            self._take(f"sending.{message.channel}", message.val)
            yield self._take(f"sent.{message.channel}", message.val.new_empty([0]))

    def _take(self, name: str, val: Any) -> fx.Node:
        declared = _pending_output(name, val)
        self.inputs.append(Input(Role.CHANNEL, declared.name, declared.shape, declared.dtype))
        node = self.graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = val
        return node


def _handed_on(node: fx.Node, body: Body) -> str:
    return f"kept.{node.name}.{body.role}"


def _arriving(message: Message) -> str:
    return f"receiving.{message.channel}"


def _pending_output(name: str, val: Any) -> Output:
    return Output(OutputKind.CHANNEL, f"pending.{name}", Role.CHANNEL, tuple(val.shape), val.dtype)
