"""The operations of a stream program as lines of generated code.

A node that runs on a stream of its own is issued with that as the current stream, into memory that was allocated as the
stream goes on that computes. The waits in the graph have no line: the stream program has operations for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir.collectives import OUT_VARIANTS
from passes.runtime.host_memory import copy_in_stream, like, to_device, to_device_out, to_host
from passes.runtime.streams import DeviceStreams
from passes.schedule.streams import (
    COMPUTE,
    HOST,
    Begin,
    Free,
    Launch,
    Operation,
    Record,
    StreamProgram,
    Wait,
)
from passes.schedule.touched_memory import TouchedMemory

Name = Callable[[Any], str]  # the name in the text for a value that has no literal


class StreamLines:
    """Gives the lines around those of each node, in the order of the operations."""

    def __init__(self, memory: TouchedMemory, streams: StreamProgram, device: DeviceStreams, name: Name) -> None:
        self._name, self._device, self.program = name, device, streams
        self._pending = list(reversed(streams.operations))
        self._stream = {each.node: each.stream for each in streams.operations if isinstance(each, Launch)}
        beside = [stream for stream in streams.streams if stream != COMPUTE]
        self._streams = {COMPUTE: "compute"} | {stream: f"stream{k}" for k, stream in enumerate(beside)}
        self._freed = _freed(memory, streams)
        self.has_begun = False  # whether the line stands that names the stream that computes
        self.freed = {node for nodes in self._freed.values() for node in nodes}  # their names have their own lines

    def prepare(self) -> Iterator[str]:
        """The lines that run once: they make streams and events."""
        device = self._name(self._device)
        for stream, name in self._streams.items():
            if stream != COMPUTE:
                yield f"{name} = {device}.stream({stream!r})"
        for event in range(self.program.events):
            yield f"event{event} = {device}.event()"

    def before(self, node: fx.Node, names: dict[fx.Node, str], fixed: Collection[fx.Node]) -> Iterator[str]:
        """The lines of all operations as far as the launch of ``node``, of which there may be none."""
        if node not in self._stream and node.op != "output":
            return
        while self._pending:
            operation = self._pending.pop()
            if isinstance(operation, Launch) and operation.node is node:
                return
            yield from self._line(operation, names, fixed)

    def after(self, node: fx.Node) -> Iterator[str]:
        """The lines that record events right behind ``node``."""
        while node in self._stream and self._pending and isinstance(self._pending[-1], Record):
            yield from self._line(self._pending.pop(), {}, ())

    def on(self, node: fx.Node) -> str:
        """The prefix of a line that issues ``node`` on its own stream; empty for the compute stream and the host."""
        stream = self._stream.get(node, COMPUTE)
        return "" if stream in (COMPUTE, HOST) else f"with {self._name(self._device)}.on({self._streams[stream]}): "

    def _line(self, operation: Operation, names: dict[fx.Node, str], fixed: Collection[fx.Node]) -> Iterator[str]:
        match operation:
            case Begin(stream) if stream == COMPUTE:
                self.has_begun = True
                yield f"compute = {self._name(self._device)}.current()"
            case Record(stream, event):
                yield f"event{event}.record({self._streams[stream]})"
            case Wait(stream, event):
                yield f"event{event}.synchronize()" if stream == HOST else f"event{event}.wait({self._streams[stream]})"
            case Free(_, _):
                dead = [names[node] for node in self._freed[operation] if node not in fixed]
                yield from [f"del {', '.join(dead)}"] if dead else []


def _freed(memory: TouchedMemory, streams: StreamProgram) -> dict[Free, list[fx.Node]]:
    """The nodes whose names are dropped where memory is freed: at the last of it, if they may lie in several pieces."""
    last = dict[fx.Node, Free]()
    for operation in streams.operations:
        if isinstance(operation, Free):
            last |= dict.fromkeys(memory.holders(operation.piece), operation)
    freed: dict[Free, list[fx.Node]] = defaultdict(list)
    for node, operation in last.items():
        freed[operation].append(node)
    return freed


def allocation(node: fx.Node) -> Callable[..., Tensor] | None:
    """The function that allocates a transfer's result from the transfer's arguments; None if it is given memory."""
    if node.target in (to_device, to_host):
        return like if node.target is to_device else _like_on_host
    val = node.meta["val"]
    return partial(_empty, val.shape, val.dtype, val.device) if node.target in OUT_VARIANTS else None


def writer(node: fx.Node) -> Callable[..., Any]:
    """The function that performs a transfer into memory given as ``out``, after its other arguments."""
    if node.target in (to_device, to_device_out):
        return _to_device
    if node.target is to_host:
        return _to_host
    op: Callable[..., Any] = OUT_VARIANTS.get(node.target, node.target)
    return op


def _to_device(x: Tensor, device: torch.device, *, out: Tensor) -> Tensor:
    return copy_in_stream(x, out=out)


def _to_host(x: Tensor, pin_memory: bool, *, out: Tensor) -> Tensor:
    return copy_in_stream(x, out=out)


def _like_on_host(x: Tensor, pin_memory: bool) -> Tensor:
    return like(x, torch.device("cpu"), pin_memory and x.is_cuda)


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device, *_: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
