"""All ranks of a bundle simulated together: when each computes, sends, and waits for what another one sends.

Each rank has the clocks of ``simulation.py``. A message moves on the sender's side, in line with what it sends to the
same rank; the receiver waits until it is through. One rank stands for all that differ from it on other axes only.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..analysis.collective_algorithms import BUILT_IN, Table
from ..errors import PassError
from ..ir.bundle import Bundle, InFlight, numbered
from ..ir.collectives import Kind, channel_of, is_collective, is_message, is_wait, kind_of, line_of, peer_of
from ..ir.program import OutputKind
from .node_costs import Cost, NodeCosts, Transfer, device_of
from .rates import rates_of
from .simulation import Cause, Flight, Rank, Timeline, TransferTime


@dataclass(frozen=True)
class Run:
    """One run of a program, the ``number``-th of it in a call, from when it no longer waits for what it begins with.

    ``transfers``: its messages and collectives.
    """

    role: str
    number: int
    start: float
    end: float
    transfers: tuple[TransferTime, ...]


@dataclass(frozen=True)
class BundleTimeline:
    """One call of a bundle as its ranks run it, by coordinate. ``idle``: how long each waits for what others send.

    ``runs``: of each rank, in order.
    """

    ranks: tuple[Timeline, ...]
    idle: tuple[float, ...]
    runs: tuple[tuple[Run, ...], ...]

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return max(each.seconds for each in self.ranks)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they neither compute nor communicate: they wait, or have ended."""
        busy = sum(each.seconds - idle for each, idle in zip(self.ranks, self.idle, strict=True))
        return 1.0 - busy / (len(self.ranks) * self.seconds) if self.seconds else 0.0


def simulate_bundle(
    bundle: Bundle, call: str, table: Table = BUILT_IN, *, backend: str | None = None
) -> BundleTimeline | None:
    """One call, from when all its ranks begin; None on a device of which nothing is known.

    What calls before it have left in channels is there. ``backend`` overrides that of the mesh. The bundle is one that
    ``check_bundle`` has passed.
    """
    costs = {}
    for role, program in bundle.programs.items():
        rates = rates_of(table, device_of(program), program.mesh)
        if rates is None:
            return None
        costs[role] = NodeCosts(program, rates, table, backend=backend)
    mail: _Mail = defaultdict(list)
    ranks = [_BundleRank(bundle, call, k, costs, mail) for k in range(len(bundle.calls[call]))]
    going = [(each, each.steps()) for each in ranks]
    while going:
        count = sum(each.done for each in ranks)
        going = [(each, steps) for each, steps in going if next(steps, None) is not None]
        if going and count == sum(each.done for each in ranks):
            raise PassError(f"call {call} of {bundle.name} would never end: check_bundle says why")
    timelines = tuple(each.rank.timeline({}) for each in ranks)
    runs = tuple(tuple(each.runs(timeline)) for each, timeline in zip(ranks, timelines, strict=True))
    return BundleTimeline(timelines, tuple(each.idle for each in ranks), runs)


@dataclass(frozen=True)
class _Recv:
    """A recv that was started: the ``number``-th of its line. A program may start it again before it is waited for."""

    node: fx.Node
    number: int
    flight: Flight


_Mail = defaultdict[tuple[int, int, str], list[Flight]]  # by sender, receiver and line, what was sent


class _BundleRank:
    """One rank: the programs of its order, one after the other, on the same clocks."""

    def __init__(self, bundle: Bundle, call: str, coordinate: int, costs: dict[str, NodeCosts], mail: _Mail) -> None:
        self.bundle, self.coordinate, self.costs, self.mail = bundle, coordinate, costs, mail
        self.order, self.in_flight = bundle.order(call, coordinate), InFlight(bundle, bundle.order(call, coordinate))
        self.rank = Rank(any(costs[role].rates.is_asynchronous for role in self.order))
        self.idle, self.done = 0.0, 0
        self.begins, self.works = 0.0, False  # of the program that runs: when its first op does, and whether that has
        self.started = Counter[tuple[int, str]]()  # recvs, by line
        self.ran = list[tuple[float, float, int]]()  # of each run: its start, its end, and the transfers until then

    def runs(self, timeline: Timeline) -> Iterator[Run]:
        """Its runs, of which ``timeline`` has the transfers."""
        first = 0
        for (role, number), (start, end, last) in zip(numbered(self.order), self.ran, strict=True):
            yield Run(role, number, start, end, timeline.transfers[first:last])
            first = last

    def steps(self) -> Iterator[fx.Node]:
        """Simulate node by node; yields the waits at which nothing has come yet."""
        for role in self.order:
            program = self.bundle.programs[role]
            taken = self.in_flight.take(role, self.order) if self.in_flight.holds(role) else {}
            receiving: dict[Any, _Recv] = {}
            self.begins, self.works = self.rank.now(), False
            for node, declared in zip(program.placeholders, program.inputs, strict=True):
                self._bring(node, taken.get(declared.name), receiving)
            for node in program.graph.nodes:
                if is_message(node) and kind_of(node) is Kind.RECV:
                    receiving[node] = self._expect(node, self.costs[role].of(node))
                elif node.target is operator.getitem and node.args[0] in receiving:
                    receiving[node] = receiving[node.args[0]]
                elif is_wait(node) and node.args[0] in receiving:
                    yield from self._receive(node, receiving[node.args[0]])
                else:
                    cost = self.costs[role].of(node)
                    self.rank.step(node, cost)
                    self.works |= cost.transfer is None and cost.launch + cost.compute > 0.0
                    if is_message(node):
                        self.mail[self.coordinate, peer_of(node), self._line(node)].append(self.rank.started[node])
                self.done += 1
            values = zip(program.outputs, program.output_values(), strict=True)
            left = {output.name: value for output, value in values if output.kind is OutputKind.CHANNEL}
            handed_on = {name: self._left(value, receiving) for name, value in left.items()}
            self.in_flight.put(role, {name: handed_on.get(name) for name in self.in_flight.written(role)})
            begins = self.begins if self.works else self.rank.now()  # what only starts a message takes no time
            self.ran.append((begins, self.rank.now(), len(self.rank.flights)))

    def _left(self, value: Any, receiving: dict[Any, _Recv]) -> Any:
        """The flight or the recv behind a value that is handed on; None if the value is there."""
        if value in receiving:
            return receiving[value]
        return self.rank.started.get(value) if isinstance(value, fx.Node) and is_collective(value) else None

    def _bring(self, placeholder: fx.Node, brought: Any, receiving: dict[Any, _Recv]) -> None:
        if isinstance(brought, Flight):
            self.rank.started[placeholder] = brought
        elif isinstance(brought, _Recv):
            receiving[placeholder] = brought

    def _expect(self, recv: fx.Node, cost: Cost) -> _Recv:
        """Start a recv, which moves nothing until its message comes: those of a line come in the order of recvs."""
        assert cost.transfer is not None, "a recv is a transfer"
        self.rank.step(recv, replace(cost, transfer=Transfer(cost.transfer.queue, 0.0)))
        line = peer_of(recv), self._line(recv)
        self.started[line] += 1
        return _Recv(recv, self.started[line] - 1, self.rank.started[recv])

    def _line(self, message: fx.Node) -> str:
        axis = self.bundle.axis_of(self.order[0])
        return line_of(message, axis.backend if axis else "")

    def _receive(self, wait: fx.Node, started: _Recv) -> Iterator[fx.Node]:
        """Wait until a message of the peer is through."""
        recv, flight = started.node, started.flight
        mail = self.mail[peer_of(recv), self.coordinate, self._line(recv)]
        while len(mail) <= started.number:
            yield wait
        sent = mail[started.number]
        if channel_of(sent.node) != channel_of(recv):
            raise PassError(f"{recv} receives {channel_of(recv)}, but what comes is {channel_of(sent.node)}")
        waited = max(0.0, sent.end - self.rank.now())
        flight.transfer = Transfer(flight.transfer.queue, sent.end - sent.start)
        flight.start, flight.end = sent.start, sent.end
        flight.expose(waited, Cause.PEER)
        self.idle += waited
        self.rank.device = max(self.rank.device, sent.end)
        if not self.works:
            self.begins = self.rank.now()
        self.rank.done[wait] = self.rank.device
