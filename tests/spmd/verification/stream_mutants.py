"""Wrong operations for right programs: all that one edit of a kind can make of them, each with a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from torch import fx

from passes import Program
from passes.ir.collectives import is_collective
from passes.runtime.arena import view_at
from passes.schedule.streams import (
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
    assign_streams,
)
from passes.schedule.touched_memory import TouchedMemory

Operations = tuple[Operation, ...]


@dataclass(frozen=True, eq=False)
class Mutant:
    """One rank runs ``program`` by ``streams``, which are wrong; the other ranks run what they should."""

    name: str
    program: Program
    streams: StreamProgram
    memory: TouchedMemory
    rank: int = 0


def mutants(program: Program, streams: StreamProgram, rank: int = 0) -> Iterator[Mutant]:
    """All mutants of one rank's program."""
    memory = TouchedMemory(program.graph)
    for kind in KINDS:
        for name, operations in kind(memory, streams.operations):
            label = f"{kind.__name__}: {name}"
            yield Mutant(label, program, StreamProgram(operations), memory, rank)
    for name, changed in memory_reused_early(program, memory):
        yield edited(f"memory_reused_early: {name}", changed, rank)


def edited(name: str, program: Program, rank: int) -> Mutant:
    """A wrong program with streams that are assigned to it as they should be."""
    memory = TouchedMemory(program.graph)
    return Mutant(name, program, assign_streams(program, memory), memory, rank)


def wait_missing(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """A stream, or the host, does not wait for an event."""
    for k, each in enumerate(operations):
        if isinstance(each, Wait):
            yield f"{each.stream} {each.event}", without(operations, k)


def event_missing(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """An event is never recorded, so that nobody waits for it."""
    for k, each in enumerate(operations):
        if isinstance(each, Record):
            yield f"{each.stream} {each.event}", without(operations, k)


def event_too_early(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """An event is recorded in front of what it stands for."""
    for k, each in enumerate(operations):
        if isinstance(each, Record):
            before = next(j for j in reversed(range(k)) if operations[j].stream == each.stream)
            yield f"{each.stream} {each.event}", moved(operations, k, before)


def wait_too_late(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """A stream waits behind what should have waited."""
    for k, each in enumerate(operations):
        if isinstance(each, Wait):
            following = range(k + 1, len(operations))
            behind = [j for j in following if operations[j].stream == each.stream and not is_event(operations[j])]
            if behind:
                yield f"{each.stream} {each.event}", moved(operations, k, behind[0])


def other_event(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """A stream waits for the event before the one that it should wait for."""
    order = [each.event for each in operations if isinstance(each, Record)]
    for k, each in enumerate(operations):
        if isinstance(each, Wait) and order.index(each.event) > 0:
            other = order[order.index(each.event) - 1]
            yield (
                f"{each.stream} {other} for {each.event}",
                (*operations[:k], Wait(each.stream, other), *operations[k + 1 :]),
            )


def freed_early(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """Memory is freed in front of who reads it last."""
    for k, each in enumerate(operations):
        if isinstance(each, Free):
            readers = [j for j in range(k) if touches(memory, operations[j], each.piece)]
            if readers and operations[readers[-1]].node is not each.piece:  # type: ignore[attr-defined]
                yield str(each.piece), moved(operations, k, readers[-1])


def order_swapped(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """Two launches on a stream change places, of which one uses what the other writes."""
    launches = [k for k, each in enumerate(operations) if isinstance(each, Launch)]
    for one, other in pairwise(launches):
        first, second = operations[one], operations[other]
        if first.stream == second.stream and conflict(memory, first.node, second.node):  # type: ignore[attr-defined]
            swapped = list(operations)
            swapped[one], swapped[other] = second, first
            yield f"{first.node} {second.node}", tuple(swapped)  # type: ignore[attr-defined]


def not_waiting_on_another_stream(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """An op that computes runs on a stream that nobody waits for."""
    launches = [k for k, each in enumerate(operations) if isinstance(each, Launch) and each.stream == COMPUTE]
    for k in launches:
        elsewhere = replace(operations[k], stream="another")
        yield str(operations[k].node), (*operations[:k], elsewhere, *operations[k + 1 :])  # type: ignore[attr-defined]


def launch_missing(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """A node does not run."""
    for k, each in enumerate(operations):
        if isinstance(each, Launch):
            yield str(each.node), without(operations, k)


def launched_twice(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """A node runs once more."""
    for k, each in enumerate(operations):
        if isinstance(each, Launch) and is_collective(each.node):
            yield str(each.node), (*operations[:k], each, *operations[k:])


def memory_reused_early(program: Program, memory: TouchedMemory) -> Iterator[tuple[str, Program]]:
    """A value lies in the arena where another one lies that is still to be read."""
    position = {node: k for k, node in enumerate(program.graph.nodes)}
    views = list(program.graph.find_nodes(op="call_function", target=view_at))
    for one, other in pairwise(views):
        last = max(position[user] for holder in memory.holders(one) for user in holder.users)
        overlaps = one.args[1] <= other.args[1] < one.args[1] + one.meta["val"].nbytes  # type: ignore[operator]
        writer = next(iter(other.users))
        if last > position[writer] and not overlaps and one not in memory.found[writer]:
            changed = program.copy()
            same = next(node for node in changed.graph.nodes if node.name == other.name)
            same.args = (same.args[0], one.args[1], *same.args[2:])
            yield f"{other} in {one}", changed


def swapped_collectives(program: Program, rank: int) -> Iterator[Mutant]:
    """On one rank two collectives that do not need each other change places: it has no race, but another order."""
    for k in range(1, len(program.collectives())):
        changed = program.copy()
        first, second = changed.collectives()[k - 1 : k + 1]
        if all(operand < first for operand in second.all_input_nodes if operand.target is not view_at):
            for node in [each for each in second.all_input_nodes if first < each] + [second]:
                first.prepend(node)
            yield edited(f"swapped_collectives: {first} {second}", changed, rank)


def exchanged_launches(memory: TouchedMemory, operations: Operations) -> Iterator[tuple[str, Operations]]:
    """Two collectives change places, but what waits for them does not."""
    starts = [each for each in operations if isinstance(each, Launch) and is_collective(each.node)]
    for one, other in combinations(starts, 2):
        exchange = {one: other, other: one}
        yield f"{one.node} {other.node}", tuple(exchange.get(each, each) for each in operations)  # type: ignore[call-overload]


KINDS = (
    wait_missing,
    event_missing,
    event_too_early,
    wait_too_late,
    other_event,
    freed_early,
    order_swapped,
    not_waiting_on_another_stream,
    launch_missing,
    launched_twice,
    exchanged_launches,
)


def without(operations: Operations, k: int) -> Operations:
    return (*operations[:k], *operations[k + 1 :])


def moved(operations: Operations, k: int, to: int) -> Operations:
    """With the operation at ``k`` where that at ``to`` is; the others keep their order."""
    rest = list(without(operations, k))
    rest.insert(to, operations[k])
    return tuple(rest)


def is_event(operation: Operation) -> bool:
    return isinstance(operation, (Wait, Record, Free, Allocate, Begin, HostAccess)) and operation.stream != HOST


def touches(memory: TouchedMemory, operation: Operation, piece: fx.Node) -> bool:
    if not isinstance(operation, Launch):
        return False
    return any(access.space is piece for access in memory.of(operation.node))


def conflict(memory: TouchedMemory, one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes touch the same bytes, and one writes them."""
    pairs = ((a, b) for a in memory.of(one) for b in memory.of(other))
    return any(a.space is b.space and a.start < b.end and b.start < a.end and (a.writes or b.writes) for a, b in pairs)
