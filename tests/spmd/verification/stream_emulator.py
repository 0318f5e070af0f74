"""Run the stream programs of all ranks on the CPU: a thread for the host and for each stream of each rank.

All that a thread does takes a random time. A result that is still to come, memory that was freed, and memory that
nobody has written hold NaN: who reads or writes too early shows in the bits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from passes import Program, SpmdError
from passes.analysis.aliases import is_view
from passes.ir.collectives import group_of, is_collective
from passes.ir.effects import written
from passes.ir.schemas import argument, schema
from passes.runtime.arena import reserve
from passes.runtime.host_memory import to_device, to_device_out, to_host
from passes.schedule.streams import COMPUTE, HOST, Free, HostAccess, Launch, Operation, Record, StreamProgram, Wait
from passes.schedule.touched_memory import TouchedMemory
from spmd._torch import DisableAutocast, tree_map
from spmd.verification.collective_semantics import COPIES_FIRST, SEMANTICS
from spmd.verification.lockstep import groups_of
from spmd.verification.poison import poison, poisoned, share_memory, tensors_of

from .simulated_time import Moment, SimulatedTime, Work

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """A rank after its last call: the results of the program, and its inputs, which it may write to."""

    returned: list[Any]
    inputs: list[Any]


class Emulator:
    """The programs of all ranks, to be run in one interleaving after the other."""

    def __init__(self, programs: Sequence[Program], streams: Sequence[StreamProgram]) -> None:
        self.programs, self.streams = programs, streams
        self._memories = [TouchedMemory(program.graph) for program in programs]

    def run(self, inputs: Sequence[Sequence[Any]], seed: int, calls: int = 1) -> list[Outcome]:
        """Run ``calls`` calls on inputs that are written to; ``seed`` decides the interleaving.

        Raises ``SpmdError`` where all wait for each other, or where ranks start collectives that do not fit together.
        """
        time, rendezvous = SimulatedTime(seed), _Rendezvous(self.programs)
        each_rank = enumerate(zip(self._memories, self.programs, self.streams, inputs, strict=True))
        ranks = [_Rank(time, rendezvous, number, *given, calls) for number, given in each_rank]
        with torch.no_grad(), DisableAutocast():
            time.run([work for rank in ranks for work in rank.threads()])
        return [rank.outcome() for rank in ranks]


class _Stream:
    """The operations that the host has issued to a stream, first to last."""

    def __init__(self, time: SimulatedTime) -> None:
        self.time, self.works, self.more = time, deque[Work | None](), Moment()

    def issue(self, work: Work | None) -> None:
        """Let ``work`` run behind all before it; None ends the stream."""
        self.works.append(work)
        self.time.happen(self.more)

    def run(self) -> None:
        """The stream's thread."""
        with torch.no_grad():
            while True:
                while not self.works:
                    self.more = Moment()
                    self.time.wait(self.more)
                work = self.works.popleft()
                if work is None:
                    return
                self.time.sleep()
                work()


class _Rank:
    """One rank: its streams, its memory, and the host that issues its operations."""

    def __init__(
        self,
        time: SimulatedTime,
        rendezvous: _Rendezvous,
        number: int,
        memory: TouchedMemory,
        program: Program,
        streams: StreamProgram,
        inputs: Sequence[Any],
        calls: int,
    ) -> None:
        self.time, self.rendezvous, self.number, self.calls = time, rendezvous, number, calls
        self.program, self.operations, self.inputs = program, streams.operations, list(inputs)
        self.memory = memory
        self.streams = {name: _Stream(time) for name in dict.fromkeys([COMPUTE, *streams.streams])}
        self.arenas: dict[fx.Node, Tensor] = {}
        self.returned: list[Any] = []
        self.on_device: dict[int, Any] = {}  # of the inputs

    def threads(self) -> list[Work]:
        """The functions that run in threads."""
        return [self._host, *(stream.run for stream in self.streams.values())]

    def outcome(self) -> Outcome:
        """As the user finds it: on the device in the stream that computes, in host memory once the call returns."""
        return Outcome(self.returned, [self.on_device.get(k, x) for k, x in enumerate(self.inputs)])

    def _host(self) -> None:
        with torch.no_grad():
            for _ in range(self.calls):
                call = _Call(self)
                for operation in self.operations:
                    self.time.sleep()
                    call.issue(operation)
                self.returned = list(call.value(self.program.output_node))
            on_device = [k for k, node in enumerate(self.program.placeholders) if _is_on_device(node)]
            self.streams[COMPUTE].issue(partial(self._look, on_device))
            self.inputs = [_cloned(x) if k not in on_device else x for k, x in enumerate(self.inputs)]
            for stream in self.streams.values():
                stream.issue(None)

    def _look(self, on_device: Sequence[int]) -> None:
        """See results and state on the device as work behind the call does."""
        self.returned = [_cloned(x) for x in self.returned]
        self.on_device = {k: _cloned(self.inputs[k]) for k in on_device}


@dataclass
class _Call:
    """One call: the memory of each value, and the events as they were recorded last."""

    rank: _Rank
    values: dict[fx.Node, Any] = field(default_factory=dict)
    events: dict[int, Moment] = field(default_factory=dict)
    read: dict[fx.Node, dict[fx.Node, Any]] = field(default_factory=dict)  # by the host, when it launches a node

    def __post_init__(self) -> None:
        self.values |= dict(zip(self.rank.program.placeholders, self.rank.inputs, strict=True))

    def issue(self, operation: Operation) -> None:
        """Do the host's part of an operation."""
        match operation:
            case Launch(stream, node):
                self._on(stream, self._work(node))
            case Record(stream, event):
                self.events[event] = moment = Moment()
                self._on(stream, partial(self.rank.time.happen, moment))
            case Wait(stream, event) if event in self.events:
                self._on(stream, partial(self.rank.time.wait, self.events[event]))
            case HostAccess(_, node, False):
                self.read[node] = {x: _cloned(self.value(x)) for x in node.all_input_nodes if not _is_on_device(x)}
            case Free(stream, piece) if isinstance(piece.meta["val"], Tensor):
                self._on(stream, partial(poison, [self.value(piece)]))

    def _on(self, stream: str, work: Work) -> None:
        if stream == HOST:
            work()
        else:
            self.rank.streams[stream].issue(work)

    def value(self, node: fx.Node) -> Any:
        """The memory of a value, whatever it holds by now."""
        if node not in self.values:
            self.values[node] = self._memory(node)
        return self.values[node]

    def _memory(self, node: fx.Node) -> Any:
        if node.target is reserve:
            if node not in self.rank.arenas:
                self.rank.arenas[node] = _filled_arena(node)
            return self.rank.arenas[node]
        if node.op == "output":
            return [self._given(node, value) for value in self.rank.program.output_values()]
        if not self.rank.memory.runs(node):
            return self._call(node)
        if _gives_arguments(node):
            results = [self.value(each) for each in written(node)]
            return results[0] if len(schema(node.target).results) == 1 else results
        return poisoned(node.meta["val"], _CPU)

    def _given(self, node: fx.Node, value: Any) -> Any:
        """An argument of ``node``: memory in the place of nodes, and no GPU."""
        read = self.read.get(node, {})
        with_memory = fx.map_arg(value, lambda each: read.get(each, None) if each in read else self.value(each))
        return _on_cpu(with_memory)

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = self._given(node, (node.args, node.kwargs))
        if node.op == "get_attr":
            return fx.Interpreter(self.rank.program.graph_module).get_attr(str(node.target), (), {})
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _work(self, node: fx.Node) -> Work:
        memory = self.value(node)
        if is_collective(node):
            names = [each.name for each in schema(node.target).arguments]
            arguments = {name: self._given(node, argument(node, name)) for name in names}
            return partial(self.rank.rendezvous.join, self.rank.time, self.rank.number, node, arguments, memory)
        if node.target in (to_device, to_device_out, to_host):
            return partial(self._copy, self.value(node.args[0]), memory)  # type: ignore[arg-type]
        args, kwargs = self._given(node, (node.args, dict(node.kwargs)))
        assert callable(node.target)
        return partial(_compute, partial(node.target, *args, **kwargs), None if _gives_arguments(node) else memory)

    def _copy(self, x: Tensor, out: Tensor) -> None:
        poison([out])
        self.rank.time.sleep()
        out.copy_(x)


@dataclass
class _Exchange:
    """One collective of one group: what each rank brings, until all are there."""

    all_there: Moment = field(default_factory=Moment)
    brought: dict[int, tuple[fx.Node, dict[str, Any]]] = field(default_factory=dict)
    results: dict[int, Any] | None = None


class _Rendezvous:
    """The collectives of all groups; each rank's first one in a group meets the first ones of the others."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.started: dict[Any, int] = defaultdict(int)  # by members, group and rank
        self.found: dict[Any, _Exchange] = defaultdict(_Exchange)

    def join(self, time: SimulatedTime, rank: int, node: fx.Node, arguments: dict[str, Any], out: Any) -> None:
        """Take part in a collective, and write this rank's result. Operands are read before any rank is done."""
        group = group_of(node)
        members = next(tuple(each) for each in groups_of(self.programs, group, node) if rank in each)
        self.started[members, group, rank] += 1
        exchange = self.found[members, group, self.started[members, group, rank]]
        self._bring(exchange, rank, node, arguments, out)
        if len(exchange.brought) == len(members):
            time.happen(exchange.all_there)
        time.wait(exchange.all_there)
        time.sleep()
        if exchange.results is None:
            exchange.results = self._computed(exchange, members)
        time.sleep()
        for tensor, result in zip(tensors_of(out), tensors_of(exchange.results[rank]), strict=True):
            tensor.copy_(result.reshape(tensor.shape))

    def _bring(self, exchange: _Exchange, rank: int, node: fx.Node, arguments: dict[str, Any], out: Any) -> None:
        name = schema(node.target).arguments[0].name
        if node.target in COPIES_FIRST:
            arguments = arguments | {name: _cloned(arguments[name])}
        exchange.brought[rank] = node, arguments
        if not share_memory(tensors_of(out), tensors_of(arguments[name])):
            poison(tensors_of(out))

    def _computed(self, exchange: _Exchange, members: Sequence[int]) -> dict[int, Any]:
        nodes, arguments = zip(*(exchange.brought[rank] for rank in members), strict=True)
        name = schema(nodes[0].target).arguments[0].name
        operands = [given.get(name) for given in arguments]
        if len({node.target for node in nodes}) > 1 or len({tuple(x.shape) for x in operands}) > 1:
            raise SpmdError(f"ranks start collectives that do not fit together: {', '.join(map(str, nodes))}")
        results = SEMANTICS[nodes[0].target](operands, arguments)
        return dict(zip(members, results, strict=True))


def _gives_arguments(node: fx.Node) -> bool:
    """Whether a node returns what it has written to, or nothing."""
    targets = written(node)
    return bool(targets) and (is_view(node) or not schema(node.target).results)


def _compute(call: Callable[[], Any], memory: Any) -> None:
    result = call()
    for tensor, value in zip(tensors_of(memory), tensors_of(result) if memory is not None else [], strict=True):
        tensor.copy_(value)


def _filled_arena(node: fx.Node) -> Tensor:
    size: Any = node.args[0]
    return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN, in any dtype with a sign


def _is_on_device(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.device.type != "cpu"


def _on_cpu(value: Any) -> Any:
    return tree_map(lambda leaf: _CPU if isinstance(leaf, torch.device) else leaf, value)


def _cloned(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
