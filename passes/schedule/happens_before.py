"""Prove the operations of ``streams.py`` free of races, by vector clocks, as race detectors do.

A clock says how many operations of each stream are done for certain when an operation runs: those that its stream, the
host, or an event that its stream waited for, has behind it. Two operations that touch the same bytes, of which one
writes, must be ordered so, and in the order of the program. What is read must be the value that is meant: nothing else
may have been written there, nor the memory freed. Memory that a call leaves behind is safe once the stream that
computes has all of the call behind it, and the host all that touches host memory.

Nothing here knows how streams were assigned; of the program it knows what each node does to memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from ..errors import PassError
from ..ir.program import Program
from ..runtime.arena import reserve
from .segments import Segments
from .streams import (
    COMPUTE,
    HOST,
    Allocate,
    Begin,
    Free,
    HostAccess,
    Launch,
    Operation,
    Record,
    StreamProgram,
    Wait,
    access_of,
    arenas,
)
from .touched_memory import Access, Owners, TouchedMemory, is_on

Clock = dict[str, int]  # by stream, the number of operations that are done

_ANYTHING: Owners = frozenset()


def check_streams(program: Program, streams: StreamProgram, memory: TouchedMemory | None = None) -> None:
    """Raise ``PassError`` if an operation may find memory other than the program means it to be.

    ``memory``: that of the program's graph, if it is known already.
    """
    checker = _Checker(program, memory or TouchedMemory(program.graph))
    for operation in streams.operations:
        checker.do(operation)
    checker.check_end()


@dataclass
class _Use:
    """One access to memory: by which operation, the how manyth of its stream."""

    operation: Operation
    number: int
    position: int | None  # of its node in the program

    @property
    def stream(self) -> str:
        return self.operation.stream

    def __str__(self) -> str:
        match self.operation:
            case Launch(stream, node) | Allocate(stream, node) | HostAccess(stream, node, _):
                return f"{node} on {stream}"
            case Free(stream, piece):
                return f"the end of {piece} on {stream}"
        return f"what precedes the call on {self.stream}"


@dataclass
class _Bytes:
    """The state of some bytes: their last writer, its readers since, and the values that they hold."""

    written: _Use | None = None
    read: dict[str, _Use] = field(default_factory=dict)  # the last reader on each stream
    values: Owners = _ANYTHING
    is_freed: bool = False

    def copy(self) -> _Bytes:
        return replace(self, read=dict(self.read))


class _Checker:
    """The clocks of all streams, and the state of all memory, operation after operation."""

    def __init__(self, program: Program, memory: TouchedMemory) -> None:
        self.program, self.memory = program, memory
        self.position = {node: k for k, node in enumerate(program.graph.nodes)}
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.events: dict[int, Clock] = {}
        self.bytes: dict[fx.Node, Segments[_Bytes]] = defaultdict(lambda: Segments(_Bytes, _Bytes.copy))
        self.launched: dict[fx.Node, None] = {}

    def do(self, operation: Operation) -> None:
        """Take one operation into account. Raises ``PassError``."""
        clock = self.clocks[operation.stream]
        match operation:
            case Record(_, event):
                self.events[event] = _later(clock, self.clocks[HOST])
            case Wait(stream, event):  # for what was recorded; for nothing, if nothing was
                self.clocks[stream] = _later(clock, self.events.get(event, {}))
            case _:
                self.clocks[operation.stream] = clock = _later(clock, self.clocks[HOST])
                clock[operation.stream] = clock.get(operation.stream, 0) + 1
                self._touch(operation)

    def _touch(self, operation: Operation) -> None:
        node = operation.node if isinstance(operation, (Launch, HostAccess)) else None
        number = self.clocks[operation.stream][operation.stream]
        use = _Use(operation, number, self.position[node] if node is not None else None)
        if isinstance(operation, Launch):
            self._note_launch(operation.node)
        for access in self._accesses(operation):
            segments = self.bytes[access.space]
            for held in segments.over(access.start, access.end):
                self._check(use, access, held)
            if access.writes:
                freed = isinstance(operation, Free)
                segments.replace(access.start, access.end, _Bytes(use, {}, access.values, freed))
            else:
                for held in segments.over(access.start, access.end):
                    held.read[use.stream] = use

    def _note_launch(self, node: fx.Node) -> None:
        if node in self.launched:
            raise PassError(f"expected each node to run once, but {node} is launched twice{_line(node)}")
        self.launched[node] = None

    def _accesses(self, operation: Operation) -> list[Access]:
        match operation:
            case Begin(stream):
                inputs = [n for n in self.program.graph.nodes if n.op in ("placeholder", "get_attr")]
                found = [access for node in inputs for access in self.memory.allocated(node)]
                return [each for each in [*found, *arenas(self.program.graph)] if is_on(each.space, _kind(stream))]
            case Free(_, piece):
                return [access_of(piece)]
            case Allocate(stream, node):
                return [each for each in self.memory.allocated(node) if is_on(each.space, _kind(stream))]
            case HostAccess(_, node, writes):
                return [a for a in self.memory.of(node) if a.writes is writes and not is_on(a.space, "cuda")]
            case Launch(stream, node):
                found = self.memory.of(node)
                return [each for each in found if is_on(each.space, "cuda")] if stream == COMPUTE else found
        raise AssertionError(f"{operation} is none of the operations")

    def _check(self, use: _Use, access: Access, held: _Bytes) -> None:
        """Whether an access finds the bytes as the program means it to."""
        if held.written is not None:
            did = "is done with" if isinstance(held.written.operation, Begin) else "has written"
            self._check_order(held.written, use, access, did, "overwrite" if access.writes else "read")
        if access.writes:
            for reader in held.read.values():
                self._check_order(reader, use, access, "has read", "overwrite")
        if isinstance(use.operation, (Begin, Allocate)) or (access.writes and self._makes(use, access)):
            return
        before, value = held.written, f"{_named(access.values)} in {access}"
        if before is None or (isinstance(before.operation, Begin) and not held.values):
            raise PassError(f"{use} uses {value} before it is written{self._lines(use)}")
        if held.is_freed:
            raise PassError(f"{use} uses {value} after it is freed: {before} comes first{self._lines(before, use)}")
        if not access.writes and not held.values & access.values:
            raise PassError(
                f"{use} reads {value}, but {before} has written over it: that memory is used again too "
                f"early{self._lines(before, use)}"
            )

    def _makes(self, use: _Use, access: Access) -> bool:
        """Whether an access writes a value anew, into memory of which nothing needs to be known."""
        if isinstance(use.operation, Free):
            return False
        made = self.memory.allocated(use.operation.node) if isinstance(use.operation, (Launch, HostAccess)) else []
        return access in made or access.space.target is reserve

    def _check_order(self, before: _Use, after: _Use, access: Access, did: str, does: str) -> None:
        if before.stream != after.stream and self.clocks[after.stream].get(before.stream, 0) < before.number:
            raise PassError(
                f"{after} may {does} {access} before {before} {did} it: expected {after.stream} to wait for an event "
                f"that is recorded on {before.stream} behind it{self._lines(before, after)}"
            )
        if before.position is not None and after.position is not None and before.position > after.position:
            raise PassError(
                f"{before} is issued before {after}, which stands before it in the program, and both use "
                f"{access}{self._lines(before, after)}"
            )

    def check_end(self) -> None:
        """Whether everything ran, and the call leaves nothing behind that the next one, or the user, may disturb."""
        missing = [n for n in self.program.graph.nodes if self.memory.runs(n) and n not in self.launched]
        if missing:
            raise PassError(f"expected every node to run, but nothing launches {missing[0]}{_line(missing[0])}")
        for space, segments in self.bytes.items():
            waiting = HOST if self.memory.stays_on_host(space) else COMPUTE
            known = _later(self.clocks[waiting], self.clocks[HOST])
            for use in (use for held in segments.all() for use in _uses(held)):
                if known.get(use.stream, 0) < use.number:
                    raise PassError(
                        f"the call may end before {use} is done with the memory of {space}: expected {waiting} to wait "
                        f"for an event that is recorded on {use.stream} behind it{self._lines(use)}"
                    )
        self._check_results()

    def _check_results(self) -> None:
        output = self.program.output_node
        for access in self.memory.of(output):
            for held in self.bytes[access.space].over(access.start, access.end):
                if held.is_freed or not held.values & access.values:
                    raise PassError(f"the call returns {_named(access.values)}, but {access} does not hold it")

    def _lines(self, *uses: _Use) -> str:
        nodes = [getattr(use.operation, "node", None) or getattr(use.operation, "piece", None) for use in uses]
        return "".join(_line(node, f"\n    {node}: ") for node in nodes if node is not None)


def _kind(stream: str) -> str:
    return "cpu" if stream == HOST else "cuda"


def _uses(held: _Bytes) -> list[_Use]:
    return [*([held.written] if held.written is not None else []), *held.read.values()]


def _later(one: Mapping[str, int], other: Mapping[str, int]) -> Clock:
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in one | other}  # type: ignore[operator]


def _named(values: Owners) -> str:
    return " or ".join(sorted(node.name for node in values)) or "a value"


def _line(node: fx.Node, before: str = ", ") -> str:
    """The user's line, where it is known."""
    return f"{before}{node.meta['source']}" if node.meta.get("source") else ""
