"""Prove a bundle before it runs: each channel has one type and one writer, messages pair up, and each call ends.

A call is walked as ranks would run it. A message is done once both of its ends have started, a collective once all
ranks have, and a wait blocks until then: gloo and NCCL may be quicker, never slower. A rank waits for all that it has
started, or leaves it to the next call. Between two ranks the first send meets the first recv, the second the second: on
gloo of each channel by itself, on NCCL of each process group. NCCL also runs all that a rank starts in one process
group, messages and collectives, in one line (of a group that is connected when it is first used, what each two ranks
exchange), so that there each waits for those before it on all of its ranks.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..errors import PassError
from ..runtime.message_collectives import tag_of
from .bundle import Bundle, Channel, Ends, InFlight, messages_of, read_from, written_to
from .check import check
from .collectives import (
    Kind,
    channel_of,
    group_of,
    input_bytes,
    is_collective,
    is_message,
    is_wait,
    kind_of,
    line_of,
    moved,
    peer_of,
    reduction_of,
)
from .program import OutputKind, Program

State = tuple[tuple[int, str, int], ...]  # what is in channels between calls: coordinate, channel, number of values


def check_bundle(bundle: Bundle) -> None:
    """Raise ``PassError``, with a sentence, if a bundle is not well formed, or if some call of it could not end."""
    for program in bundle.programs.values():
        check(program)
    _orders_fit(bundle)
    for channel in bundle.channels:
        _channel_fits(bundle, channel)
    _tags_differ(bundle)
    for role in bundle.programs:
        _messages_fit(bundle, role)
    _reach_all_calls(bundle)


def _orders_fit(bundle: Bundle) -> None:
    sizes = {axis.size if (axis := bundle.axis_of(role)) else None for role in bundle.programs} if bundle.axis else {1}
    if len(sizes) != 1 or None in sizes:
        raise PassError(f"expected all programs of {bundle.name} to have an axis {bundle.axis!r} of one size")
    for call, orders in bundle.calls.items():
        if {len(orders)} != sizes:
            raise PassError(f"expected an order for each of {sizes.pop()} ranks in call {call}, got {len(orders)}")
        unknown = sorted({role for order in orders for role in order} - bundle.programs.keys())
        if unknown:
            raise PassError(f"call {call} of {bundle.name} runs {unknown[0]}, which is none of its programs")
    for role in bundle.programs:
        found, axis = bundle.coordinates(role), bundle.axis_of(role)
        if not found:
            raise PassError(f"no call of {bundle.name} runs {role}")
        if axis is not None and found != [axis.coordinate]:
            raise PassError(f"{role} is the program of {axis.name}={axis.coordinate}, but {axis.name}={found} run it")


def _channel_fits(bundle: Bundle, channel: Channel) -> None:
    """One type at all ends, one writer in each call, and readers where the writer's values are."""
    given = {channel.name: channel.given} if channel.given else {}
    ends = {role: written_to(bundle.programs[role], given).get(channel.name) for role in channel.writers}
    ends |= {role: read_from(bundle.programs[role]).get(channel.name) for role in channel.readers}
    for role, end in ends.items():
        if end is None or _type(end) != (channel.shape, channel.dtype, channel.placement, channel.sent):
            raise PassError(f"channel {channel}: expected {channel.type} in {role}, got {_type_text(end)}")
    for verb, of in (("writes", channel.writers), ("reads", channel.readers)):
        if not of:
            raise PassError(f"channel {channel}: no program {verb} it")
    for call in bundle.calls if len(channel.writers) > 1 else ():
        for order in bundle.calls[call]:
            both = [role for role in dict.fromkeys(order) if role in channel.writers]
            if len(both) > 1:
                raise PassError(f"channel {channel}: call {call} has two writers of it, {both[0]} and {both[1]}")
    if not channel.sent and len({k for role in ends for k in bundle.coordinates(role)}) > 1:
        raise PassError(f"channel {channel} is between programs of several ranks: send and receive its values")


def _type(end: Ends) -> tuple[Any, ...]:
    return end.shape, end.dtype, end.placement, end.sent


def _type_text(end: Ends | None) -> str:
    if end is None:
        return "nothing"
    channel = Channel("", end.shape, end.dtype, end.placement, (), ())
    return channel.type + (", sent" if end.sent else "")


def _tags_differ(bundle: Bundle) -> None:
    names: dict[int, str] = {}
    for channel in bundle.channels:
        other = names.setdefault(tag_of(channel.name), channel.name) if channel.sent else channel.name
        if other != channel.name:
            raise PassError(f"messages of channels {other} and {channel.name} have one tag: rename one of them")


def _messages_fit(bundle: Bundle, role: str) -> None:
    program, axis = bundle.programs[role], bundle.axis_of(role)
    for node in messages_of(program):
        along, peer = program.mesh.axis_of_group(group_of(node)), peer_of(node)
        if axis is None or along != axis:
            over = along.name if along else group_of(node)
            raise PassError(
                f"expected messages over the axis {bundle.axis!r}, but {node} of {role} is sent over {over}"
            )
        if not 0 <= peer < axis.size or peer == axis.coordinate:
            raise PassError(f"expected a peer among {axis.size} ranks, but {node} of {role} has {peer}{_line(node)}")


def _reach_all_calls(bundle: Bundle) -> None:
    """Walk every call from every state that calls leave, beginning with empty channels."""
    effects = {call: _effect(bundle, call) for call in bundle.calls}
    states: list[State] = [()]
    reached = set[str]()
    for state in states:  # which grows
        held = {(k, name): count for k, name, count in state}
        possible = [call for call in effects if all(held.get(key, 0) == n for key, n in effects[call][0].items())]
        if state and not possible:
            left = ", ".join(f"{count} in {name} of {bundle.axis or 'rank'}={k}" for k, name, count in state)
            raise PassError(f"no call of {bundle.name} can follow one that leaves values in channels: {left}")
        reached.update(possible)
        for call in possible:
            after = {**held, **effects[call][1]}
            found = tuple(sorted((k, name, count) for (k, name), count in after.items() if count))
            states += [] if found in states else [found]
    lost = [call for call in bundle.calls if call not in reached]
    if lost:
        names = sorted({name for (_, name), count in effects[lost[0]][0].items() if count})
        raise PassError(f"call {lost[0]} of {bundle.name} reads {', '.join(names)}, which no call before it leaves")


Counts = Mapping[tuple[int, str], int]  # by coordinate and channel, the number of values


def _effect(bundle: Bundle, call: str) -> tuple[Counts, Counts]:
    """The values that a call finds in the channels that it uses, and those that it leaves there."""
    before, after = dict[tuple[int, str], int](), dict[tuple[int, str], int]()
    needed = [_needs(bundle, call, k) for k in range(len(bundle.calls[call]))]
    walk = _Walk(bundle, call, needed)
    walk.run()
    for k, rank in enumerate(walk.ranks):
        for name, count in rank.in_flight.counts.items():
            before[k, name], after[k, name] = needed[k].get(name, 0), count
    return before, after


def _needs(bundle: Bundle, call: str, coordinate: int) -> dict[str, int]:
    """How many values a rank's order reads from each channel that it has not written."""
    order, needed = bundle.order(call, coordinate), dict[str, int]()
    own = set(order)
    for channel in bundle.used_by(own):
        for reader in own.intersection(channel.readers):
            level = lowest = 0
            for role in order:
                level -= role == reader
                lowest = min(lowest, level)
                level += role in channel.writers
            needed[channel.name] = max(needed.get(channel.name, 0), -lowest)
    return needed


@dataclass(eq=False)
class _Started:
    """A message, or a rank's part of a collective over the axis. ``others``: what it meets, once that has started.

    ``in_line``: whether others of its process group have to be done before it, as on NCCL; ``is_over`` then says that
    they are.
    """

    rank: _Walker
    role: str
    node: fx.Node
    expected: int = 1
    others: list[_Started] = field(default_factory=list)
    in_line: bool = False
    is_over: bool = False
    is_waited_for: bool = False

    def is_done(self) -> bool:
        """Whether a wait for it ends."""
        return self.is_over if self.in_line else len(self.others) == self.expected

    def __str__(self) -> str:
        if not is_message(self.node):
            return f"{self.node} in {self.role}{_line(self.node)}"
        verb = "to" if kind_of(self.node) is Kind.SEND else "from"
        of = f"{channel_of(self.node)} {verb} {self.rank.axis}={peer_of(self.node)}"
        return f"the {kind_of(self.node)} of {of} in {self.role}{_line(self.node)}"


class _Walk:
    """One call on all ranks along the axis."""

    def __init__(self, bundle: Bundle, call: str, needed: list[dict[str, int]]) -> None:
        self.bundle, self.call = bundle, call
        self.ranks = [_Walker(self, k, each) for k, each in enumerate(needed)]
        # A program may run many times: what ranks can be seen to do in it is found once.
        self.events = {role: list(filter(_is_event, each.graph.nodes)) for role, each in bundle.programs.items()}
        self.ends: dict[tuple[int, int, str, Kind], list[_Started]] = defaultdict(list)  # from, to, line, which end
        self.collectives: dict[int, list[_Started]] = defaultdict(list)  # by coordinate
        self.lines: dict[tuple[int, str], deque[_Started]] = defaultdict(deque)  # by rank and group, those not over

    def run(self) -> None:
        """Let each rank go on as far as it can, in turn. Raises ``PassError`` if all that are left are blocked."""
        going = {rank: rank.steps() for rank in self.ranks}
        while going:
            moved_on = False
            for rank, steps in list(going.items()):
                count = rank.steps_done
                if next(steps, None) is None:
                    del going[rank]
                    moved_on = True
                moved_on |= rank.steps_done > count
            if going and not moved_on:
                raise PassError(self._blocked(list(going)))
        self._check_pairs()
        for rank in self.ranks:
            rank.check_waits()

    def start(self, rank: _Walker, role: str, node: fx.Node) -> _Started:
        """A rank has started a message or a collective; it meets those of others that have."""
        if not is_message(node):
            return self._start_collective(_Started(rank, role, node, len(self.ranks) - 1))
        kind, peer, started = kind_of(node), peer_of(node), _Started(rank, role, node)
        axis = self.bundle.axis_of(role)
        line = line_of(node, axis.backend if axis else "")
        ends = (rank.coordinate, peer, line) if kind is Kind.SEND else (peer, rank.coordinate, line)
        mine, theirs = (self.ends[(*ends, each)] for each in (kind, Kind.RECV if kind is Kind.SEND else Kind.SEND))
        mine.append(started)
        if len(theirs) >= len(mine):
            self._pair(started, theirs[len(mine) - 1])
        self._stand_in_line(started)
        return started

    def _stand_in_line(self, started: _Started) -> None:
        axis = self.bundle.axis_of(started.role)
        if axis is not None and axis.backend == "nccl":
            started.in_line, coordinate, group = True, started.rank.coordinate, group_of(started.node)
            self.lines[coordinate, group].append(started)
            self._advance(coordinate, group)

    def _advance(self, rank: int, group: str) -> None:
        """End what is first in the line of a group on all of its ranks, beginning with that of one."""
        ranks = [rank]
        while ranks:
            line = self.lines[ranks.pop(), group]
            together = [line[0], *line[0].others] if line and len(line[0].others) == line[0].expected else []
            if all(self.lines[each.rank.coordinate, group][0] is each for each in together):
                for each in together:
                    self.lines[each.rank.coordinate, group].popleft().is_over = True
                    ranks.append(each.rank.coordinate)

    def _pair(self, one: _Started, other: _Started) -> None:
        if _carried(one.node) != _carried(other.node):
            starts = [f"{each.rank} starts {each} ({_text(each.node)})" for each in (one, other)]
            raise PassError(
                "expected what one rank sends to another to be received in the same order and type, but in call "
                f"{self.call} {' and '.join(starts)}, which meet"
            )
        one.others, other.others = [other], [one]

    def _start_collective(self, started: _Started) -> _Started:
        mine = self.collectives[started.rank.coordinate]
        mine.append(started)
        for k, rank in enumerate(self.ranks):
            theirs = self.collectives[k]
            if rank is not started.rank and len(theirs) >= len(mine):
                other = theirs[len(mine) - 1]
                if _described(started.node) != _described(other.node):
                    raise PassError(f"expected all ranks to start the same collective, got {started} and {other}")
                started.others.append(other)
                other.others.append(started)
        self._stand_in_line(started)
        return started

    def _blocked(self, ranks: list[_Walker]) -> str:
        lines = [f"{rank} waits for {rank.blocked}" for rank in ranks]
        ended = [f"{rank} has ended" for rank in self.ranks if rank not in ranks]
        return f"call {self.call} of {self.bundle.name} would never end: {', '.join([*lines, *ended])}"

    def _check_pairs(self) -> None:
        for each in (started for several in self.ends.values() for started in several):
            if not each.others:
                other = "recv" if kind_of(each.node) is Kind.SEND else "send"
                raise PassError(f"call {self.call} of {self.bundle.name} has no {other} for {each}")


class _Walker:
    """One rank in a call; ``needed``: the values that earlier calls have left to it."""

    def __init__(self, walk: _Walk, coordinate: int, needed: dict[str, int]) -> None:
        self.walk, self.coordinate = walk, coordinate
        self.axis = walk.bundle.axis or "rank"
        self.order = walk.bundle.order(walk.call, coordinate)
        self.in_flight = InFlight(walk.bundle, self.order)
        self.steps_done, self.blocked = 0, ""
        self.started: list[_Started] = []
        for channel, count in needed.items():
            for _ in range(count):
                self.in_flight.put_one(channel, None)

    def __str__(self) -> str:
        return f"{self.axis}={self.coordinate}"

    def steps(self) -> Iterator[bool]:
        """Run the programs in order; yields where it is blocked."""
        bundle = self.walk.bundle
        for role in self.order:
            program, taken = bundle.programs[role], self.in_flight.take(role, self.order)
            started: dict[Any, _Started | None] = {
                node: taken.get(declared.name)
                for node, declared in zip(program.placeholders, program.inputs, strict=True)
            }
            for node in self.walk.events[role]:
                if is_message(node) or (is_collective(node) and self._crosses(program, node)):
                    started[node] = own = self.walk.start(self, role, node)
                    self.started.append(own)
                elif node.target is operator.getitem:
                    started[node] = started.get(node.args[0])
                elif is_wait(node):
                    waited = started.get(node.args[0])
                    while waited is not None and not waited.is_done():
                        self.blocked = str(waited)
                        yield True
                    if waited is not None:
                        waited.is_waited_for = True
                self.steps_done += 1
            self.in_flight.put(role, self._handed_on(role, program, started))

    def check_waits(self) -> None:
        """Raise ``PassError`` for what it has started and neither waits for nor leaves to the next call."""
        for each in self.started:
            if not each.is_waited_for and each not in self.in_flight.held:
                raise PassError(
                    f"in call {self.walk.call} of {self.walk.bundle.name}, {self} never waits for {each}, "
                    "whose memory may be used again before it has ended"
                )

    def _handed_on(
        self, role: str, program: Program, started: Mapping[Any, _Started | None]
    ) -> dict[str, _Started | None]:
        outputs = zip(program.outputs, program.output_values(), strict=True)
        values = {out.name: started.get(value) for out, value in outputs if out.kind is OutputKind.CHANNEL}
        return {name: values.get(name) for name in self.in_flight.written(role)}

    def _crosses(self, program: Program, node: fx.Node) -> bool:
        """Whether ranks with other programs take part in a collective. Raises ``PassError`` for some of them only."""
        along = program.mesh.axis_of_group(group_of(node))
        if not self.walk.bundle.axis or along is None:
            return False
        if along.name.partition("/")[0] == self.walk.bundle.axis and along in program.mesh.subgroups:
            raise PassError(f"{node} communicates over {along.name}: in a bundle, only over the whole of {self.axis}")
        return along.name == self.walk.bundle.axis


def _is_event(node: fx.Node) -> bool:
    return is_collective(node) or is_wait(node) or node.target is operator.getitem


def _carried(node: fx.Node) -> tuple[Any, ...]:
    (val,) = (each.meta["val"] for each in moved(node))
    return channel_of(node), tuple(val.shape), val.dtype


def _text(node: fx.Node) -> str:
    _, shape, dtype = _carried(node)
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _described(node: fx.Node) -> tuple[Any, ...]:
    known = node.meta["collective"]
    dtypes = [each.meta["val"].dtype for each in moved(node)]
    return node.target, reduction_of(node), input_bytes(node), dtypes, known.role, known.of


def _line(node: fx.Node) -> str:
    return f" ({node.meta['source']})" if node.meta.get("source") else ""
