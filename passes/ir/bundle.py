"""``Bundle``: several programs that work together, the values that they hand on, and the order in which ranks run them.

Ranks that differ by their coordinate on one axis of the mesh may run other programs, as the stages of a pipeline do,
and a call may run several, or leave values to the next call, as a deferred update does. Each rank has the whole bundle,
as it is from its place on the other axes. What a rank does at the boundary of a stage is the order of its programs
(``calls``), and the sends and recvs in these. The checker is in ``check_bundle.py``, and
``spmd/lowering/run_bundle.py`` runs a rank's programs.
"""

from __future__ import annotations

import hashlib
import re
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx

from .._torch import OpOverload
from ..errors import PassError
from .collectives import Collective, Kind, channel_of, group_of, is_message, kind_of, moved, peer_of
from .printer import print_program, short_dtype
from .program import Axis, Input, MicroBatches, OutputKind, Placements, Program
from .read_program import read_program
from .region import region_of

Orders = tuple[tuple[str, ...], ...]  # the programs that each rank runs, by its coordinate; one for all without an axis

_SECTION = re.compile(r"^# =+ (?P<role>[^ ]+) =+$", re.MULTILINE)
_ORDER = re.compile(r"^#     .*?: (?P<roles>.*)$")


@dataclass(frozen=True)
class Channel:
    """One value that programs hand on, first in, first out: between programs of a rank, or from rank to rank.

    ``shape``: on a rank; a number has no ``dtype``. ``writers``: programs, of which a call runs one. The writer's rank
    owns a value until all readers of the call have it. One that is ``sent`` is the writer's until its wait for the
    send, and the reader's from the wait for the recv on. ``given``: the input of the writer that is handed on as it is;
    empty where its program returns the value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    placement: Placements
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    sent: bool = False
    given: str = ""

    @property
    def type(self) -> str:
        """``f64[4, 8] as Shard(dim=0)``."""
        shape = f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]" if self.dtype else "number"
        return f"{shape} as {', '.join(map(repr, self.placement))}" if self.placement else shape

    def __str__(self) -> str:
        writers, readers = (" or ".join(roles) for roles in (self.writers, self.readers))
        ends = f"sent by {writers}, received by {readers}" if self.sent else f"from {writers} to {readers}"
        return f"{self.name}: {self.type}, {ends}" + (f", as {self.given}" if self.given else "")


@dataclass(frozen=True)
class Bundle:
    """Programs by role, and for each kind of call what ranks run.

    ``calls``: by name, the roles in order; one order for each coordinate along the mesh axis ``axis``, or a single one
    where that is empty and all ranks run the same. A role may come several times in an order: its k-th run takes the
    k-th of ``micro_batches``, if there are some.
    """

    name: str
    programs: Mapping[str, Program]
    calls: Mapping[str, Orders]
    channels: tuple[Channel, ...]
    axis: str = ""
    micro_batches: MicroBatches | None = None

    @classmethod
    def of(
        cls,
        name: str,
        programs: Mapping[str, Program],
        calls: Mapping[str, Sequence[Sequence[str]]],
        axis: str = "",
        given: Mapping[str, str] = MappingProxyType({}),
        micro_batches: MicroBatches | None = None,
    ) -> Bundle:
        """A bundle whose channels are read from its programs: pending inputs and outputs of one name, sends and recvs.

        ``given``: by the name of a channel, the input of its writers that is handed on.
        """
        orders = {call: tuple(map(tuple, each)) for call, each in calls.items()}
        channels = tuple(_channels(programs, given))
        return cls(name, MappingProxyType(dict(programs)), MappingProxyType(orders), channels, axis, micro_batches)

    def channel(self, name: str) -> Channel:
        """The channel of this name."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Channel]:
        return {each.name: each for each in self.channels}

    def used_by(self, roles: Iterable[str]) -> list[Channel]:
        """The channels between programs of a rank that one of these reads or writes."""
        ends = {each.name: each for role in roles for each in self._ends.get(role, ())}
        return list(ends.values())

    @cached_property
    def _ends(self) -> dict[str, list[Channel]]:
        found: dict[str, list[Channel]] = {}
        for each in self.channels:
            for role in () if each.sent else dict.fromkeys((*each.readers, *each.writers)):
                found.setdefault(role, []).append(each)
        return found

    def order(self, call: str, coordinate: int) -> tuple[str, ...]:
        """The roles that the rank at ``coordinate`` runs in a call."""
        orders = self.calls[call]
        return orders[coordinate if self.axis else 0]

    def inputs_of(self, declared: Sequence[Input], values: Sequence[Any], number: int) -> list[Any]:
        """The inputs of a program's run of this number, where its first one has the number 0."""
        return list(values) if self.micro_batches is None else self.micro_batches.of_run(declared, values, number)

    @property
    def cut(self) -> Mapping[str, int]:
        """The inputs of which each run of a program takes one part, by name, with the number of parts."""
        micro = self.micro_batches
        return {} if micro is None else dict.fromkeys(micro.split, micro.count)

    def coordinates(self, role: str) -> list[int]:
        """Those of the ranks that run a program, along the axis; ``[0]`` without one."""
        return sorted(self._coordinates.get(role, ()))

    @cached_property
    def _coordinates(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for orders in self.calls.values():
            for k, order in enumerate(orders):
                for role in dict.fromkeys(order):
                    found.setdefault(role, set()).add(k)
        return found

    def coordinate_of(self, program: Program) -> int:
        """The coordinate along the axis of the rank that a program is for."""
        return next(each.coordinate for each in program.mesh.axes if each.name == self.axis)

    def roles_of(self, program: Program) -> list[str]:
        """The programs that the rank runs that a program is for."""
        own = self.coordinate_of(program)
        return [role for role in self.programs if own in self.coordinates(role)]

    def order_of(self, program: Program) -> tuple[str, ...]:
        """The roles that the rank that a program is for runs in a call, of which there is one kind."""
        (call,) = self.calls
        return self.order(call, self.coordinate_of(program))

    def mapped_for(self, program: Program, rewritten: Callable[[Program], Program]) -> Bundle:
        """The same, with the programs that the rank runs that a program is for as a function makes them."""
        own = {role: rewritten(self.programs[role]) for role in self.roles_of(program)}
        return replace(self, programs=ChainMap(own, cast(dict[str, Program], self.programs)))

    def axis_of(self, role: str) -> Axis | None:
        """The axis as a program has it."""
        return next((each for each in self.programs[role].mesh.axes if each.name == self.axis), None)

    def digest(self, roles: Iterable[str] | None = None) -> str:
        """A short text that is equal on all ranks of a bundle: its channels, calls, and programs, or these of them.

        Of the integers among the arguments of ops only peers count: others are sizes of this rank's parts, and where
        they begin. Floats count where a node is not marked as one whose numbers are the rank's own.
        """
        return hashlib.sha256("\n".join(self._lines(self.programs if roles is None else roles)).encode()).hexdigest()[
            :16
        ]

    def _lines(self, roles: Iterable[str]) -> Iterator[str]:
        yield from (self.name, self.axis, str(dict(self.calls)), str(self.micro_batches))
        for each in self.channels:
            facts = each.dtype, len(each.shape), each.placement, each.writers, each.readers, each.sent, each.given
            yield f"{each.name}: {facts}"
        for role in roles:
            yield f"{role} on {self.programs[role].mesh}"
            yield from _facts(self.programs[role])

    def with_orders(self, calls: Mapping[str, Orders]) -> Bundle:
        """The same programs in other orders."""
        return replace(self, calls=MappingProxyType(dict(calls)))

    def with_programs(self, programs: Mapping[str, Program]) -> Bundle:
        """Other programs in the same orders."""
        given = {each.name: each.given for each in self.channels if each.given}
        return Bundle.of(self.name, programs, self.calls, self.axis, given, self.micro_batches)


def print_bundle(bundle: Bundle) -> str:
    """A bundle as text: channels and calls, then each program as ``print_program`` has it."""
    over = f" over {bundle.axis}" if bundle.axis else ""
    lines = [f"# bundle {bundle.name}{over}", *(f"# channel {each}" for each in bundle.channels)]
    for call, orders in bundle.calls.items():
        lines.append(f"# call {call}")
        ranks = [f"{bundle.axis}={k}" if bundle.axis else "all ranks" for k in range(len(orders))]
        lines += [f"#     {rank}: {', '.join(order)}" for rank, order in zip(ranks, orders, strict=True)]
    sections = [f"\n# {'=' * 20} {role} {'=' * 20}\n{print_program(each)}" for role, each in bundle.programs.items()]
    return "\n".join([*lines, *sections])


def read_bundle(text: str, like: Bundle) -> tuple[Bundle, int]:
    """The bundle that ``text`` is, and how many lines of its programs are not those of ``like``, as ``read_program``.

    Orders may be edited, and the lines of programs; channels follow from these. Raises ``PassError`` for another text.
    """
    head, *rest = _SECTION.split(text)
    texts = dict(zip(rest[::2], rest[1::2], strict=True))
    if list(texts) != list(like.programs):
        raise PassError(f"expected the programs {', '.join(like.programs)}, got {', '.join(texts) or 'none'}")
    read = {role: read_program(each, like.programs[role]) for role, each in texts.items()}
    calls = dict(_calls(head))
    given = {each.name: each.given for each in like.channels if each.given}
    bundle = Bundle.of(
        like.name, {role: each for role, (each, _) in read.items()}, calls, like.axis, given, like.micro_batches
    )
    return bundle, sum(count for _, count in read.values())


def _calls(head: str) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    for section in head.split("# call ")[1:]:
        name, *lines = section.splitlines()
        found = [order for line in lines if (order := _ORDER.match(line))]
        yield name, [tuple(each["roles"].split(", ")) for each in found]


def _channels(programs: Mapping[str, Program], given: Mapping[str, str]) -> Iterator[Channel]:
    """The channels by name, each with the type that its first writer, or else reader, gives it."""
    ends: dict[str, tuple[list[tuple[str, Ends]], list[tuple[str, Ends]]]] = {}
    for role, program in programs.items():
        for k, found in enumerate((written_to(program, given), read_from(program))):
            for name, end in found.items():
                ends.setdefault(name, ([], []))[k].append((role, end))
    for name, (writers, readers) in ends.items():
        _, first = (writers or readers)[0]
        roles = [tuple(role for role, _ in each) for each in (writers, readers)]
        described = first.shape, first.dtype, first.placement
        yield Channel(name, *described, roles[0], roles[1], first.sent, given.get(name, ""))


@dataclass(frozen=True)
class Ends:
    """One end of a channel as a program has it, and how often it moves a value when it runs once."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    placement: Placements = ()
    sent: bool = False
    times: int = 1


def written_to(program: Program, given: Mapping[str, str]) -> dict[str, Ends]:
    """The channels a program writes, by name: outputs it leaves pending, messages, and values handed on as given."""
    outputs = [each for each in program.outputs if each.kind is OutputKind.CHANNEL]
    found = {each.name: Ends(each.shape, each.dtype, each.placement) for each in outputs}
    names = {each.name: each for each in program.inputs}
    pending = {each.name for each in outputs}
    if pending:  # a program that only takes values hands none on
        handed = {channel: names[name] for channel, name in given.items() if name in names}
        found |= {c: Ends(each.shape, each.dtype, each.placement if each.dtype else ()) for c, each in handed.items()}
    return found | _messages(program, Kind.SEND)


def read_from(program: Program) -> dict[str, Ends]:
    """The channels that a program reads, by name."""
    inputs = [each for each in program.inputs if each.role.is_of_channel]
    return {each.name: Ends(each.shape, each.dtype, each.placement) for each in inputs} | _messages(program, Kind.RECV)


def _messages(program: Program, kind: Kind) -> dict[str, Ends]:
    found: dict[str, Ends] = {}
    for node in messages_of(program):
        if kind_of(node) is kind:
            (val,) = (each.meta["val"] for each in moved(node))
            name = channel_of(node)
            times = found[name].times + 1 if name in found else 1
            found[name] = Ends(tuple(val.shape), val.dtype, tuple(node.meta.get("placement") or ()), True, times)
    return found


def messages_of(program: Program) -> list[fx.Node]:
    """The nodes that send or receive, in order."""
    return [node for node in program.collectives() if is_message(node)]


def numbered(order: Iterable[str]) -> list[tuple[str, int]]:
    """The roles of an order, each with the number of its runs before."""
    before, found = Counter[str](), list[tuple[str, int]]()
    for role in order:
        found.append((role, before[role]))
        before[role] += 1
    return found


def run_names(order: Sequence[str]) -> list[str]:
    """The names of runs: ``forward.0 of 3`` on a micro-batch, and the role alone of a program that runs once."""
    return [role if order.count(role) == 1 else f"{role} of {number}" for role, number in numbered(order)]


@dataclass(eq=False)
class _Value:
    value: Any
    read_by: set[str] = field(default_factory=set)


class InFlight:
    """The values in the channels of one rank, of those between its own programs; in the order in which they came.

    ``roles``: its programs; None for all of the bundle.
    """

    def __init__(self, bundle: Bundle, roles: Collection[str] | None = None) -> None:
        roles = dict.fromkeys(bundle.programs if roles is None else roles)
        local = bundle.used_by(roles)
        self._read: dict[str, list[Channel]] = {role: [] for role in roles}
        self._written: dict[str, list[Channel]] = {role: [] for role in roles}
        self._values: dict[str, list[_Value]] = {each.name: [] for each in local}
        for found, ends in ((self._read, "readers"), (self._written, "writers")):
            for each in local:
                for role in roles.keys() & getattr(each, ends):
                    found[role].append(each)

    @property
    def counts(self) -> dict[str, int]:
        """The number of values in each channel."""
        return {name: len(values) for name, values in self._values.items()}

    @property
    def held(self) -> list[Any]:
        """The values in all channels."""
        return [each.value for values in self._values.values() for each in values]

    def clear(self) -> None:
        """Drop all values."""
        for values in self._values.values():
            values.clear()

    def take(self, role: str, order: Sequence[str]) -> dict[str, Any]:
        """Take a value from each channel that a program reads, by channel: the oldest that it has not read.

        A value is dropped once its readers in ``order`` have taken it. Raises ``PassError`` if a channel has none.
        """
        taken = {}
        for channel in self._read[role]:
            values = self._values[channel.name]
            found = next((each for each in values if role not in each.read_by), None)
            if found is None:
                raise PassError(f"{role} reads {channel.name} before a program has written it")
            taken[channel.name] = found.value
            if len(channel.readers) > 1:
                found.read_by.add(role)
                if any(each in order and each not in found.read_by for each in channel.readers):
                    continue
            values.remove(found)
        return taken

    def put(self, role: str, values: Mapping[str, Any]) -> None:
        """Put the values that a program has written into its channels."""
        for channel in self._written[role]:
            self.put_one(channel.name, values[channel.name])

    def written(self, role: str) -> list[str]:
        """The channels that a program writes."""
        return [each.name for each in self._written[role]]

    def holds(self, role: str) -> bool:
        """Whether all channels that a program reads have a value."""
        return all(self._values[each.name] for each in self._read[role])

    def put_one(self, channel: str, value: Any) -> None:
        """One more value in a channel."""
        self._values[channel].append(_Value(value))


def _facts(program: Program) -> Iterator[str]:
    """The facts that all ranks of a program share, a line for each input, node and output."""
    position = {node: k for k, node in enumerate(program.graph.nodes)}
    for declared in program.inputs:
        yield from (f"{each.role} {each.name}: {each.dtype}{each.placement}{each.memory}" for each in declared.inside)
    for node in program.graph.nodes:
        described = node.meta.get("collective")
        facts = [node.op, _target(node.target), _arguments(node, position, program)]
        if isinstance(described, Collective):
            axis = program.mesh.axis_of_group(group_of(node))
            facts += [described.kind, described.role, axis.name if axis else described.axis]
        if is_message(node):
            facts += [channel_of(node), f"peer {peer_of(node)}"]
        yield " ".join(facts)
        if (region := region_of(node)) is not None:
            within = {inner: k for k, inner in enumerate(region.graph.nodes)}
            for inner in region.graph.nodes:
                yield f"{inner.op} {_target(inner.target)} {_arguments(inner, within, program)}"
    yield from (f"{each.kind} {each.name}: {each.role} {each.dtype}{each.placement}" for each in program.outputs)


def _target(target: Any) -> str:
    if isinstance(target, (str, OpOverload)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__name__)}"


def _arguments(node: fx.Node, position: Mapping[fx.Node, int], program: Program) -> str:
    """The arguments of a node without the numbers that ranks may differ in."""
    own = (int, float) if "numbers" in node.meta else (int,)
    return _shared((node.args, node.kwargs), own, position, program)


def _shared(value: Any, own: tuple[type, ...], position: Mapping[fx.Node, int], program: Program) -> str:
    """An argument without numbers of the types ``own``."""
    if isinstance(value, fx.Node):
        return f"%{position[value]}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={_shared(each, own, position, program)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_shared(each, own, position, program) for each in value) + "]"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, str):
        axis = program.mesh.axis_of_group(value)
        return axis.name if axis else value
    if callable(value) and not isinstance(value, torch.dtype):
        return _target(value)
    return "#" if type(value) in own else repr(value)
