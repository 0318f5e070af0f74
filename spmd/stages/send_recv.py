"""Messages between the stages of a pipeline: what is sent and received together, how it lies then, when it waits."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes import Collective, Kind, PartitionError, Phase, Role
from passes.ir.collectives import WAIT
from passes.runtime.message_collectives import recv, send

from ..micro_batches.lines import described
from .agreed import Agreed
from .bodies import Body, UpdateBody

aten = torch.ops.aten


@dataclass(frozen=True)
class Message:
    """Values that one stage sends to another, one after the other."""

    nodes: tuple[fx.Node, ...]
    source: int
    target: int
    agreed: Agreed = field(repr=False, compare=False)

    @property
    def channel(self) -> str:
        """The name that sender and receiver share."""
        return f"{self.nodes[0].name}.{self.source}.{self.target}"

    @property
    def sent(self) -> list[torch.Tensor]:
        """Each value as it lies when it is sent, as a fake tensor."""
        return [self.agreed.dense(node)[0] for node in self.nodes]

    @property
    def val(self) -> torch.Tensor:
        """The fake tensor of what is sent: several values in a row."""
        first = self.sent[0]
        return first if len(self.nodes) == 1 else first.new_empty([sum(each.numel() for each in self.sent)])


def _messages(body: Body, nodes: Iterable[fx.Node], source: int, target: int) -> list[Message]:
    """Micro-batches send each value when it is there; what runs once, all of one dtype together."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in body.whole.graph.nodes:
        if node in set(nodes):
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise PartitionError(
                    f"{described(node)} is a number that one stage of a pipeline computes and another one reads: "
                    "return it as a tensor, look at it outside of the step, or compute it of arguments"
                )
            groups.setdefault(node.meta["val"].dtype if isinstance(body, UpdateBody) else node, []).append(node)
    return [Message(tuple(group), source, target, body.placed.agreed) for group in groups.values()]


def sent_by(body: Body) -> list[Message]:
    """The messages that a program sends, to one stage after the other."""
    peers = sorted({other for _, other in body.sent})
    return [m for k in peers for m in _messages(body, [n for n, other in body.sent if other == k], body.stage, k)]


def received_by(body: Body) -> list[Message]:
    """The messages that a program receives, from one stage after the other."""
    peers = sorted(set(body.received.values()))
    return [m for k in peers for m in _messages(body, [n for n, o in body.received.items() if o == k], k, body.stage)]


class MessageWriter:
    """Writes sends and receives of a body's program over the mesh axis number ``axis``.

    ``env``: the node that was written for each of the whole program; ``pending``: what later programs of the stage
    take, by name.
    """

    def __init__(self, body: Body, axis: int) -> None:
        self.body, self.axis = body, axis
        self.graph, self.env = fx.Graph(), dict[fx.Node, fx.Node]()
        self.pending: dict[str, fx.Node] = {}

    def receive(self, message: Message) -> fx.Node:
        """Start to receive."""
        val = message.val
        return self._message(
            recv.default, (list(val.shape), val.dtype, val.device, self._rank(message.source)), message, val
        )

    def unpack(self, message: Message, arrived: fx.Node) -> None:
        """Give each node its value, with the strides that it has on its own stage."""
        parts = [arrived]
        if len(message.nodes) > 1:
            sizes = [each.numel() for each in message.sent]
            vals = arrived.meta["val"].split(sizes)
            split = self.new(aten.split_with_sizes.default, (arrived, sizes), arrived, list(vals))
            parts = [self.new(operator.getitem, (split, k), arrived, val) for k, val in enumerate(vals)]
        for node, part, val in zip(message.nodes, parts, message.sent, strict=True):
            order = message.agreed.dense(node)[1]
            value = part if part is arrived else self.new(aten.view.default, (part, list(val.shape)), node, val)
            if order is not None:
                back = sorted(range(len(order)), key=order.__getitem__)
                value = self.new(aten.permute.default, (value, back), node, val.permute(back))
            self.env[node] = value

    def send(self, message: Message) -> None:
        """Start to send; the value and what to wait for are handed on."""
        sent = [self._as_sent(node, message.agreed) for node in message.nodes]
        operand = sent[0]
        if len(sent) > 1:
            vals = [each.meta["val"] for each in sent]
            flat = [
                self.new(aten.reshape.default, (each, [-1]), each, val.reshape(-1))
                for each, val in zip(sent, vals, strict=True)
            ]
            operand = self.new(aten.cat.default, (flat,), message.nodes[0], message.val)
        token = self._message(send.default, (operand, self._rank(message.target)), message, message.val.new_empty([0]))
        self.pending |= {f"sending.{message.channel}": operand, f"sent.{message.channel}": token}

    def _as_sent(self, node: fx.Node, agreed: Agreed) -> fx.Node:
        sent, (val, order) = self.env[node], agreed.dense(node)
        if order is not None:
            return self.new(aten.permute.default, (sent, list(order)), node, val)
        if agreed.is_contiguous(node):
            return sent
        return self.new(aten.clone.default, (sent,), node, val, {"memory_format": torch.contiguous_format})

    def _rank(self, stage: int) -> int:
        return stage % self.body.placed.ranks

    def _group(self, message: Message) -> str:
        """On NCCL, which runs the messages of a group in one line, those to earlier ranks have a group of their own."""
        axis = self.body.whole.mesh.axes[self.axis]
        goes_back = self._rank(message.target) < self._rank(message.source)
        return axis.gathers if axis.backend == "nccl" and goes_back else axis.group

    def _message(self, op: Any, arguments: tuple[Any, ...], message: Message, val: Any) -> fx.Node:
        axis, first = self.body.whole.mesh.axes[self.axis], message.nodes[0]
        made = self.new(op, (*arguments, message.channel, self._group(message)), first, val)
        role = Role.GRADIENT if first.meta.get("phase") is Phase.BACKWARD else Role.ACTIVATION
        kind = Kind.SEND if op is send.default else Kind.RECV
        why = f"stage {message.source} computes it, and stage {message.target} reads it"
        made.meta["collective"] = Collective(kind, axis.name, role=role, why=why)
        return made

    def wait(self, message: fx.Node, node: fx.Node) -> fx.Node:
        """Wait for what was started, for ``node``."""
        return self.new(WAIT, (message,), node, message.meta["val"])

    def new(
        self, op: Any, arguments: tuple[Any, ...], node: fx.Node, val: Any, options: Mapping[str, Any] | None = None
    ) -> fx.Node:
        """Write an op that serves ``node``, with its phase, module, line and placement."""
        made = self.graph.call_function(op, arguments, dict(options or {}))
        made.meta = {key: node.meta[key] for key in ("phase", "module", "source", "placement") if key in node.meta}
        made.meta["val"] = val
        return made
