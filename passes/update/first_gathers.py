"""Let a call start the gathers with which the next one begins, once it has updated what they send.

Where parameters are sharded, forward begins with a wait: for the first units, gathered from shards that are final when
the call before has updated them. ``divide`` takes a functional program, in the order of ``UpdateLast``; ``continued``
takes the same step once it updates state in place. State itself is as true as without: what is in flight belongs to
nobody, and is of use only as long as ``sent`` finds what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..analysis.aliases import storages
from ..analysis.reachability import ancestors
from ..analysis.topological import arrange
from ..ir.collectives import Kind, group_of, is_collective, is_shared, is_wait, operands, waits_of
from ..ir.edit import insert_before
from ..ir.effects import is_pure, is_random, mutates, written
from ..ir.program import Input, OutputKind, Program
from ..ir.roles import Memory, Phase, Role
from .pending import pending_input, pending_output
from .update_last import late_nodes

aten = torch.ops.aten


@dataclass(frozen=True)
class FirstGathers:
    """``sent`` computes from state what the first gathers send; ``start`` starts them.

    ``start`` returns what is in flight, then copies of what was sent, which nobody writes to. Both take the inputs of
    the step, and read state only. ``names``: of the gathers, in the order in which the step reads them.
    """

    sent: Program
    start: Program
    names: tuple[str, ...]


def divide(program: Program) -> FirstGathers | None:
    """The gathers of a step that can start before it; None if there are none, or if it is run once."""
    if any(output.kind is OutputKind.NEW and output.role is not Role.GRADIENT for output in program.outputs):
        return None  # state is made, so that the next call runs another program
    gathers = _first_gathers(program)
    if not gathers:
        return None
    sends = list(dict.fromkeys(operand for gather in gathers for operand in operands(gather)))
    sent = _extract(program, sends)
    sent.set_outputs(sent.output_values(), [replace(pending_output(node), kind=OutputKind.RESULT) for node in sends])
    start = _extract(program, [*gathers, *sends])
    start.set_outputs(start.output_values(), [pending_output(node) for node in (*gathers, *sends)])
    _copy_state(start)
    return FirstGathers(sent, start, tuple(gather.name for gather in gathers))


def update_first(program: Program, first: FirstGathers) -> None:
    """Let the update begin with what the gathers send."""
    late = late_nodes(program)
    read = _read(first.sent)
    updates = zip(program.output_values(), program.outputs, strict=True)
    values = {v for v, o in updates if isinstance(v, fx.Node) and o.kind is OutputKind.UPDATE and o.name in read}
    nodes = list(program.graph.nodes)
    needed = ancestors(values) if late else set()
    at = next((k for k, node in enumerate(nodes) if node in late), len(nodes))
    arrange(program.graph, [*nodes[:at], *sorted(nodes[at:], key=lambda node: node not in needed)])


def continued(in_place: Program, first: FirstGathers) -> Program:
    """The step between two others: it takes what is in flight, and starts the like once state is updated."""
    program = in_place.copy()
    gathers = _named(program, first.names)
    inputs = _take(program, gathers)
    program.inputs = [*program.inputs, *inputs]
    returned = _append(program, first.start)
    outputs = [*program.outputs, *first.start.outputs]
    program.set_outputs([*program.output_values(), *returned], outputs)
    return program


def _first_gathers(program: Program) -> list[fx.Node]:
    """The gathers of parameters with which forward begins: as many as may be whole at once there.

    Each sends what is computed from state alone, by message, so that it is in flight between calls.
    """
    position = {node: k for k, node in enumerate(program.graph.nodes)}
    later = (k for node, k in position.items() if node.meta.get("phase") in (Phase.BACKWARD, Phase.UPDATE))
    end = next(later, len(position))
    read = {node: min((position[w] for w in waits_of(node)), default=end) for node in program.collectives()}
    gathers = [node for node in read if _is_gather(node) and read[node] < end]
    allowed = program.prefetch[0] and 1 + program.prefetch[0]
    if program.limit_gathers is not None:
        allowed = min(allowed, program.limit_gathers)
    of_state = _of_state(program)
    first: list[fx.Node] = []
    for node in sorted(gathers, key=read.__getitem__)[:allowed]:
        if not _is_message(program, node) or not all(each in of_state for each in operands(node)):
            break
        first.append(node)
    return first


def _is_gather(node: fx.Node) -> bool:
    described, val = node.meta["collective"], node.meta.get("val")
    return (described.role, described.kind) == (Role.PARAMETER, Kind.ALL_GATHER) and isinstance(val, torch.Tensor)


def _is_message(program: Program, node: fx.Node) -> bool:
    """Whether a gather goes by gloo, past the thread that computes."""
    axis = program.mesh.axis_of_group(group_of(node))
    return not is_shared(node) and axis is not None and axis.backend != "nccl"


def _of_state(program: Program) -> set[fx.Node]:
    """State on the device, and what pure ops compute of it."""
    inputs = zip(program.placeholders, program.inputs, strict=True)
    found = {node for node, each in inputs if each.role.is_state and each.memory is Memory.DEVICE}
    for node in program.graph.nodes:
        computed = node.op == "call_function" and is_pure(node) and not is_random(node) and not is_collective(node)
        if computed and node.all_input_nodes and all(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _extract(program: Program, values: Sequence[fx.Node]) -> Program:
    """A program of the same inputs that returns these values, and writes to nothing."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = ancestors(values) | set(program.placeholders)
    for node in program.graph.nodes:
        if node in needed:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[value] for value in values))
    return program.with_graph(graph, program.inputs, [])


def _copy_state(start: Program) -> None:
    """Send copies of what lies in the memory of state, which the user may write to while they are in flight."""
    found = storages(start.graph)
    given = {piece for node in start.placeholders for piece in found[node]}
    for node in list(dict.fromkeys(each for gather in start.collectives() for each in operands(gather))):
        if found[node] & given:
            copy = insert_before(node.next, aten.clone.default, node, like=node, val=node.meta["val"])
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)  # type: ignore[misc]


def _read(sent: Program) -> set[str]:
    """The names of the state that is sent."""
    read = {name for name, (_, node) in sent.values().items() if node.users}
    flat = zip(sent.inputs, sent.placeholders, strict=True)
    return read | {part.input.name for declared, node in flat if node.users for part in declared.parts}


def _named(program: Program, names: Iterable[str]) -> list[fx.Node]:
    by_name = {node.name: node for node in program.graph.nodes}
    return [by_name[name] for name in names]


def _take(program: Program, gathers: Sequence[fx.Node]) -> list[Input]:
    """Read inputs in the place of what these gathers bring."""
    inputs = []
    for gather in gathers:
        last = program.placeholders[-1]
        with program.graph.inserting_after(last):
            taken = program.graph.placeholder(f"pending_{gather.name}")
        taken.meta = {"val": gather.meta["val"]}
        gather.replace_all_uses_with(taken)
        inputs.append(pending_input(gather))
    unused = list(gathers)
    while unused:
        node = unused.pop()
        if not node.users and node.op != "placeholder" and not mutates(node):
            unused += node.all_input_nodes
            program.graph.erase_node(node)
    return inputs


def _append(program: Program, start: Program) -> list[fx.Node]:
    """Start the next gathers behind the last wait, and the last write to what they send; returns what these bring."""
    found, graph = storages(program.graph), program.graph
    env = dict(zip(start.placeholders, program.placeholders, strict=False))
    sent = {piece for node in start.placeholders if node.users for piece in found[env[node]]}
    last = program.placeholders[-1]
    for node in graph.nodes:
        writes = mutates(node) and any(found[each] & sent for each in written(node) or node.all_input_nodes)
        last = node if writes or is_wait(node) else last
    with graph.inserting_before(last.next):
        for node in start.graph.nodes:
            if node.op not in ("placeholder", "output"):
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta = env[node].meta | {"phase": Phase.UPDATE}
    return [env[value] for value in start.output_values()]
