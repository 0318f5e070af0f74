"""Cut a step where its gradients are reduced, and join the end of one step with the start of the next.

``cut`` takes a functional program, in the order of ``UpdateLast``. Its *start* is forward, backward, and the starts of
the reductions; its *end* is the waits for these, and the update. What the end reads of the start is carried from one
call to the next as inputs of the role "pending". ``join`` takes both halves once they update state in place, and lets
each part of the end run right before the first op of the start that reads what it writes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .._torch import c10d
from ..analysis.aliases import is_view, storages
from ..analysis.reachability import ancestors, descendants
from ..analysis.topological import arrange, emit
from ..errors import PassError
from ..ir.collectives import Collective, communicate_in, group_of, is_collective, is_shared, is_wait, operands, waits_of
from ..ir.effects import mutates, written
from ..ir.program import Input, Output, OutputKind, Part, Program
from ..ir.roles import Phase, Role
from .update_last import late_nodes

aten = torch.ops.aten
_CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True)
class Halves:
    """``start`` has an output of the kind "pending" for each value that it hands on, ``end`` an input for each.

    The inputs of ``end`` are those of ``start``, of which it reads state only, then the pending ones: first what
    ``start`` returns, in that order, then the numbers of the same call, by their positions among its inputs.
    """

    start: Program
    end: Program
    numbers: tuple[int, ...]


def cut(program: Program) -> Halves | str:
    """The halves of a step; else a sentence on why nothing would be in flight, so that nothing is cut.

    Raises ``PassError`` where the step returns or keeps what the update computes.
    """
    late = _late(program)
    if not late:
        return "it updates nothing that other ranks have a part in"
    scalers = [each.name for each in program.inputs if each.role is Role.SCALER]
    if scalers:
        raise PassError(
            f"{scalers[0]} belongs to a GradScaler, whose update cannot be deferred: compile without defer_updates"
        )
    made = [each for each in program.outputs if each.kind is OutputKind.NEW and each.role is not Role.GRADIENT]
    if made:
        return f"it makes {made[0].name}, which the next call is compiled for"
    _check_results(program, late)
    others = _written_beside_state(program, late)
    if others:
        return f"it writes {others[0]} after the update, which is no state that the next call is sure to find again"
    end = late | _before_late(program, late)
    end = _without_parts(end - {node for node in end if _is_in_shared_memory(node) and node.args[0] not in end})
    if not any(is_wait(node) and node.args[0] not in end for node in end):
        return "all gradients are reduced through shared memory, or one after the other, and nothing would be in flight"
    return _Cutter(program, end).halves()


def _late(program: Program) -> set[fx.Node]:
    """The update, with all that reads what it computes, such as gathers of updated parts; nothing without collectives.

    ``UpdateLast`` leaves an update where it is if a gather or a result reads it.
    """
    late, nodes = late_nodes(program), list(program.graph.nodes)
    if late:
        of_gradients = descendants(nodes, {node for node in nodes if is_wait(node) and _is_gradient(node)})
        late |= {node for node in of_gradients if node.meta.get("phase") is Phase.UPDATE and node.op in _CALLS}
        late = descendants(nodes, late)
    return late - {program.output_node}


def _is_gradient(wait: fx.Node) -> bool:
    """Whether what is waited for is a gradient."""
    described = _started(wait.all_input_nodes[0]).meta.get("collective")
    return isinstance(described, Collective) and described.role is Role.GRADIENT


def _is_in_shared_memory(node: fx.Node) -> bool:
    """Whether a wait is for what ranks reduce in memory that they share: it is done where it begins."""
    return is_wait(node) and is_shared(_started(node.all_input_nodes[0]))


def _check_results(program: Program, late: set[fx.Node]) -> None:
    for value, output in zip(program.output_values(), program.outputs, strict=True):
        if output.kind is OutputKind.NEW and output.role is Role.GRADIENT:
            raise PassError(
                f"the step leaves {output.name} for the user to see, so that its gradients cannot be deferred: clear "
                "them at the end of the step (zero_grad), or compile without defer_updates"
            )
        if value not in late:
            continue
        line = f" ({value.meta['source']})" if value.meta.get("source") else ""
        if output.kind is OutputKind.RESULT:
            raise PassError(
                f"{output.name}{line} depends on the update of the step, which is deferred to the next call: return "
                "what forward and backward compute, or compile without defer_updates"
            )
        if not isinstance(value.meta.get("val"), torch.Tensor):
            raise PassError(f"{output.name}{line} is a number that the update computes, which cannot be deferred")


def _written_beside_state(program: Program, late: set[fx.Node]) -> list[str]:
    """The names of what ``late`` nodes write that is no state: arguments, and tensors that the user's objects hold."""
    state = {declared.name for declared, _ in program.values().values() if declared.role.is_state}
    outputs = zip(program.output_values(), program.outputs, strict=True)
    return [o.name for value, o in outputs if value in late and o.kind is OutputKind.UPDATE and o.name not in state]


def _before_late(program: Program, late: set[fx.Node]) -> set[fx.Node]:
    """The waits for messages that only ``late`` nodes need, and what lies between."""
    results = {v for v, o in zip(program.output_values(), program.outputs, strict=True) if o.kind != OutputKind.UPDATE}
    state = _of_state(program)
    arrives = set[fx.Node]()  # what needs a message
    for node in program.graph.nodes:
        is_message = is_wait(node) and _is_message(program, node, state)
        if is_message or any(each in arrives for each in node.all_input_nodes):
            arrives.add(node)
    found = set[fx.Node]()
    for node in reversed(program.graph.nodes):
        read = [user in late or user in found for user in node.users]
        if node in arrives and node not in late | results and not is_collective(node) and read and all(read):
            found.add(node)
    return found


def _without_parts(end: set[fx.Node]) -> set[fx.Node]:
    """``end`` without the items of what the start computes: tensors are handed on, and not tuples of them."""
    starts = (node.target is operator.getitem and node.args[0] not in end for node in end)
    items = {node for node, is_item in zip(end, starts, strict=True) if is_item}
    return _without_parts(end - items) if items else end


def _is_message(program: Program, wait: fx.Node, state: set[fx.Node]) -> bool:
    """Whether ``wait`` is for a message of gloo, of what is no state, so that nobody writes to it in flight."""
    start = wait.args[0]
    while isinstance(start, fx.Node) and start.target is operator.getitem:
        start = start.args[0]
    assert isinstance(start, fx.Node), f"{wait} waits for a collective"
    axis = program.mesh.axis_of_group(group_of(start))
    by_gloo = not is_shared(start) and (axis is None or axis.backend != "nccl")
    return by_gloo and not any(operand in state for operand in operands(start))


def _of_state(program: Program) -> set[fx.Node]:
    """State and constants, and the views of them; but for gradients, which the next call may find in other memory."""
    inputs = zip(program.placeholders, program.inputs, strict=True)
    found = {node for node, declared in inputs if declared.role.is_state and declared.role is not Role.GRADIENT}
    for node in program.graph.nodes:
        views = is_view(node) and not is_wait(node) and node.all_input_nodes
        views = views or node.target is operator.getitem
        if node.op == "get_attr" or (views and all(each in found for each in node.all_input_nodes)):
            found.add(node)
    return found


class _Cutter:
    """Copies the nodes of a program into two graphs."""

    def __init__(self, program: Program, end: set[fx.Node]) -> None:
        self.program, self.end = program, end
        self.state = _of_state(program)
        self.inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self.found = storages(program.graph)
        self.given = {piece for node in self.inputs for piece in self.found[node]}

    def halves(self) -> Halves:
        values, numbers = self._carried()
        start, outputs = self._start(values)
        return Halves(start, self._end([*values, *numbers], outputs), tuple(self._position(node) for node in numbers))

    def _position(self, placeholder: fx.Node) -> int:
        return list(self.inputs).index(placeholder)

    def _carried(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The values that the start hands on: those that it returns, and the numbers of the call."""
        found: dict[fx.Node, None] = {}
        for node in self.program.graph.nodes:
            if node in self.end:
                found |= dict.fromkeys(each for each in node.all_input_nodes if each not in self.end | self.state)
        self._check_state()
        sent = [start for node in found if is_collective(start := _started(node))]
        for start in sent:  # in flight they are read, but for an all_reduce, which copies first
            if start.target is not c10d.all_reduce.default:
                found |= dict.fromkeys(each for each in operands(start) if not self.found[each] & self.given)
        numbers = [n for n in found if n in self.inputs and not isinstance(n.meta.get("val"), torch.Tensor)]
        return [node for node in found if node not in numbers], numbers

    def _check_state(self) -> None:
        """Raise if the end reads old state that the start writes."""
        read = {each.name for node, each in self.program_state() if self._is_read(node)}
        pairs = zip(self.program.output_values(), self.program.outputs, strict=True)
        both = [o.name for v, o in pairs if o.kind is OutputKind.UPDATE and v not in self.end and o.name in read]
        if both:
            raise PassError(
                f"the update reads {both[0]} as it was before forward changed it, so that it cannot be deferred: "
                "compile without defer_updates"
            )

    def program_state(self) -> Iterable[tuple[fx.Node, Input]]:
        """State by the nodes that show it."""
        return [(node, declared) for declared, node in self.program.values().values() if declared.role.is_state]

    def _is_read(self, node: fx.Node) -> bool:
        views = [user for user in node.users if user in self.state]
        return any(user in self.end for user in node.users) or any(map(self._is_read, views))

    def _start(self, values: Sequence[fx.Node]) -> tuple[Program, list[Output]]:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.program.graph.nodes:
            if node not in self.end and node.op != "output":
                env[node] = self._copy(graph, node, env)
        pairs = zip(self.program.output_values(), self.program.outputs, strict=True)
        kept = [(value, output) for value, output in pairs if value not in self.end]
        returned = [(fx.map_arg(value, env.__getitem__), output) for value, output in kept]
        pending = [_pending_output(node) for node in values]
        returned += [(self._own(graph, node, env[node]), o) for node, o in zip(values, pending, strict=True)]
        graph.output(tuple(value for value, _ in returned))
        outputs = [output for _, output in returned]
        return self.program.with_graph(graph, self.program.inputs, outputs), pending

    def _copy(self, graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copy a node; what is waited for in the same half does not stand in line behind what is in flight."""
        copied = graph.node_copy(node, env.__getitem__)
        if is_collective(node) and not is_shared(node):
            axis = self.program.mesh.axis_of_group(group_of(node))
            crosses = node not in self.end and any(wait in self.end for wait in waits_of(node))
            if axis is not None and axis.gathers and not crosses:
                communicate_in(copied, axis.gathers)
        return copied

    def _own(self, graph: fx.Graph, node: fx.Node, copied: fx.Node) -> fx.Node:
        """A copy of what lies in memory of the call's arguments, which are the user's to write to before the next."""
        if not self.found[node] & self.given:
            return copied
        clone = graph.call_function(aten.clone.default, (copied,))
        clone.meta = {"val": node.meta["val"]}
        return clone

    def _end(self, carried: Sequence[fx.Node], pending: Sequence[Output]) -> Program:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.inputs:
            env[node] = graph.node_copy(node, env.__getitem__)
        inputs = list(self.program.inputs)
        for node in carried:
            env[node] = graph.placeholder(f"pending_{node.name}")
            env[node].meta = {"val": node.meta.get("val")}
            inputs.append(_pending_input(node))
        updated = self._updated()
        for node in self.program.graph.nodes:
            shows = node in self.state and node not in env and (node in updated or self._is_read(node))
            if (node in self.end or shows) and node not in env:
                env[node] = self._copy(graph, node, env)
        pairs = zip(self.program.output_values(), self.program.outputs, strict=True)
        late = [(env[value], output) for value, output in pairs if value in self.end]
        graph.output(tuple(value for value, _ in late))
        return self.program.with_graph(graph, inputs, [output for _, output in late])

    def _updated(self) -> set[fx.Node]:
        """The nodes that show what the end writes to, also where it reads none of it: a copy that was put back, say."""
        shown, pairs = self.program.values(), zip(self.program.output_values(), self.program.outputs, strict=True)
        names = [o.name for value, o in pairs if o.kind is OutputKind.UPDATE and value in self.end]
        return ancestors(shown[name][1] for name in names)


def _pending_output(node: fx.Node) -> Output:
    """The value of ``node``, left to the program that takes the input of the same name."""
    shape, dtype = _described(node)
    return Output(OutputKind.CHANNEL, f"pending.{node.name}", Role.CHANNEL, shape, dtype)


def _pending_input(node: fx.Node) -> Input:
    """The input that takes the value of ``node``, left by another program."""
    shape, dtype = _described(node)
    return Input(Role.CHANNEL, f"pending.{node.name}", shape, dtype)


def _described(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype | None]:
    val = node.meta.get("val")
    return (tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else ((), None)


def _started(node: fx.Node) -> fx.Node:
    """The collective whose result ``node`` is, else ``node``."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def join(halves: Halves) -> Program:
    """The end of one step, then the start of the next, which reads the state that the end has written.

    Both update state in place.
    """
    end, start = halves.end, halves.start
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    views: dict[Any, fx.Node] = {}  # of state, by what they are
    for node in end.graph.nodes:
        if node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
            views.setdefault(_view_key(env[node]), env[node])
    late = set(env.values())
    env |= dict(zip(start.placeholders, (env[node] for node in end.placeholders), strict=False))
    for node in start.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copied = graph.node_copy(node, env.__getitem__)
            env[node] = views.setdefault(_view_key(copied), copied)
            if env[node] is not copied:
                graph.erase_node(copied)
    graph.output(fx.map_arg(start.output_node.args[0], env.__getitem__))
    _sink(graph, late)
    inputs = [_merged(one, other) for one, other in zip(end.inputs, start.inputs, strict=False)]
    inputs += end.inputs[len(start.inputs) :]
    return start.with_graph(graph, inputs, start.outputs)


def _view_key(node: fx.Node) -> Any:
    """Equal for the views by which a graph shows the parts of a flat input; else of this node alone."""
    shows = node.target in (aten.split_with_sizes.default, aten.view.default, operator.getitem)
    if not shows or not all(_is_shown(each) for each in node.all_input_nodes):
        return node
    return node.target, repr(node.args), repr(node.kwargs)


def _is_shown(node: fx.Node) -> bool:
    return node.op == "placeholder" or node.target in (aten.split_with_sizes.default, operator.getitem)


def _merged(one: Input, other: Input) -> Input:
    parts = tuple(
        Part(_merged(p.input, q.input), p.offset, p.shape) for p, q in zip(one.parts, other.parts, strict=True)
    )
    return replace(one, in_place=one.in_place or other.in_place, parts=parts)


def _sink(graph: fx.Graph, late: set[fx.Node]) -> None:
    """Put the ``late`` nodes, which stand first, right before the first other node that needs them.

    None runs later than where backward begins, so that what it reads can go.
    """
    needed, position = _needs(graph), {node: k for k, node in enumerate(graph.nodes)}
    done: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node in late and node.op != "placeholder":
            continue
        if node.op == "output" or node.meta.get("phase") is Phase.BACKWARD:
            for each in sorted(late - done.keys(), key=position.__getitem__):
                emit(each, needed, position, done)
        emit(node, needed, position, done)
    arrange(graph, done)


def _needs(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that each has to follow: those that it reads, and those with which it shares memory that one writes."""
    found, wrote, read = storages(graph), dict[fx.Node, fx.Node](), defaultdict[fx.Node, list[fx.Node]](list)
    sent: dict[fx.Node, set[fx.Node]] = {}  # by wait: the memory that is read up to there
    needs: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        needs[node] = list(node.all_input_nodes)
        if is_view(node) and not is_wait(node) and not mutates(node):
            continue
        targets = (written(node) or node.all_input_nodes) if mutates(node) else []
        writes = {piece for target in targets for piece in found[target]}
        touched = {piece for each in node.all_input_nodes for piece in found[each]} | sent.get(node, set())
        if is_collective(node):
            read_until = {piece for each in operands(node) for piece in found[each]}
            sent |= dict.fromkeys(waits_of(node), read_until)
        needs[node] += [wrote[piece] for piece in touched if piece in wrote]
        needs[node] += [reader for piece in writes for reader in read[piece]]
        for piece in touched:
            read[piece].append(node)
        for piece in writes:
            wrote[piece], read[piece] = node, [node]
    return needs
