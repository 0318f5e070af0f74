"""Run the programs of all ranks in one process, node by node, in lockstep: collectives are computed over all ranks.

A result is not there before it is waited for, and operands are read as late as a backend may read them, so that a
missing wait and memory that is written too early show in the numbers. Memory that ranks publish to each other has to
keep its values until all ranks are known to have read it.

Kernels of matrix products round by where operands begin, so these compute on copies at aligned addresses: a pass that
only moves values shows no other bits. Values of a program with ``same_bits`` are aligned, and read where they are.

Ranks that run one program step together. Those of another program of a bundle do so by themselves, and what crosses
from one to the other, a message or a collective of both, is in ``Crossing``; a wait yields until it is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from passes import Mesh, Program, SpmdError
from passes.communication.published import reduces_in_place
from passes.ir.collectives import (
    Kind,
    c10d,
    channel_of,
    group_of,
    is_collective,
    is_message,
    is_shared,
    is_wait,
    kind_of,
    line_of,
    peer_of,
)
from passes.ir.inline import inlined
from passes.ir.ops import Trait, has
from passes.ir.schemas import argument, schema
from passes.runtime.arena import aligned
from passes.runtime.collective_ops import bounds

from .._torch import DisableAutocast, OpOverload, storage_id
from .collective_semantics import COPIES_FIRST, SEMANTICS
from .poison import overlap, poison, poisoned, share_memory, tensors_of

_OF_ELEMENTS = (Trait.VIEW, Trait.UNDECLARED_VIEW, Trait.POINTWISE, Trait.MUTABLE, Trait.COPIES, Trait.READS_MEMORY)
Watch = Callable[[Sequence[fx.Node], Sequence[Any]], None]  # the node of each rank, and its value there


class LockstepError(SpmdError):
    """The programs of the ranks do not fit together, or a node raised. ``node``: the one of rank 0."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.node = node


def run_in_lockstep(
    programs: Sequence[Program], inputs: Sequence[Sequence[Any]], watch: Watch | None = None
) -> list[tuple[Any, ...]]:
    """Run the program of each rank on its inputs, which are written to as a program says; returns its outputs.

    ``watch`` is called after every node, in a region too. Raises ``LockstepError``.
    """
    crossing = Crossing()
    steps = steps_of(programs, inputs, crossing, watch)
    with torch.no_grad(), DisableAutocast():
        try:
            blocked = next(steps)
        except StopIteration as end:
            crossing.check_received()
            return end.value  # type: ignore[no-any-return]
    raise LockstepError(f"{blocked} waits for ranks of another program, and all of them run this one", blocked)


Steps = Generator[fx.Node, None, list[tuple[Any, ...]]]  # yields the node that waits for others; returns outputs


def steps_of(
    programs: Sequence[Program],
    inputs: Sequence[Sequence[Any]],
    crossing: Crossing,
    watch: Watch | None = None,
    pending: list[Pending] | None = None,
) -> Steps:
    """``run_in_lockstep`` of the ranks that run one program, while others run others.

    ``pending``: what these ranks have in flight from programs before this one, and leave in flight behind it.
    """
    programs = [inlined(program) for program in programs]
    lengths = [len(program.graph.nodes) for program in programs]
    if len(set(lengths)) != 1:
        raise LockstepError(
            f"expected all ranks to run the same ops, but their programs have {lengths} nodes", programs[0].output_node
        )
    return _Lockstep(programs, inputs, watch, crossing, [] if pending is None else pending).run()


@dataclass(eq=False)
class Pending:
    """A collective that was started: the operands of all ranks, their arguments, and where the results go.

    ``nodes``: of each rank. ``letters``: of a send. ``meetings``: of a collective that ranks of other programs start,
    too; each with this rank's coordinate.
    """

    nodes: Sequence[fx.Node]
    operands: list[Any]
    arguments: list[dict[str, Any]]
    results: list[list[Tensor]]
    letters: list[_Letter] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the messages that are received
    meetings: list[tuple[_Rendezvous, int]] = field(default_factory=list)

    @property
    def node(self) -> fx.Node:
        """That of the first rank."""
        return self.nodes[0]


@dataclass(eq=False)
class _Letter:
    """A message on its way: ``operand`` as it lies, and as it was ``sent``."""

    node: fx.Node
    operand: Tensor
    sent: Tensor


@dataclass(eq=False)
class _Rendezvous:
    """A collective of ranks that run several programs: what each has brought, by coordinate, and the results."""

    size: int
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    brought: dict[int, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    results: list[Any] | None = None

    def result(self, coordinate: int) -> Any:
        """The result of a rank; operands are read when the first rank waits."""
        if self.results is None:
            operands, arguments = zip(*(self.brought[k] for k in range(self.size)), strict=True)
            self.results = SEMANTICS[self.nodes[0].target](operands, arguments)
        return self.results[coordinate]


class Crossing:
    """Traffic between ranks of one program and those of another: messages, and collectives of both."""

    def __init__(self) -> None:
        self._letters: dict[Any, list[_Letter]] = defaultdict(list)
        self._expected: dict[Any, int] = defaultdict(int)
        self._taken: set[tuple[Any, int]] = set()
        self._meetings: dict[Any, _Rendezvous] = {}
        self._started: dict[Any, int] = defaultdict(int)
        self.moves = 0  # how often something has crossed, or was brought to do so

    def send(self, program: Program, node: fx.Node, x: Tensor) -> _Letter:
        """A rank sends ``x``."""
        self.moves += 1
        letter = _Letter(node, x, x.clone())
        self._letters[ends_of(program, node)].append(letter)
        return letter

    def expect(self, program: Program, node: fx.Node) -> int:
        """A rank starts to receive; returns the number of the message that it gets, of those in one line."""
        ends = ends_of(program, node)
        self._expected[ends] += 1
        return self._expected[ends] - 1

    def arrived(self, program: Program, node: fx.Node, number: int, is_taken: bool) -> Tensor | None:
        """The message of this number for a rank from the peer of ``node``; None while it was not sent."""
        ends = ends_of(program, node)
        letters = self._letters[ends]
        if len(letters) <= number:
            return None
        letter = letters[number]
        if channel_of(letter.node) != channel_of(node):
            comes = channel_of(letter.node)
            raise LockstepError(f"{node} receives {channel_of(node)}, but what comes is {comes}", node)
        if is_taken:
            self.moves += 1
            self._taken.add((ends, number))
        return letter.operand

    def check_received(self) -> None:
        """Raise ``LockstepError`` for a message that nobody has received."""
        sent = [(ends, k, letter) for ends, letters in self._letters.items() for k, letter in enumerate(letters)]
        left = [letter for ends, k, letter in sent if (ends, k) not in self._taken]
        if left:
            raise LockstepError(f"nobody receives what {left[0].node} sends ({channel_of(left[0].node)})", left[0].node)

    def join(self, program: Program, node: fx.Node, operand: Any, given: dict[str, Any]) -> tuple[_Rendezvous, int]:
        """A rank starts a collective that those of other programs start, too; returns it, and the rank's coordinate."""
        others, coordinate = _position(program.mesh, group_of(node), node)
        axis = program.mesh.axis_of_group(group_of(node))
        assert axis is not None
        self.moves += 1
        key = axis.name, others, coordinate
        number, self._started[key] = self._started[key], self._started[key] + 1
        meeting = self._meetings.setdefault((axis.name, others, number), _Rendezvous(axis.size))
        first = next(iter(meeting.nodes.values()), node)
        if first.target != node.target:
            raise LockstepError(f"expected all ranks to start {first.format_node()}, got {node.format_node()}", node)
        meeting.nodes[coordinate], meeting.brought[coordinate] = node, (operand, given)
        return meeting, coordinate


def ends_of(program: Program, node: fx.Node) -> tuple[Any, ...]:
    """The key that both ends of a message share: the axis, the coordinates of sender and receiver, and the line."""
    axis = program.mesh.axis_of_group(group_of(node))
    others, coordinate = _position(program.mesh, group_of(node), node)
    ends = (coordinate, peer_of(node)) if kind_of(node) is Kind.SEND else (peer_of(node), coordinate)
    return axis.name if axis else "", others, ends, line_of(node, axis.backend if axis else "")


@dataclass
class _Lockstep:
    programs: Sequence[Program]
    inputs: Sequence[Sequence[Any]]
    watch: Watch | None
    crossing: Crossing
    pending: list[Pending]

    def run(self) -> Steps:
        ranks = [_Rank(program, given) for program, given in zip(self.programs, self.inputs, strict=True)]
        self.published = Published()
        for nodes in zip(*(program.graph.nodes for program in self.programs), strict=True):
            self._check_equal(nodes)
            try:
                values = yield from self._step(ranks, nodes)
            except LockstepError:
                raise
            except Exception as error:
                raise LockstepError(f"{type(error).__name__}: {error}", nodes[0]) from error
            if nodes[0].op == "output":
                self.published.check_all(nodes[0])
                return [tuple(each) if isinstance(each, (list, tuple)) else (each,) for each in values]
            if self.watch is not None:
                self.watch(nodes, values)
            for rank, node, value in zip(ranks, nodes, values, strict=True):
                rank.keep(node, value)
        raise AssertionError("every graph ends in an output")

    def _check_equal(self, nodes: Sequence[fx.Node]) -> None:
        for rank, node in enumerate(nodes):
            if (node.op, node.target) != (nodes[0].op, nodes[0].target) and node.op not in ("placeholder", "get_attr"):
                raise LockstepError(
                    f"expected all ranks to run the same ops, but rank 0 runs {nodes[0].format_node()} where rank "
                    f"{rank} runs {node.format_node()}",
                    nodes[0],
                )

    def _step(self, ranks: Sequence[_Rank], nodes: Sequence[fx.Node]) -> Generator[fx.Node, None, list[Any]]:
        if is_message(nodes[0]):
            return self._start_message(ranks, nodes)
        if is_collective(nodes[0]):
            return self._start(ranks, nodes)
        values = [rank.value(node) for rank, node in zip(ranks, nodes, strict=True)]
        if is_wait(nodes[0]):
            yield from self._wait(nodes[0], values)
        return values

    def _start_message(self, ranks: Sequence[_Rank], nodes: Sequence[fx.Node]) -> list[Any]:
        arguments = [rank.arguments(each) for rank, each in zip(ranks, nodes, strict=True)]
        outs = [_target(each) for each in arguments]
        results = [x if x is not None else poisoned(each.meta["val"]) for x, each in zip(outs, nodes, strict=True)]
        pending = Pending(nodes, [], arguments, [tensors_of(each) for each in results])
        for program, node, given, into in zip(self.programs, nodes, arguments, pending.results, strict=True):
            if kind_of(node) is Kind.SEND:
                pending.letters.append(self.crossing.send(program, node, given["x"]))
            else:
                pending.numbers.append(self.crossing.expect(program, node))
                poison(into)
        self.pending.append(pending)
        return results

    def _start(self, ranks: Sequence[_Rank], nodes: Sequence[fx.Node]) -> list[Any]:
        node = nodes[0]
        arguments = [rank.arguments(each) for rank, each in zip(ranks, nodes, strict=True)]
        names = [each.name for each in schema(node.target).arguments]
        operands = [given[names[0]] for given in arguments]
        if is_shared(node):
            self.published.start(node, [x for x in operands if isinstance(x, Tensor)])
        if node.target in COPIES_FIRST:
            operands = [_cloned(x) for x in operands]
        given = [_target(each) for each in arguments]
        if node.target is c10d.all_reduce_.default:
            given = [each[names[0]] for each in arguments]
        results = [x if x is not None else poisoned(each.meta["val"]) for x, each in zip(given, nodes, strict=True)]
        flat = [tensors_of(each) for each in results]
        reads_late = is_shared(node) and given[0] is not None  # and writes late, so others may use the memory so long
        for written, read in zip(flat, operands, strict=True):
            if not reads_late and (node.target in COPIES_FIRST or not share_memory(written, tensors_of(read))):
                poison(written)
        pending = Pending(nodes, operands, arguments, flat)
        axis = self.programs[0].mesh.axis_of_group(group_of(node))
        if axis is not None and any(len(g) < axis.size for g in groups_of(self.programs, group_of(node), node)):
            each_rank = zip(self.programs, nodes, operands, arguments, strict=True)
            pending.meetings = [self.crossing.join(*of_rank) for of_rank in each_rank]
        self.pending.append(pending)
        return results

    def _wait(self, wait: fx.Node, values: Sequence[Any]) -> Iterator[fx.Node]:
        """Finish what writes into the storage of ``values``; nothing, if that was waited for."""
        storages = [{storage_id(x) for x in tensors_of(value)} for value in values]
        for each in [p for p in self.pending if _writes_to(p, storages)]:
            while not self._is_there(each):
                yield wait
            self.pending.remove(each)
            if is_message(each.node):
                self._finish_message(each)
            else:
                self._finish(each)

    def _is_there(self, pending: Pending) -> bool:
        """Whether ranks of other programs have come as far as this needs."""
        if kind_of(pending.node) is Kind.RECV:
            ends = zip(self.programs, pending.nodes, pending.numbers, strict=True)
            return all(self.crossing.arrived(*end, is_taken=False) is not None for end in ends)
        return all(len(meeting.brought) == meeting.size for meeting, _ in pending.meetings)

    def _finish_message(self, pending: Pending) -> None:
        for letter in pending.letters:
            if not same_bits(letter.operand, letter.sent):
                raise LockstepError(f"the operand of {letter.node} is overwritten before it is waited for", letter.node)
            letter.operand = letter.sent  # from here on the sender may write to it
        for rank, (program, node, into) in enumerate(zip(self.programs, pending.nodes, pending.results, strict=True)):
            if kind_of(node) is Kind.RECV:
                received = self.crossing.arrived(program, node, pending.numbers[rank], is_taken=True)
                assert received is not None, "it has arrived"
                (tensor,) = into
                if (received.shape, received.dtype) != (tensor.shape, tensor.dtype):
                    what = f"{received.dtype}{list(received.shape)}"
                    raise LockstepError(f"{node} expects {tensor.dtype}{list(tensor.shape)}, but {what} comes", node)
                tensor.copy_(received)

    def _finish(self, pending: Pending) -> None:
        group = group_of(pending.node)
        computed: dict[int, Any] = {}
        for rank, (meeting, coordinate) in enumerate(pending.meetings):
            computed[rank] = meeting.result(coordinate)
        for members in groups_of(self.programs, group, pending.node) if not pending.meetings else ():
            operands = [pending.operands[rank] for rank in members]
            arguments = [pending.arguments[rank] for rank in members]
            results = SEMANTICS[pending.node.target](operands, arguments)
            computed |= dict(zip(members, results, strict=True))
        for rank, into in enumerate(pending.results):
            for tensor, result in zip(into, tensors_of(computed[rank]), strict=True):
                tensor.copy_(result.reshape(tensor.shape))
        if is_shared(pending.node) and reduces_in_place(pending.node):
            self._overwrite_operands(pending, computed)
        self.published.wait(pending.node)

    def _overwrite_operands(self, pending: Pending, computed: Mapping[int, Any]) -> None:
        """Let each rank have reduced its part in its operand, where the others read it from then on."""
        for members in groups_of(self.programs, group_of(pending.node), pending.node):
            for k, rank in enumerate(members):
                operand, result = pending.operands[rank].view(-1), computed[rank].reshape(-1)
                start, stop = list(pairwise(bounds(operand.numel(), len(members))))[k]
                operand[start:stop].copy_(result[start:stop])
        self.published.publish_again(pending.node)


class _Rank(fx.Interpreter):
    """One rank: the values that later nodes read."""

    def __init__(self, program: Program, inputs: Sequence[Any]) -> None:
        super().__init__(program.graph_module)
        self.args_iter = iter(inputs)
        self._aligns = not program.same_bits

    def value(self, node: fx.Node) -> Any:
        """The value of a node; of the output node, what the graph returns."""
        return self._aligned(node) if self._aligns and _rounds_by_address(node) else self.run_node(node)

    def _aligned(self, node: fx.Node) -> Any:
        """Run an op on operands, and into memory, that begin at aligned addresses."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        written = [each.name for each in schema(node.target).arguments if each.written]
        if not kwargs.keys() >= {*written}:
            return self.run_node(node)  # an update in place
        outs = [kwargs[name] for name in written]
        read = [each for name, each in kwargs.items() if not any(each is out for out in outs)]
        if overlap(tensors_of(outs), tensors_of([args, read])):
            return self.run_node(node)  # an error, which copies would hide
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda x: aligned(x) if isinstance(x, Tensor) else x)
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        if not outs:
            return result
        for out, made in zip(outs, tensors_of(result), strict=True):
            if out is not made:
                out.copy_(made)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """The values of a node's arguments, by the names of the op's schema."""
        declared = [each.name for each in schema(node.target).arguments]
        return {name: fx.node.map_arg(argument(node, name), self.env.__getitem__) for name in declared}

    def keep(self, node: fx.Node, value: Any) -> None:
        """Keep a value, and let go of those that this node was the last to read."""
        self.env[node] = value
        for dead in self.user_to_last_uses.get(node, ()):
            self.env.pop(dead, None)


class Published:
    """Tensors that other ranks may look at, and must find unchanged.

    Who waits for a collective knows that all ranks have waited for those that were waited for before it started.
    """

    def __init__(self) -> None:
        self._all: dict[fx.Node, list[tuple[Tensor, Tensor]]] = {}
        self._waited: list[fx.Node] = []
        self._before: dict[fx.Node, list[fx.Node]] = {}

    def start(self, node: fx.Node, tensors: Sequence[Tensor]) -> None:
        """A collective publishes these."""
        self._all[node] = [(x, x.clone()) for x in tensors]
        self._before[node] = list(self._waited)

    def publish_again(self, node: fx.Node) -> None:
        """Other ranks read what the operands hold now."""
        self._all[node] = [(now, now.clone()) for now, _ in self._all.get(node, ())]

    def wait(self, node: fx.Node) -> None:
        """A collective was waited for. Raises ``LockstepError`` if what was read by then has changed."""
        if node in self._all:
            self._waited.append(node)
            for read in self._before[node]:
                self._check(read)

    def check_all(self, node: fx.Node) -> None:
        """The call is over. Raises ``LockstepError`` if anything that was published has changed."""
        for each in list(self._all):
            self._check(each)

    def _check(self, node: fx.Node) -> None:
        for now, then in self._all.pop(node, ()):
            if not same_bits(now, then):
                raise LockstepError(
                    f"the operand of {node} is overwritten while other ranks may still read it: it has to keep its "
                    "values until they have",
                    node,
                )


def _rounds_by_address(node: fx.Node) -> bool:
    """Whether a kernel may round by where its operands begin: that of a matrix product, or what may be one."""
    is_aten = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    return is_aten and not has(node.meta.get("computes", node.target), *_OF_ELEMENTS)


def groups_of(programs: Sequence[Program], group: str, node: fx.Node) -> Iterator[list[int]]:
    """The groups of ranks, by number, that communicate under a name: those that differ along its axis alone."""
    coordinates = [_position(program.mesh, group, node) for program in programs]
    found: dict[Any, list[tuple[int, int]]] = {}
    for rank, (others, coordinate) in enumerate(coordinates):
        found.setdefault(others, []).append((coordinate, rank))
    for members in found.values():
        yield [rank for _, rank in sorted(members)]


def _position(mesh: Mesh, group: str, node: fx.Node) -> tuple[Any, int]:
    """(the coordinates that the ranks of this rank's group have in common, its place among them)."""
    axis = mesh.axis_of_group(group)
    if axis is None:
        raise LockstepError(f"{node} communicates in a group that is no axis of the mesh: {group!r}", node)
    whole = next(each for each in mesh.axes if each.name == axis.name.partition("/")[0])
    others = tuple(each.coordinate for each in mesh.axes if each is not whole)
    return (others, whole.coordinate // axis.size if axis is not whole else 0), axis.coordinate


def _target(arguments: dict[str, Any]) -> Any:
    """The tensor that an out variant writes into, None for any other op."""
    return arguments.get("out")


def _cloned(value: Any) -> Any:
    return [x.clone() for x in value] if isinstance(value, (list, tuple)) else value.clone()


def _writes_to(pending: Pending, storages: Sequence[set[int]]) -> bool:
    """By storage, as torch does it, and not by address: results of two collectives may lie in the same memory."""
    written = zip(pending.results, storages, strict=True)
    return any(storage_id(x) in waited for results, waited in written for x in results)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN being equal to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or (
        (one.is_floating_point() or one.is_complex()) and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )
