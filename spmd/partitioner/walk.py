"""The walk: once over the global graph, from its inputs to its outputs, through all that an assignment says.

It decides nothing. ``Decisions`` gives the moves and choices of each node: those of an assignment, or a solver's as it
goes along. An emitter takes what comes of them: ``OpEmitter`` writes this rank's graph, ``Tally`` counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any, Protocol

from torch import fx
from torch.distributed.tensor import Partial, Replicate

from passes import Input, Output, OutputKind, PartitionError, Phase, Role
from passes.ir.program import Placements, is_sharded, output_values

from .._torch import OpOverload
from ..capture.constraint import CONSTRAIN
from ..placements import OwnOrder
from ..rules import decomposition_of, rule_of
from ..rules.attention import FORWARD
from . import reasons
from .assignment import Assignment, Choice, Move, MoveKind
from .calls import Calls
from .diagnostics import Diagnostics
from .emit_op import OpEmitter
from .experts.own_order import splits_tokens
from .masters import update_of
from .materialize import Materializer
from .parameters import Parameters
from .redistribute import Reason
from .tally import Tally
from .values import Value, infos, results


class Decisions(Protocol):
    """Says how each node is computed. The walk carries out each move before it asks for the next one."""

    def first(self, node: fx.Node, operands: Sequence[Value]) -> Iterable[Move]:
        """The moves of operands; ``operands`` are as the moves before leave them."""

    def choice(self, node: fx.Node, operands: Sequence[Value]) -> Choice:
        """The choice for an op, or for a ``spmd.constrain``."""

    def then(self, node: fx.Node, value: Any) -> Iterable[Move]:
        """The moves of results."""

    def output(self, output: Output, value: Value) -> Placements:
        """The placement of an output."""


class Walk:
    """The walk. ``values``: for each global node a ``Value``, a tuple of them, or what holds a number."""

    def __init__(self, calls: Calls, emitter: OpEmitter | Tally, diagnostics: Diagnostics | None = None) -> None:
        self.calls, self.context, self.diagnostics = calls, calls.context, diagnostics
        self.emitter, self.values = emitter, dict[fx.Node, Any]()
        self.ruled = set[Any]()  # ops that have a rule
        self._new_masters = dict[str, Any]()  # what holds them, by the name of the parameter
        self.parameters = Parameters(self.context, self.values)
        self.materializer = Materializer(calls, self.parameters, emitter, diagnostics, self.values)

    def run(self, decisions: Decisions) -> tuple[list[Input], list[Any], list[Output]]:
        """The inputs, what is returned, and the outputs, with their placements."""
        self.decisions = decisions
        if isinstance(self.emitter, OpEmitter):
            self.emitter.own.source = self._whole
        inputs = [self._input(node, declared) for node, declared in self.context.inputs.items()]
        inputs += [self._master(name, declared) for name, declared in self.context.masters.items()]
        self._cut_arguments()
        for node in self.context.routes.order:
            if node.op == "call_function":
                self._visit(node)
            elif node.op not in ("placeholder", "output"):
                raise PartitionError(
                    f"expected a flat graph of function calls, found a {node.op}: {node.format_node()}"
                )
        return inputs, *self._outputs()

    # Inputs

    def _input(self, node: fx.Node, declared: Input) -> Input:
        val, placement = node.meta["val"], self.context.placement_of(node)
        held = self.emitter.placeholder(node, placement)
        if placement is None:
            self.values[node] = held
            return declared
        batch = frozenset(range(len(placement))) if declared.role is Role.BATCH else frozenset[int]()
        self.values[node] = Value.of(node, val, placement, held, batch, is_weight=declared.role is Role.PARAMETER)
        self._note_numbers(node)
        return replace(declared, placement=placement)

    def _master(self, parameter: str, declared: Input) -> Input:
        """The input that is the master copy of a parameter."""
        node = self.context.node_of[parameter]
        self.materializer.masters[node] = self.emitter.placeholder(node, declared.placement, "master_")
        return declared

    def _whole(self, name: str) -> Any:
        """Materialize a node that says whose rows are whose: whole, or of the rows that ranks sort by themselves."""
        (node,) = (node for node in self.context.routes.groups if node.name == name)
        reason = Reason(value="numbers of experts", use="to send rows to them")
        value, kept = self.values[node], Partial if node in self.context.routes.own else OwnOrder
        placed = zip(self.context.mesh.axes, value.primary, strict=True)
        placement = tuple(p if splits_tokens(axis) and isinstance(p, kept) else Replicate() for axis, p in placed)
        return self.materializer.materialize(value, placement, reason)

    def _cut_arguments(self) -> None:
        """Hold each argument that the plan cuts as this rank's part only, from here on."""
        for node, declared in self.context.inputs.items():
            if declared.name in self.context.plan.cuts:
                value, placement = self.values[node], self.context.plan.cuts[declared.name]
                value.move(placement, self.materializer.materialize(value, placement, Reason(declared.role, "is cut")))

    # Ops

    def _visit(self, node: fx.Node) -> None:
        if node.target is getitem and isinstance(self.values[node.args[0]], tuple):  # type: ignore[index]
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.target is CONSTRAIN or (
            isinstance(node.target, OpOverload) and any(infos(results(node.meta.get("val"))))
        ):
            self.values[node] = self._op(node)
        else:
            self._number(node)
        self._note_numbers(node)
        self.parameters.note_update(node)
        for move in self.decisions.then(node, self.values[node]):
            self._move(node, move)

    def _note_numbers(self, node: fx.Node) -> None:
        """Note in a value whose rows are whose, where it says so, or by which numbers weights are looked up."""
        if isinstance(value := self.values[node], Value):
            value.group = self.context.routes.groups.get(node)
            value.numbered = self.context.routes.numbered.get(node)

    def _number(self, node: fx.Node) -> None:
        """Compute numbers, on whole operands: they are the same on every rank."""
        held = dict[fx.Node, Any]()
        for operand in node.all_input_nodes:
            value = held[operand] = self.values[operand]
            if isinstance(value, Value):
                reason = reasons.for_operand(operand, node, self.context)
                held[operand] = self.materializer.materialize(value, self.context.replicated, reason)
        self.values[node] = self.emitter.number(node, held)

    def _op(self, node: fx.Node) -> Any:
        self.parameters.note_cast(node)
        operands = self.materializer.operands(node)
        moves = self.materializer.moves[node] = list[Move]()
        for move in self.decisions.first(node, operands):
            moves.append(move)
            operands[move.index] = self.materializer.bring(node, move, operands[move.index])
        choice = self.decisions.choice(node, operands)
        if node.target is CONSTRAIN:
            return self._constrain(node, operands[0], choice)
        if choice.decomposed:
            return self._decompose(node, operands)
        if self.diagnostics is not None:
            self._note(self.diagnostics, node, operands, choice)
        return self.materializer.compute(node, operands, choice)

    def _constrain(self, node: fx.Node, value: Value, choice: Choice) -> Value:
        """Hold the value only in the placement that the user gives, from here on."""
        assert choice.gives is not None and choice.gives[0] is not None, "as the constraint says"
        placement = choice.gives[0]
        reason = reasons.for_constraint(value.source, node, self.context)
        held = {placement: self.materializer.materialize(value, placement, reason)}
        return replace(value, source=node, primary=placement, nodes=held, batch=value.batch_in(placement))

    def _decompose(self, node: fx.Node, operands: Sequence[Value]) -> Any:
        """Walk the ops of the decomposition instead of ``node``; returns its result."""
        decomposition = decomposition_of(self.calls.call(node, operands, self.values))
        assert decomposition is not None, "the choice was checked"
        graph, remaining = self.calls.decomposed(node, decomposition[1]), iter(operands)
        for inner in graph.nodes:
            if inner.op == "placeholder":
                self.values[inner] = next(remaining)
            elif inner.op == "call_function":
                self._visit(inner)
        (result,) = output_values(graph)
        return self.values[result]

    def _note(self, diagnostics: Diagnostics, node: fx.Node, operands: Sequence[Value], choice: Choice) -> None:
        whole = self.context.replicated
        if node.target not in self.ruled and rule_of(node.target) is None:
            diagnostics.no_rule(node, operands)
            return
        self.ruled.add(node.target)
        if node.target in FORWARD and choice.reads is not None:
            diagnostics.whole_attention(node, choice.reads[0])
        if node.meta.get("phase") is Phase.UPDATE and all(p in (whole, None) for p in choice.placements):
            diagnostics.whole_matrices(node, [self.materializer.base(value) for value in operands])

    def _move(self, node: fx.Node, move: Move) -> None:
        """Move a result."""
        value = results(self.values[node])[move.index]
        match move.kind:
            case MoveKind.GRADIENT:
                reason = self.context.to_reduce(self.context.complete_gradients[node])
            case MoveKind.UPDATE:
                parameter = self.context.updated_in_parts[node]
                reason = self.context.to_gather(parameter)
                self.emitter.mark_parts(parameter, self.context, self.values[self.context.node_of[parameter]], value)
                self._keep_master(parameter, value)
            case MoveKind.ROWS:
                reason = reasons.AFTER_A_CUT
            case _:
                reason = reasons.for_branches(node, self.context)
        self.materializer.move(value, move, reason)

    def _keep_master(self, parameter: str, value: Value) -> None:
        """Keep what holds the new master copy of a parameter, before ``value`` is rounded."""
        if parameter in self.context.masters and parameter not in self._new_masters:
            placement, reason = self.context.update_placements[parameter], Reason(Role.PARAMETER, "for its master copy")
            self._new_masters[parameter] = self.materializer.materialize(value, placement, reason)

    # Outputs

    def _outputs(self) -> tuple[list[Any], list[Output]]:
        returned, outputs, updated = [], [], dict[str, Any]()
        program = self.context.program
        for node, output in zip(program.output_values(), program.outputs, strict=True):
            value = self.values[node] if isinstance(node, fx.Node) else node
            if output.kind is OutputKind.UPDATE:
                updated[output.name] = value
            if isinstance(value, Value):
                placement = self.decisions.output(output, value)
                reason = reasons.for_output(value.source, output, self.context)
                returned.append(self.materializer.materialize(value, placement, reason))
                is_kept = output.kind is OutputKind.NEW and output.role is Role.RESULT and is_sharded(placement)
                role = Role.KEPT if is_kept and not value.batch_in(placement) else output.role
                outputs.append(replace(output, role=role, placement=placement))
            else:
                returned.append(value)
                outputs.append(output)
        masters = {name: master for name, master in self.context.masters.items() if name in updated}
        for parameter, declared in masters.items():
            self._keep_master(parameter, updated[parameter])
            returned.append(self._new_masters[parameter])
            outputs.append(update_of(declared))
        return returned, outputs


class Assigned:
    """The decisions of a whole assignment."""

    def __init__(self, calls: Calls, assignment: Assignment) -> None:
        self.calls, self.assignment = calls, assignment

    def first(self, node: fx.Node, operands: Sequence[Value]) -> Sequence[Move]:
        """Moves of operands before they are read, as assigned."""
        return self.choice(node, operands).first or ()

    def choice(self, node: fx.Node, operands: Sequence[Value]) -> Choice:
        """The choice of a node, as assigned."""
        return self.assignment.choices[self.calls.name(node)]

    def then(self, node: fx.Node, value: Any) -> Sequence[Move]:
        """Moves of a result after its op, as assigned; most nodes that are no ops on parts have no choice."""
        choice = self.assignment.choices.get(self.calls.name(node))
        return () if choice is None or choice.then is None else choice.then

    def output(self, output: Output, value: Value) -> Placements:
        """The placement of an output, as assigned."""
        return self.assignment.outputs[f"{output.kind} {output.name}"]
