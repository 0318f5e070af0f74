"""One rank's step simulated node by node: when compute runs, when each axis communicates, and what is not hidden.

The thread that launches ops computes them, too, or runs ahead of a device that does. A collective stands in line with
the others of its axis from its start on, and its wait blocks compute until it is done. While gloo moves data it takes
CPU time from compute; a collective through shared memory is done by the thread that computes, when it waits. All ranks
are assumed to run as this one does, so that no rank waits for a late one.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate

from torch import fx

from ..ir.collectives import Collective, is_collective, is_wait
from ..ir.program import OutputKind, Program
from ..memory.peak_memory import live_bytes
from ..runtime.host_memory import wait_copy
from .node_costs import Cost, NodeCosts, Transfer

_NAMED = 3  # of what a collective hides behind
_CALLS = 6  # that are simulated of a program that leaves something in flight


class Cause(StrEnum):
    """Why nothing hides a transfer, or most of what is exposed of it."""

    DEPENDENCY = "dependency"  # what it sends comes too late, or what it brings is read too soon
    ORDER = "order"  # others of its queue, or ops that it does not need, run before it; or it holds up one behind it
    MEMORY = "memory"  # it starts late, so that no more is whole at once than ``Collective.ahead`` allows
    CORE = "core"  # the core that computes moves the data
    PEER = "peer"  # the rank that sends it comes to that later


@dataclass(frozen=True)
class Span:
    """An op or a transfer from ``start`` to ``end``, in seconds since the call began.

    ``queue``: empty for the thread that computes, which also does collectives through shared memory. ``module``: where
    in the model it belongs, if that is known.
    """

    node: str
    start: float
    end: float
    queue: str = ""
    module: str = ""


@dataclass(frozen=True)
class TransferTime:
    """One collective or copy: how long it takes, and by how much it makes the step longer.

    ``seconds`` from ``start`` to ``end`` in its queue. ``exposed``: compute waits for it, or for what stands in line
    behind it, or has its core taken, for these seconds, mostly because of ``cause``, None if nothing is exposed.
    ``behind``: the modules, or else the phases, whose compute runs meanwhile, with seconds, longest first.
    """

    node: str
    queue: str
    start: float
    end: float
    exposed: float
    behind: tuple[tuple[str, float], ...] = ()
    cause: Cause | None = None

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The simulated step of one rank.

    ``seconds``: of a call, from the first node to the last. ``compute``: of those, how long ops run, with their
    launches where the host computes. ``transfers``: in the order of their starts; ``spans``: all that takes time.
    ``memory``: by device, the bytes in use from a second on, at each second when they change.
    """

    seconds: float
    compute: float
    transfers: tuple[TransferTime, ...]
    spans: tuple[Span, ...]
    memory: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)

    @property
    def peaks(self) -> dict[str, int]:
        """By device, the most bytes that are in use at once."""
        return {device: max(size for _, size in changes) for device, changes in self.memory.items()}

    @property
    def communication(self) -> float:
        """Seconds of all transfers, whether anything hides them."""
        return sum(each.seconds for each in self.transfers)

    @property
    def exposed(self) -> float:
        """Seconds by which transfers make the step longer."""
        return sum(each.exposed for each in self.transfers)


def in_turn(timelines: Sequence[Timeline]) -> Timeline | None:
    """Steps that run one after the other, as one; None for none."""
    if not timelines:
        return None
    ends = list(accumulate(each.seconds for each in timelines))
    devices = dict.fromkeys(device for each in timelines for device in each.memory)
    moved = [_moved(each, end - each.seconds, devices) for each, end in zip(timelines, ends, strict=True)]
    return Timeline(
        ends[-1],
        sum(each.compute for each in moved),
        tuple(transfer for each in moved for transfer in each.transfers),
        tuple(span for each in moved for span in each.spans),
        {device: tuple(change for each in moved for change in each.memory[device]) for device in devices},
    )


def _moved(timeline: Timeline, by: float, devices: Iterable[str]) -> Timeline:
    """The same, ``by`` seconds later, with nothing in use on the rest of these devices."""
    memory = {device: timeline.memory.get(device, ((0.0, 0),)) for device in devices}
    return replace(
        timeline,
        transfers=tuple(replace(each, start=each.start + by, end=each.end + by) for each in timeline.transfers),
        spans=tuple(replace(each, start=each.start + by, end=each.end + by) for each in timeline.spans),
        memory={k: tuple((at + by, size) for at, size in changes) for k, changes in memory.items()},
    )


def simulate(program: Program, costs: NodeCosts, *, with_memory: bool = True) -> Timeline:
    """The step of ``program`` as one rank runs it, with these costs. Linear in the number of nodes.

    A program that finishes what the call before has started is simulated until a call takes as long as the one before.
    ``with_memory``: also find the bytes in use, which takes longer than all the rest.
    """
    carried, left = _carried(program), dict[fx.Node, float]()
    for _ in range(_CALLS if carried else 1):
        rank, begins, before = Rank(costs.rates.is_asynchronous), [0.0], left
        for placeholder, start in sorted(carried.items(), key=lambda pair: before.get(pair[1], 0.0)):
            rank.carry(placeholder, start, costs.of(start).transfer, before.get(start, 0.0))
        for node in program.graph.nodes:
            rank.step(node, costs.of(node))
            begins.append(rank.now())
        left = rank.left()
        if left == before:
            break
    in_use = live_bytes(program) if with_memory else {}
    memory = {
        device: tuple((begins[position], size) for position, size in changes if position < len(begins))
        for device, changes in in_use.items()
    }
    return rank.timeline(memory)


def _carried(program: Program) -> dict[fx.Node, fx.Node]:
    """The inputs that are in flight when a call begins, and the collectives that start the like for the next call."""
    outputs = zip(program.outputs, program.output_values(), strict=True)
    started = {output.name: value for output, value in outputs if output.kind is OutputKind.CHANNEL}
    inputs = zip(program.placeholders, program.inputs, strict=True)
    pairs = [(node, started[declared.name]) for node, declared in inputs if declared.name in started]
    return {node: value for node, value in pairs if isinstance(value, fx.Node) and is_collective(value)}


@dataclass
class Flight:
    """A transfer that was started.

    What it sends was there when it was ``ready``; it stands in line since it was ``issued``.
    """

    node: fx.Node
    transfer: Transfer
    ready: float = 0.0
    issued: float = 0.0
    start: float = 0.0
    end: float = 0.0
    exposed_by: dict[Cause, float] = field(default_factory=dict)
    behind: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The part of a core that it takes while data moves."""
        return min(1.0, self.transfer.cpu / self.transfer.seconds) if self.transfer.seconds else 0.0

    def expose(self, seconds: float, cause: Cause) -> None:
        """Note that it makes the step longer by ``seconds``."""
        if seconds > 0.0:
            self.exposed_by[cause] = self.exposed_by.get(cause, 0.0) + seconds

    def expose_at_wait(self, seconds: float) -> None:
        """Note its exposed wait of ``seconds``, by cause."""
        described = self.node.meta.get("collective")
        bounded = isinstance(described, Collective) and described.ahead is not None
        in_line, late = min(seconds, self.start - self.issued), max(0.0, self.issued - self.ready)
        self.expose(in_line, Cause.ORDER)
        late = min(seconds - in_line, late)
        self.expose(late, Cause.MEMORY if bounded else Cause.ORDER)
        self.expose(seconds - in_line - late, Cause.DEPENDENCY)

    def add(self, carried: Flight | None) -> None:
        """Add what exposes and hides the rest of the same transfer of the call before."""
        if carried is not None:
            for cause, seconds in carried.exposed_by.items():
                self.expose(seconds, cause)
            for label, seconds in carried.behind.items():
                self.behind[label] = self.behind.get(label, 0.0) + seconds

    def time(self) -> TransferTime:
        """The times of the transfer that reports show."""
        longest = sorted(self.behind.items(), key=lambda entry: -entry[1])[:_NAMED]
        exposed, name, queue = sum(self.exposed_by.values()), self.node.name, self.transfer.queue
        cause = max(self.exposed_by, key=self.exposed_by.__getitem__, default=None)
        return TransferTime(name, queue, self.start, self.end, exposed, tuple(longest), cause)


class Rank:
    """The clocks of one rank, and what is in flight."""

    def __init__(self, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self.host = self.device = self.compute = 0.0  # the clocks are one where the host computes
        self.flights: list[Flight] = []
        self.started: dict[fx.Node, Flight] = {}  # by the nodes that stand for its result
        self.carried: dict[fx.Node, Flight] = {}  # what the call before has started, by the node that starts the like
        self.queues: dict[str, deque[Flight]] = {}  # those that are not over yet
        self.free: dict[str, float] = {}  # when the last one in a queue ends
        self.done: dict[fx.Node, float] = {}  # when a value is there
        self.spans: list[Span] = []

    def step(self, node: fx.Node, cost: Cost) -> None:
        """Launch one node, and run it."""
        self._await_copies(node)
        seconds = cost.compute
        if self.is_asynchronous:
            self.host += cost.launch
        else:
            seconds += cost.launch
        if seconds:
            self._compute(node, seconds)
        self.done[node] = self.device if seconds else self._ready(node)
        if cost.transfer is not None:
            self._start(node, cost.transfer)
        elif is_wait(node) or node.target is wait_copy:
            self._wait(node)
            self.done[node] = self.device
        elif node.target is operator.getitem and node.args[0] in self.started:  # of a coalesced result
            self.started[node] = self.started[node.args[0]]  # type: ignore[index]

    def carry(self, placeholder: fx.Node, start: fx.Node, transfer: Transfer | None, until: float) -> None:
        """Begin with a transfer in flight, which the like of ``start`` began in the call before."""
        if transfer is not None and until > 0.0:
            flight = Flight(start, transfer, start=self.free.get(transfer.queue, 0.0), end=until)
            self.started[placeholder] = self.carried[start] = flight
            self.free[transfer.queue] = until
            self.queues.setdefault(transfer.queue, deque()).append(flight)

    def left(self) -> dict[fx.Node, float]:
        """For how long each transfer is in flight after the end of the call, where it is."""
        return {each.node: each.end - self.now() for each in self.flights if each.end > self.now()}

    def idle(self, node: fx.Node) -> float:
        """For how long compute would wait for a transfer if ``node`` was launched now."""
        flight = self.started.get(node.args[0]) if is_wait(node) else None  # type: ignore[arg-type]
        return max(0.0, flight.end - self.now()) if flight is not None else 0.0

    def _ready(self, node: fx.Node) -> float:
        """When all that a node reads is there."""
        return max((self.done[operand] for operand in node.all_input_nodes), default=0.0)

    def _start(self, node: fx.Node, transfer: Transfer) -> None:
        flight = Flight(node, transfer, self._ready(node), self.now())
        self.flights.append(flight)
        self.started[node] = flight
        if transfer.at_wait:
            return
        flight.start = max(self.now(), self.free.get(transfer.queue, 0.0))
        flight.end = self.free[transfer.queue] = flight.start + transfer.seconds
        self.queues.setdefault(transfer.queue, deque()).append(flight)

    def _wait(self, node: fx.Node) -> None:
        """Block compute until the transfer is done; one through shared memory is done here."""
        flight = self.started.get(node.args[0])  # type: ignore[arg-type]
        if flight is None:
            return
        if flight.transfer.at_wait:
            if flight.end == 0.0:
                flight.start = self.now()
                self._advance(flight.transfer.seconds, node)
                flight.end = self.device
                flight.expose(flight.end - flight.start, Cause.CORE)
            return
        self._block(flight)

    def _block(self, flight: Flight) -> None:
        """Compute idles until a transfer is done, and those are exposed that its queue does until then."""
        now = self.now()
        if flight.end <= now:
            return
        for each in self.queues[flight.transfer.queue]:
            if each.start >= flight.end:
                break
            waited = min(each.end, flight.end) - max(each.start, now)
            if each is flight:
                each.expose_at_wait(max(0.0, waited))
            else:
                each.expose(waited, Cause.ORDER)
        self.device = flight.end

    def _await_copies(self, node: fx.Node) -> None:
        """An op that reads what is copied to the device waits for the copy."""
        for operand in node.all_input_nodes if self.free else ():
            flight = self.started.get(operand)
            if flight is not None and not is_collective(flight.node) and not is_wait(node):
                self._block(flight)

    def _compute(self, node: fx.Node, seconds: float) -> None:
        start = self.device = self.now()
        self._advance(seconds, node)
        self.compute += seconds
        self.spans.append(Span(node.name, start, self.device, module=_module(node)))

    def now(self) -> float:
        """When an op that is launched now can run."""
        return max(self.device, self.host)

    def _advance(self, seconds: float, node: fx.Node) -> None:
        """Compute for ``seconds`` on one core, less what the transfers in flight take of it."""
        label = str(node.meta.get("module") or node.meta.get("phase") or node.name)
        while seconds > 0.0:
            flying, until = self._in_flight()
            shares = sum(flight.share for flight in flying)
            speed = max(0.0, 1.0 - shares)
            ends = speed > 0.0 and self.device + seconds / speed <= until
            passed = seconds / speed if ends else until - self.device
            for flight in flying:
                flight.behind[label] = flight.behind.get(label, 0.0) + passed
                flight.expose(passed * (1.0 - speed) * flight.share / shares if shares else 0.0, Cause.CORE)
            self.device = self.device + passed if ends else until
            seconds = 0.0 if ends else seconds - passed * speed

    def _in_flight(self) -> tuple[list[Flight], float]:
        """The transfers that move data now, and until when it is those."""
        flying, until = [], float("inf")
        for queue in self.queues.values():
            while queue and queue[0].end <= self.device:
                queue.popleft()
            if queue:
                moves = queue[0].start <= self.device
                until = min(until, queue[0].end if moves else queue[0].start)
                flying += [queue[0]] if moves else []
        return flying, until

    def timeline(self, memory: Mapping[str, tuple[tuple[float, int], ...]]) -> Timeline:
        """The simulated step, with the bytes in use meanwhile."""
        moved = [
            Span(
                flight.node.name,
                flight.start,
                flight.end,
                "" if flight.transfer.at_wait else flight.transfer.queue,
                _module(flight.node),
            )
            for flight in self.flights
        ]
        for flight in self.flights:
            flight.add(self.carried.get(flight.node))
        transfers = tuple(flight.time() for flight in self.flights)
        return Timeline(self.now(), self.compute, transfers, tuple(self.spans + moved), memory)


def _module(node: fx.Node) -> str:
    return str(node.meta.get("module") or "")
