"""Streams of a GPU: the operations that the host issues for one call, with streams and events.

Compute runs on one stream, the collectives of a communicator on a stream of their own, and so do copies to the device
and copies to the host. Memory is allocated and freed as the stream that computes goes on. Each operation waits for
those on other streams whose memory it touches, and for nothing else: an event is recorded right behind what has to be
waited for. The host waits only for what it reads or writes itself, in host memory.

``happens_before.py`` proves such a list; ``spmd/lowering/codegen.py`` writes the code that issues it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..ir.collectives import OUT_VARIANTS, group_of, is_collective, is_message, peer_of, waits_of
from ..ir.program import Program
from ..runtime.arena import reserve
from ..runtime.host_memory import to_host
from .node_costs import device_of
from .segments import Segments
from .touched_memory import COPIES, COPIES_TO_DEVICE, Access, TouchedMemory, devices_of, is_on

HOST, COMPUTE, TO_DEVICE, TO_HOST = "host", "compute", "to device", "to host"


@dataclass(frozen=True)
class Operation:
    """Something that the host issues on ``stream``; what it issues on ``HOST`` it does itself, at once."""

    stream: str


@dataclass(frozen=True)
class Begin(Operation):
    """The call begins: state, arguments and arenas are as earlier work on this stream leaves them."""


@dataclass(frozen=True)
class Launch(Operation):
    """``node`` runs."""

    node: fx.Node


@dataclass(frozen=True)
class HostAccess(Operation):
    """The host reads the operands of ``node`` that lie in host memory, or writes its result there."""

    node: fx.Node
    writes: bool


@dataclass(frozen=True)
class Allocate(Operation):
    """Memory for the result of ``node``, which runs on another stream; earlier work here may still use it."""

    node: fx.Node


@dataclass(frozen=True)
class Free(Operation):
    """The memory of ``piece`` may be allocated anew from here on."""

    piece: fx.Node


@dataclass(frozen=True)
class Record(Operation):
    """``event`` happens when all that was issued on the stream so far is done."""

    event: int


@dataclass(frozen=True)
class Wait(Operation):
    """Operations issued on the stream from here on run after ``event``, as it was recorded last."""

    event: int


@dataclass(frozen=True)
class StreamProgram:
    """All operations of one call, in the order in which the host issues them."""

    operations: tuple[Operation, ...]

    @property
    def streams(self) -> list[str]:
        """The streams besides ``HOST``, in order of first use."""
        return list(dict.fromkeys(each.stream for each in self.operations if each.stream != HOST))

    @property
    def events(self) -> int:
        """The number of events."""
        return sum(isinstance(each, Record) for each in self.operations)

    def __str__(self) -> str:
        return "\n".join(map(_line, self.operations))


def runs_on_streams(program: Program) -> bool:
    """Whether a program computes on a GPU, and NCCL performs all of its collectives, into memory that they are given.

    gloo moves tensors of a GPU, too, but by way of the host, which then waits. What a collective allocates itself would
    be memory of its stream, and not of the one that computes.
    """
    if device_of(program).type != "cuda":
        return False
    collectives = program.collectives()
    axes = [program.mesh.axis_of_group(group_of(node)) for node in collectives]
    with_out = {*OUT_VARIANTS, *OUT_VARIANTS.values()}
    return all(axis is not None and axis.backend == "nccl" for axis in axes) and all(
        node.target in with_out for node in collectives
    )


def assign_streams(program: Program, memory: TouchedMemory | None = None) -> StreamProgram:
    """The operations of a final program. The same on all ranks, but for what their graphs differ in.

    ``memory``: that of the program's graph, if it is known already.
    """
    assigner = _Assigner(program, memory or TouchedMemory(program.graph))
    for node in program.graph.nodes:
        assigner.issue(node)
    return StreamProgram(tuple(operation for entry in assigner.entries for operation in entry))


def stream_of(program: Program, node: fx.Node) -> str:
    """The stream that a node runs on: by its axis and group if it communicates, else by its devices."""
    if is_collective(node):
        group = group_of(node)
        axis = program.mesh.axis_of_group(group)
        if axis is None:
            return group
        if is_message(node):  # NCCL has a line for each two ranks of a group
            return f"{axis.name} {'with' if group == axis.group else 'back with'} {peer_of(node)}"
        return axis.name if group == axis.group else f"{axis.name} gathers"
    types = {device.type for device in devices_of(node)}
    if node.target in COPIES and types >= {"cpu", "cuda"}:
        return TO_DEVICE if node.target in COPIES_TO_DEVICE else TO_HOST
    return COMPUTE if "cuda" in types else HOST


_Clock = dict[str, int]  # how many operations of each stream are known to be done


@dataclass
class _Users:
    """Last uses of some bytes: the write, and the reads since then, by stream."""

    written: tuple[str, int] | None = None
    read: _Clock = field(default_factory=dict)

    def copy(self) -> _Users:
        return _Users(self.written, dict(self.read))


class _Assigner:
    """Issues node after node, and notes who used which memory."""

    def __init__(self, program: Program, memory: TouchedMemory) -> None:
        self.program, self.memory = program, memory
        self.entries: list[list[Operation]] = []
        self._known: dict[str, _Clock] = defaultdict(dict)  # what the next operation of a stream comes after
        self._at: dict[tuple[str, int], tuple[list[Operation], _Clock]] = {}  # each operation that may be waited for
        self._events: dict[tuple[str, int], int] = {}
        self._users: dict[fx.Node, Segments[_Users]] = defaultdict(lambda: Segments(_Users, _Users.copy))
        self._frees = _frees(program, self.memory)
        self._lasting = _Clock()  # the last copy of each stream whose host memory is there after the call
        self._begin()

    def _begin(self) -> None:
        inputs = [n for n in self.program.graph.nodes if n.op in ("placeholder", "get_attr")]
        accesses = [access for node in inputs for access in self.memory.allocated(node)]
        accesses += arenas(self.program.graph)
        for stream, kind in ((COMPUTE, "cuda"), (HOST, "cpu")):
            self._do(Begin(stream), [access for access in accesses if is_on(access.space, kind)])

    def issue(self, node: fx.Node) -> None:
        """Issue what a node does, and free what nobody uses behind it."""
        if self.memory.runs(node):
            self._run(node)
        elif node.op == "output":
            self._join()
        for piece in self._frees.get(node, ()):
            self._do(Free(COMPUTE, piece), [access_of(piece)])

    def _run(self, node: fx.Node) -> None:
        stream, accesses, made = stream_of(self.program, node), self.memory.of(node), self.memory.allocated(node)
        if stream not in (COMPUTE, HOST):
            self._allocate(node, made)
        beside = [each for each in accesses if stream == COMPUTE and not is_on(each.space, "cuda")]
        self._access(node, [each for each in beside if not each.writes], writes=False)
        self._do(Launch(stream, node), [each for each in accesses if each not in beside])
        if stream in (TO_DEVICE, TO_HOST) and any(self.memory.stays_on_host(each.space) for each in accesses):
            self._lasting[stream] = self._known[stream][stream]
        written = [each for each in beside if each.writes]
        if written:
            self._wait(HOST, {stream: self._known[stream][stream]})
            self._access(node, written, writes=True)

    def _allocate(self, node: fx.Node, made: Sequence[Access]) -> None:
        for stream, kind in ((COMPUTE, "cuda"), (HOST, "cpu")):
            here = [each for each in made if is_on(each.space, kind)]
            if here:
                self._do(Allocate(stream, node), here)

    def _access(self, node: fx.Node, accesses: Sequence[Access], writes: bool) -> None:
        if accesses:
            self._do(HostAccess(HOST, node, writes), accesses)

    def _do(self, operation: Operation, accesses: Sequence[Access]) -> None:
        """Issue an operation once its stream waits for all that used its memory."""
        stream, needed = operation.stream, _Clock()
        for access in accesses:
            for users in self._users[access.space].over(access.start, access.end):
                _join(needed, dict([users.written]) if users.written else {})
                _join(needed, users.read if access.writes else {})
        self._wait(stream, needed)
        clock = self._known[stream]
        _join(clock, self._known[HOST])  # it is issued after all that the host has done or waited for
        clock[stream] = number = clock.get(stream, 0) + 1
        entry = [operation]
        self.entries.append(entry)
        self._at[stream, number] = entry, dict(clock)
        for access in accesses:
            self._note(access, stream, number)

    def _note(self, access: Access, stream: str, number: int) -> None:
        segments = self._users[access.space]
        if access.writes:
            list(segments.over(access.start, access.end))
            segments.replace(access.start, access.end, _Users((stream, number)))
            return
        for users in segments.over(access.start, access.end):
            users.read[stream] = number

    def _wait(self, stream: str, needed: Mapping[str, int]) -> None:
        """Let a stream wait for what it does not come after anyway."""
        _join(self._known[stream], self._known[HOST] if stream != HOST else {})
        for other, number in needed.items():
            if other == stream or number <= self._known[stream].get(other, 0):
                continue
            self.entries.append([Wait(stream, self._event(other, number))])
            _join(self._known[stream], self._at[other, number][1])

    def _event(self, stream: str, number: int) -> int:
        """The event behind an operation, recorded when somebody first waits for it."""
        if (stream, number) not in self._events:
            self._events[stream, number] = event = len(self._events)
            self._at[stream, number][0].append(Record(stream, event))
        return self._events[stream, number]

    def _join(self) -> None:
        """At its end a call is as work of the stream that computes; and copies are over of host memory that stays."""
        last = {stream: clock.get(stream, 0) for stream, clock in self._known.items() if clock.get(stream)}
        self._wait(COMPUTE, {stream: number for stream, number in last.items() if stream != HOST})
        self._wait(HOST, self._lasting)


def arenas(graph: fx.Graph) -> list[Access]:
    """All bytes of all arenas, which the call before may still use when a call begins."""
    sizes: dict[fx.Node, Any] = {arena: arena.args[0] for arena in graph.find_nodes(op="call_function", target=reserve)}
    return [Access(arena, 0, size, writes=True, values=frozenset()) for arena, size in sizes.items()]


def access_of(piece: fx.Node) -> Access:
    """The whole of a piece that an op allocates."""
    return Access(piece, 0, 1, writes=True, values=frozenset({piece}))


def _frees(program: Program, memory: TouchedMemory) -> dict[fx.Node, list[fx.Node]]:
    """By node, the buffers on the device whose last use on any stream is this node."""
    nodes = list(program.graph.nodes)
    position = {node: k for k, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node, pieces in memory.found.items():
        until = max([position[node], *(_read_until(user, position) for user in node.users)])
        for piece in pieces:
            last[piece] = max(last.get(piece, 0), until)
    frees: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for access in memory.allocated(node) if memory.runs(node) else ():
            if is_on(access.space, "cuda") and nodes[last[access.space]].op != "output":
                frees[nodes[last[access.space]]].append(access.space)
    return frees


def _read_until(reader: fx.Node, position: Mapping[fx.Node, int]) -> int:
    """The position until which an operand is kept: for a transfer that of the last wait."""
    waits: Iterable[fx.Node] = waits_of(reader) if is_collective(reader) else ()
    waits = reader.users if reader.target is to_host else waits
    return max([position[reader], *(position[wait] for wait in waits)])


def _join(clock: _Clock, other: Mapping[str, int]) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _line(operation: Operation) -> str:
    match operation:
        case Launch(stream, node) | Allocate(stream, node) | HostAccess(stream, node, _):
            what = f"{type(operation).__name__.lower()} {node}"
        case Free(stream, piece):
            what = f"free {piece}"
        case Record(stream, event) | Wait(stream, event):
            what = f"{type(operation).__name__.lower()} {event}"
        case _:
            stream, what = operation.stream, type(operation).__name__.lower()
    return f"{stream:>12}  {what}"
