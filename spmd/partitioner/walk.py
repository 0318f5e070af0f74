"""The walk: once over the global graph, from its inputs to its outputs, emitting this rank's share.

For each op, its operands are looked up, an option is chosen for each mesh axis, and the op is computed on this rank's
parts; then complete sums are reduced, and parameters gathered that were updated in parts. Each of these is a file of
its own (see ``__init__.py``); this one has their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from passes import Input, Mesh, Output, PartitionError, Phase, Program, Role
from passes.ir.effects import is_pure
from passes.ir.meta import Relation, carried
from passes.ir.program import Placements, is_sharded, output_values

from .._torch import LazyGraphModule, OpOverload
from ..capture.constraint import CONSTRAIN, constrained_to
from ..interrupts import interruptible
from ..placements import local_shape
from ..rules import OpCall, decomposition_of, rule_of
from . import reasons
from .choose import Chooser
from .context import Context
from .diagnostics import Diagnostics
from .emit import Emitter, traced
from .gather_updated import UpdatedParts
from .hints import Hints
from .lookahead import Lookahead
from .materialize import Materializer
from .offload import offload
from .parameters import Parameters
from .pending_sums import PendingSums
from .plan import Plan
from .recut_rows import cut_rows, gather_rows, split_rows_again
from .redistribute import Reason
from .steps import cost
from .values import Value, infos, results


@interruptible
def partition(program: Program, plan: Plan) -> Program:
    """One rank's share of ``program`` under ``plan``; ``program`` is left as it is.

    Raises ``PartitionError`` if an op's local result has another shape than its placement says.
    """
    return _Walk(Context(program, plan)).run()


class _Walk:
    """The walk. ``values``: for each global node a ``Value``, a tuple of them, or this rank's node of a number."""

    def __init__(self, context: Context) -> None:
        self.context, self.program = context, context.program
        self.values: dict[fx.Node, Any] = {}
        self.emitter, self.chooser = Emitter(context.program), Chooser(context.mesh, context.model_axes)
        self.lookahead = Lookahead(context.mesh, self.chooser, self.values, context.differentiated)
        self.parameters = Parameters(context, self.values)
        self.hints = Hints(context, self.parameters, self.values)
        self.diagnostics = Diagnostics(context)
        self.materializer = Materializer(
            context, self.parameters, self.emitter, self.chooser, self.diagnostics, self.values
        )
        self.pending_sums = PendingSums(context, self.hints, self.materializer)
        self.updated_parts = UpdatedParts(context, self.materializer)

    def run(self) -> Program:
        inputs = [self._input(node, declared) for node, declared in self.context.inputs.items()]
        self._cut_arguments()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._visit(node)
            elif node.op not in ("placeholder", "output"):
                raise PartitionError(
                    f"expected a flat graph of function calls, found a {node.op}: {node.format_node()}"
                )
        outputs = self._outputs()
        self._erase_unused()
        self._note_captured()
        self.diagnostics.rounded(self.emitter.graph)
        program = replace(
            self.program,
            graph_module=LazyGraphModule(torch.nn.Module(), self.emitter.graph),
            inputs=[*inputs, *self.emitter.seed_input()],
            outputs=outputs,
            history=list(self.program.history),
            notes=[*self.program.notes, *self.diagnostics.all()],
            units=self.context.units,
            reshard=self.context.plan.reshard,
            kept_by=self.context.plan.kept_by,
            prefetch=self.context.plan.prefetch,
            limit_gathers=self.context.plan.limit_gathers,
        )
        offload(program, self.context.plan)
        return program

    # Inputs

    def _input(self, node: fx.Node, declared: Input) -> Input:
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            self.values[node] = self.emitter.placeholder(node, val)
            return declared
        placement = self.context.placements[declared.name]
        new = self.emitter.placeholder(node, _local(val, placement, self.context.mesh))
        self.emitter.mark(new, (val.shape, placement))
        batch = frozenset(range(len(placement))) if declared.role is Role.BATCH else frozenset[int]()
        self.values[node] = Value.of(node, val, placement, new, batch, is_weight=declared.role is Role.PARAMETER)
        return replace(declared, placement=placement)

    def _cut_arguments(self) -> None:
        """Hold each argument that the plan cuts as this rank's part only, from here on."""
        for node, declared in self.context.inputs.items():
            if declared.name in self.context.plan.cuts:
                value, placement = self.values[node], self.context.plan.cuts[declared.name]
                value.move(placement, self.materializer.materialize(value, placement, Reason(declared.role, "is cut")))

    # Ops

    def _visit(self, node: fx.Node) -> None:
        self.hints.note_origin(node)
        if node.target is getitem and isinstance(self.values[node.args[0]], tuple):  # type: ignore[index]
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.target is CONSTRAIN:
            self._constrain(node)
        elif isinstance(node.target, OpOverload) and any(infos(results(node.meta.get("val")))):
            self._op(node)
        else:
            self._number(node)
        self.parameters.note_update(node)
        self.pending_sums.reduce_after(node)
        self.updated_parts.gather_after(node)

    def _constrain(self, node: fx.Node) -> None:
        """Hold the value only in the placement that the user gives, from here on."""
        (value,) = self.materializer.operands(node)
        placement = constrained_to(node, value.primary)
        reason = reasons.for_constraint(value.source, node, self.context)
        nodes = {placement: self.materializer.materialize(value, placement, reason)}
        batch = value.batch_in(placement)
        self.values[node] = replace(value, source=node, primary=placement, nodes=nodes, batch=batch)

    def _number(self, node: fx.Node) -> None:
        """Compute numbers, on whole operands: they are the same on every rank."""

        def whole(operand: fx.Node) -> Any:
            value = self.values[operand]
            if not isinstance(value, Value):
                return value
            reason = reasons.for_operand(operand, node, self.context)
            return self.materializer.materialize(value, self.context.replicated, reason)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), whole)
        self.values[node] = self.emitter.number(node.target, args, kwargs, like=node)

    def _op(self, node: fx.Node) -> None:
        self.parameters.note_cast(node)
        self.pending_sums.reduce_before(node)
        operands = self.materializer.operands(node)
        call = self.materializer.call(node, operands)
        rows = cut_rows(call, operands)
        if rows:
            operands = [gather_rows(node, operands[0], rows, self.materializer)]
        decomposition = decomposition_of(call)
        if decomposition is not None and self._decomposing_saves(decomposition[0], operands[0]):
            self.values[node] = self._decompose(node, operands, decomposition[1])
            return
        self.values[node] = self._compute(node, call, operands)
        for result in results(self.values[node]) if rows else ():
            split_rows_again(result, rows, self.materializer)

    def _compute(self, node: fx.Node, call: OpCall, operands: Sequence[Value]) -> Any:
        """Compute the op by the options that cost least."""
        phase: Phase | None = node.meta.get("phase")
        later = partial(self.lookahead.of, node, operands) if phase in (Phase.FORWARD, Phase.BACKWARD) else None
        hint, required = self.hints.of(node), self.hints.required(node)
        chosen = self.chooser.cheapest(call, operands, hint, phase, required, later)
        self.hints.note_draw(node, chosen)
        if rule_of(node.target) is None:
            self.diagnostics.no_rule(node, operands)
        elif phase is Phase.UPDATE and chosen == self.chooser.replicated(call):
            self.diagnostics.whole_matrices(node, [self.materializer.base(value) for value in operands])
        return self.materializer.compute(node, call, operands, chosen)

    def _decomposing_saves(self, dim: int, value: Value) -> bool:
        """Whether to reduce two numbers a row costs less than to gather the rows."""
        saved = 0.0
        for k, axis in enumerate(self.context.mesh.axes):
            if value.primary[k] == Shard(dim):
                nbytes = value.bytes_before(value.primary, k, self.context.mesh)
                saved += cost(Shard(dim), Replicate(), nbytes, axis)
                saved -= 2 * cost(Partial(), Replicate(), nbytes / value.shape[dim], axis)
        return saved > 0

    def _decompose(self, node: fx.Node, operands: Sequence[Value], decomposition: Callable[..., Any]) -> Any:
        """Walk the ops of ``decomposition`` instead of ``node``; returns its result."""
        graph = traced(decomposition, node.args)
        values = iter(operands)
        for inner in graph.nodes:
            inner.meta |= carried(node, Relation.SHARE)
            if inner.op == "placeholder":
                self.values[inner] = next(values)
            elif inner.op == "call_function":
                self._visit(inner)
        (result,) = output_values(graph)
        return self.values[result]

    # Outputs

    def _outputs(self) -> list[Output]:
        returned, outputs = [], []
        for node, output in zip(self.program.output_values(), self.program.outputs, strict=True):
            value = self.values[node] if isinstance(node, fx.Node) else node
            if isinstance(value, Value):
                placement = self.hints.of_output(value, output)
                reason = reasons.for_output(value.source, output, self.context)
                returned.append(self.materializer.materialize(value, placement, reason))
                outputs.append(replace(output, placement=placement))
            else:
                returned.append(value)
                outputs.append(output)
        self.emitter.graph.output(tuple(returned))
        return outputs

    def _note_captured(self) -> None:
        """Note, in each node that holds a global value, the captured node that computes it."""
        for node in self.program.graph.nodes:
            value = self.values.get(node)
            for holder in value.nodes.values() if isinstance(value, Value) else ():
                holder.meta.setdefault("captured", node.name)

    def _erase_unused(self) -> None:
        """Drop nodes that were emitted only for a whole value that no node reads in the end."""
        for node in reversed(self.emitter.graph.nodes):
            if not node.users and node.op == "call_function" and is_pure(node):
                self.emitter.graph.erase_node(node)


def _local(val: torch.Tensor, placement: Placements, mesh: Mesh) -> torch.Tensor:
    """A fake of this rank's part of a fake."""
    if not is_sharded(placement):
        return val
    with val.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(local_shape(val.shape, placement, mesh), dtype=val.dtype, device=val.device)
