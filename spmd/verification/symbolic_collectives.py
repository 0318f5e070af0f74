"""Collectives on symbols: a sum that is pending over an axis is complete once it was reduced there.

Nothing is there before it is waited for, operands must keep their values until then, and memory that ranks publish
until all have read it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from passes import Kind, Mesh
from passes.communication.published import reduces_in_place
from passes.ir.collectives import c10d, channel_of, group_of, is_shared, kind_of
from passes.ir.schemas import argument, schema

from . import symbols
from .collective_semantics import COPIES_FIRST, SEMANTICS, SENDS_ADDENDS
from .families import Family
from .lockstep import LockstepError, Published, ends_of
from .machine import CapturedMachine, Machine
from .symbolic.addends import split_addends
from .symbolic_ops import Unknown
from .symbols import tensors_of

Coordinates = tuple[int, ...]
_NUMBERS = count(1)


@dataclass
class _InFlight:
    """A collective that was started and not yet waited for, on each rank that is looked at."""

    nodes: Sequence[fx.Node]
    operands: list[Any]
    before: list[list[Tensor]]  # copies of the operands, as they were at the start
    results: list[Any]


@dataclass(eq=False)
class _Message:
    """A send or a recv of each rank that is looked at, on the machines that started it.

    ``kept``: operands of sends, and memory for what is received, each with a copy of what it was at the start.
    """

    machines: Sequence[Machine]
    nodes: Sequence[fx.Node]
    results: list[Any]
    kept: list[tuple[Tensor, Tensor]]


@dataclass
class Messages:
    """Messages between ranks of several programs, by their two ends: symbols and the node that sent them."""

    letters: dict[Any, deque[tuple[fx.Node, Tensor]]] = field(default_factory=lambda: defaultdict(deque))
    moves: int = 0  # how often something was sent or received
    axis: str = ""  # along which ranks run other programs

    def check_received(self) -> None:
        """Raise ``LockstepError`` for a message that nobody has received."""
        for node, _ in (letter for letters in self.letters.values() for letter in letters):
            raise LockstepError(f"nobody receives what {node} sends ({channel_of(node)})", node)


@dataclass(frozen=True)
class _Group:
    """Ranks that communicate: ``axis`` by number, the coordinates there, and of all axes those of each member."""

    axis: int
    size: int  # of the whole axis
    along: range
    members: list[Coordinates]


class Collectives:
    """Those that are in flight, of the ranks that are looked at.

    ``messages``: what crosses from and to ranks of other programs; ``flying``: of these, what the ranks have started.
    """

    def __init__(
        self,
        captured: CapturedMachine,
        ranks: Sequence[Machine],
        messages: Messages | None = None,
        flying: list[_Message] | None = None,
    ) -> None:
        self.captured, self.ranks = captured, ranks
        self._messages, self._under_way = messages or Messages(), [] if flying is None else flying
        self._published, self._number = Published(), next(_NUMBERS)
        self._flying: list[_InFlight] = []
        self._at = {tuple(axis.coordinate for axis in each.program.mesh.axes): k for k, each in enumerate(ranks)}

    def start(self, nodes: Sequence[fx.Node]) -> None:
        """Start the collective of a node on each rank."""
        node = nodes[0]
        name = schema(node.target).arguments[0].name
        if node.target in SENDS_ADDENDS:
            self._split_addends(nodes)
        pairs = list(zip(self.ranks, nodes, strict=True))
        operands = [machine.read_all(argument(each, name)) for machine, each in pairs]
        lying = [machine.value(argument(each, name)) for machine, each in pairs]
        outs = [machine.value(argument(each, "out")) for machine, each in pairs]
        if node.target is c10d.all_reduce_.default:
            outs = lying
        results = [
            machine.fresh(each, of) if out is None else out
            for (machine, each), out, of in zip(pairs, outs, operands, strict=True)
        ]
        if is_shared(node):
            self._published.start(node, [each for x in tensors_of(lying) for each in symbols.pieces(x)])
        late = is_shared(node) and outs[0] is not None
        for machine, into, read in zip(self.ranks, results, lying, strict=True):
            if not late and (node.target in COPIES_FIRST or not _overlap(tensors_of(into), tensors_of(read))):
                machine.poison(tensors_of(into))
        before = [[x.clone() for x in tensors_of(value)] for value in operands]
        self._flying.append(_InFlight(nodes, operands, before, results))
        for (machine, each), result in zip(pairs, results, strict=True):
            machine.keep_result(each, result, argument(each, "out"))

    def _split_addends(self, nodes: Sequence[fx.Node]) -> None:
        """Let each rank hold its own addends of what its group will add up, if all of the group are looked at."""
        for group in self._groups(nodes[0]):
            line = [self._at[each] for each in group.members if each in self._at]
            if len(line) < group.size:
                continue
            operands = [argument(nodes[rank], schema(nodes[rank].target).arguments[0].name) for rank in line]
            held = [self.ranks[rank].read(x) for rank, x in zip(line, operands, strict=True)]
            marks = symbols.pieces(held[0])[1]
            bit = symbols.pending(group.axis, "sum")
            others = (marks & symbols.PENDING & ~bit).unique()
            if len(others) > 1 or not all(map(torch.equal, _bits(held[:1] * len(held)), _bits(held))):
                continue
            place = [n for k, n in enumerate(group.members[0]) if k != group.axis and not symbols.is_pending(others, k)]
            of_runs = symbols.is_pending(others, len(group.members[0]))  # all runs of a program add to one sum
            program = self.ranks[0].program.code if of_runs else self._number
            parts = split_addends(held[0], bit, len(line), (nodes[0].name, program, *place))
            for rank, x, part in zip(line, operands, parts, strict=True):
                machine = self.ranks[rank]
                machine.write_result(x, machine.value(x), part)

    def start_message(self, nodes: Sequence[fx.Node]) -> None:
        """Send what each rank sends, or make place for what it receives."""
        results, kept = [], list[tuple[Tensor, Tensor]]()
        for machine, node in zip(self.ranks, nodes, strict=True):
            out, val = argument(node, "out"), node.meta["val"]
            result = machine.value(out) if out is not None else machine.unknown(val.shape, val.dtype)
            if kind_of(node) is Kind.SEND:
                sent, lying = machine.read(argument(node, "x")).clone(), machine.value(argument(node, "x"))
                self._messages.letters[ends_of(machine.program, node)].append((node, sent))
                self._messages.moves += 1
            else:
                machine.poison([result])
                lying = result
            kept.append((lying, lying.clone()))
            machine.keep_result(node, result, out)
            results.append(result)
        self._under_way.append(_Message(self.ranks, nodes, results, kept))

    def end_messages(self, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """Finish the messages that are waited for; yields while one has not come."""
        value = self.ranks[0].env[nodes[0].args[0]]  # type: ignore[index]
        for each in [message for message in self._under_way if message.results[0] is value]:
            self._under_way.remove(each)
            if not all(torch.equal(*_bits(pair)) for pair in each.kept):
                first = each.nodes[0]
                what = "operand" if kind_of(first) is Kind.SEND else "memory"
                raise LockstepError(f"the {what} of {first} is overwritten before it is waited for", first)
            for machine, node, result in zip(each.machines, each.nodes, each.results, strict=True):
                letters = self._messages.letters[ends_of(machine.program, node)]
                if kind_of(node) is Kind.SEND:
                    continue
                while not letters:
                    yield nodes[0]
                (sent, symbols_sent), self._messages.moves = letters.popleft(), self._messages.moves + 1
                if channel_of(sent) != channel_of(node) or symbols_sent.shape != result.shape:
                    raise LockstepError(
                        f"{node} receives {channel_of(node)}, but what comes is {channel_of(sent)}", node
                    )
                machine.write_result(node, result, symbols_sent)

    def wait(self, nodes: Sequence[fx.Node]) -> None:
        """Finish what writes to the values that are waited for. Raises ``Unknown`` if its results are not known."""
        waited = [machine.env[each.args[0]] for machine, each in zip(self.ranks, nodes, strict=True)]  # type: ignore[index]
        found = [
            [k for k, each in enumerate(self._flying) if any(x is value for x in tensors_of(each.results[rank]))]
            for rank, value in enumerate(waited)
        ]
        if any(each != found[0] for each in found):
            raise LockstepError("expected all ranks to wait for the same collective", nodes[0])
        for flying in [self._flying[k] for k in found[0]]:
            self._flying.remove(flying)
            self._finish(flying)

    def end(self, node: fx.Node) -> None:
        """The call is over."""
        self._published.check_all(node)

    def _finish(self, flying: _InFlight) -> None:
        node = flying.nodes[0]
        name = schema(node.target).arguments[0].name
        for machine, each, then in zip(self.ranks, flying.nodes, flying.before, strict=True):
            now = tensors_of(machine.read_all(argument(each, name)))
            if node.target not in COPIES_FIRST and not all(map(torch.equal, _bits(now), _bits(then))):
                raise LockstepError(f"the operand of {node} is overwritten before the collective is waited for", node)
        unknown: Unknown | None = None
        for group in self._groups(node):
            known = {k: self._at[each] for k, each in zip(group.along, group.members, strict=True) if each in self._at}
            try:
                computed = self._computed(flying, group)
            except Unknown as error:
                unknown, computed = error, None
            for k, rank in known.items():
                new = None if computed is None else computed[k - group.along[0]]
                self.ranks[rank].write_result(flying.nodes[rank], flying.results[rank], new)
        if is_shared(node) and reduces_in_place(node):
            self._overwrite_operands(flying)
        self._published.wait(node)
        if unknown is not None and not any(map(symbols.is_unknown, tensors_of(flying.before))):
            raise unknown

    def _overwrite_operands(self, flying: _InFlight) -> None:
        """Let operands that were reduced in place hold the result, where it was written to them, or nothing."""
        for machine, each, result in zip(self.ranks, flying.nodes, flying.results, strict=True):
            operand = tensors_of(machine.value(each.args[0]))
            if not _overlap(tensors_of(result), operand):
                machine.poison(operand)
        self._published.publish_again(flying.nodes[0])

    def _computed(self, flying: _InFlight, group: _Group) -> list[Any]:
        """The results of all members."""
        node = flying.nodes[0]
        if self.ranks[0].program.mesh.axes[group.axis].name == self._messages.axis:
            raise Unknown("ranks that run other programs take part in it")
        line = {each[group.axis]: rank for each, rank in self._at.items() if _same_line(each, group)}
        is_list = isinstance(flying.operands[0], (list, tuple))
        families = [
            Family(self.captured, {k: flying.before[rank][n] for k, rank in line.items()}, group.size)
            if len(line) < group.size
            else None
            for n in range(len(flying.before[0]))
        ]
        operands: list[Any] = []
        for k in group.along:
            held = [flying.before[line[k]][n] if family is None else family.at(k) for n, family in enumerate(families)]
            operands.append(held if is_list else held[0])
        if kind_of(node) in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST):
            self._check_complete(operands, group)
        given = [self._arguments(flying.nodes[line.get(k, line[0])], group) for k in group.along]
        if (
            len(line) < group.size
            and len({str(self._arguments(flying.nodes[rank], None)) for rank in line.values()}) > 1
        ):
            raise Unknown("the ranks that are looked at communicate in different ways")
        return SEMANTICS[node.target](operands, given)

    def _groups(self, node: fx.Node) -> Iterator[_Group]:
        """The groups that have a rank that is looked at."""
        found: dict[Any, _Group] = {}
        for coordinates, rank in self._at.items():
            axis, size = _axis_of(self.ranks[rank].program.mesh, node)
            begin = coordinates[axis] // size * size
            along = range(begin, begin + size)
            members = [(*coordinates[:axis], k, *coordinates[axis + 1 :]) for k in along]
            found.setdefault(members[0], _Group(axis, self.ranks[rank].program.mesh.axes[axis].size, along, members))
        yield from found.values()

    def _check_complete(self, operands: Sequence[Any], group: _Group) -> None:
        """Parts of a sum that is pending over an axis are not exchanged along it."""
        if any(symbols.is_pending(symbols.pieces(x)[1], group.axis) for x in tensors_of(list(operands))):
            raise Unknown("it exchanges values that are still to be reduced over its axis")

    def _arguments(self, node: fx.Node, group: _Group | None) -> dict[str, Any]:
        names = [each.name for each in schema(node.target).arguments if not each.is_out]
        given = {name: argument(node, name) for name in names[1:]}
        if "reduce_op" in given and group is not None:
            reduction = str(given["reduce_op"])
            given["reduce_op"] = lambda operands: _reduced(operands, reduction, group)
        return given


def _axis_of(mesh: Mesh, node: fx.Node) -> tuple[int, int]:
    """The number of the axis that a collective communicates along, and the size of its groups."""
    axis = mesh.axis_of_group(group_of(node))
    if axis is None:
        raise LockstepError(f"{node} communicates in a group that is no axis of the mesh: {group_of(node)!r}", node)
    names = [each.name for each in mesh.axes]
    return names.index(axis.name.rpartition("/")[0] if axis in mesh.subgroups else axis.name), axis.size


def _same_line(coordinates: Coordinates, group: _Group) -> bool:
    return all(
        k == group.axis or here == there
        for k, (here, there) in enumerate(zip(coordinates, group.members[0], strict=True))
    )


def _reduced(operands: Sequence[Tensor], reduction: str, group: _Group) -> Tensor:
    """The result of a reduction: pending sums are complete, whole values are summed in the field."""
    kind = "sum" if reduction == "avg" else reduction
    if kind not in symbols.REDUCTIONS:
        raise Unknown(f"it reduces by {reduction!r}")
    bit, bits = symbols.pending(group.axis, kind), sum(symbols.pending(group.axis, each) for each in symbols.REDUCTIONS)
    pieces = [symbols.pieces(x) for x in operands]
    found, marks = pieces[0]
    unknown = reduce(torch.bitwise_or, (each & symbols.DOUBT for _, each in pieces))
    pending = (marks & bits) != 0
    if any(bool(((each ^ marks) & ~symbols.DOUBT).any()) for _, each in pieces):
        raise Unknown("some ranks hold values that are to be reduced, and others do not")
    if bool((pending & (marks & bits != bit)).any()):
        raise Unknown(f"it reduces by {reduction!r} what is to be reduced otherwise", wrong=True)
    if bool(pending.any()) and len(group.along) < group.size:
        raise Unknown("it reduces over a part of the axis over which a sum is pending")
    if any(bool((pending & (each != found)).any()) for each, _ in pieces):
        raise Unknown("the ranks reduce parts of different values")
    total = _combined([each for each, _ in pieces], kind)
    total = torch.where(pending, found, total)
    if reduction == "avg":
        total = symbols.over(total, torch.tensor(symbols.number(len(operands))))
    return symbols.elements(total, (marks & ~bits) | unknown)


def _combined(found: list[Tensor], kind: str) -> Tensor:
    """Values of which each rank has its own: summed; the largest or smallest of equal ones is the same."""
    if kind == "sum":
        return reduce(symbols.plus, found)
    together = reduce(lambda one, other: symbols.hashed(symbols.key(kind), one, other), found)
    equal = reduce(torch.logical_and, (each == found[0] for each in found))
    return torch.where(equal, found[0], together)


def _bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(symbols.pieces(x)) for x in tensors]


def _overlap(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    spans = [[(x.data_ptr(), x.data_ptr() + _extent(x)) for x in of if x.numel()] for of in (some, others)]
    return any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


def _extent(x: Tensor) -> int:
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size()
