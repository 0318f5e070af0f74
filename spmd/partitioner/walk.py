"""The walk: once over the global graph, from its inputs to its outputs, emitting this rank's share.

For each op the operands are looked up, an option for each mesh axis is chosen, and the op is computed on this rank's
parts; then sums are added up that are complete, and parameters gathered that were updated in parts. Each step is
another file's, see ``__init__.py``; here is their order.
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
from ..placements import local_shape
from ..rules import OpCall, decomposition_of, rule_of
from . import reasons
from .choose import Chooser
from .context import Facts
from .diagnostics import Notes
from .emit import Emitter, traced
from .gather_updated import Updates
from .hints import Wanted
from .lookahead import Ahead
from .materialize import Forms
from .parameters import Parameters
from .pending_sums import Sums
from .plan import Plan
from .recut_rows import rows_cut, share_out_again, with_all_rows
from .redistribute import cost
from .values import Value, infos, results


def partition(program: Program, plan: Plan) -> Program:
    """One rank's share of ``program`` under ``plan``; ``program`` is left as it is.

    Raises ``PartitionError`` if an op's local result has another shape than its placement says.
    """
    return _Walk(Facts(program, plan)).run()


class _Walk:
    """The walk. ``values``: for each global node a ``Value``, a tuple of them, or this rank's node of a number."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.program = facts, facts.program
        self.values: dict[fx.Node, Any] = {}
        self.emitter, self.chooser = Emitter(facts.program), Chooser(facts.mesh, facts.model_axes)
        self.ahead = Ahead(facts.mesh, self.chooser, self.values, facts.differentiated)
        self.parameters = Parameters(facts, self.values)
        self.wanted = Wanted(facts, self.parameters, self.values)
        self.forms = Forms(facts, self.parameters, self.emitter, self.chooser, self.values)
        self.sums, self.updates = Sums(facts, self.wanted, self.forms), Updates(facts, self.forms)
        self.notes = Notes(facts)

    def run(self) -> Program:
        inputs = [self._input(node, declared) for node, declared in self.facts.inputs.items()]
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._visit(node)
            elif node.op not in ("placeholder", "output"):
                raise PartitionError(
                    f"expected a flat graph of function calls, found a {node.op}: {node.format_node()}"
                )
        outputs = self._outputs()
        self._erase_unused()
        self.notes.rounded(self.emitter.graph)
        return replace(
            self.program,
            graph_module=LazyGraphModule(torch.nn.Module(), self.emitter.graph),
            inputs=[*inputs, *self.emitter.seed_input()],
            outputs=outputs,
            history=list(self.program.history),
            notes=[*self.program.notes, *self.notes.all()],
            units=self.facts.units,
        )

    # Inputs

    def _input(self, node: fx.Node, declared: Input) -> Input:
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            self.values[node] = self.emitter.placeholder(node, val)
            return declared
        placement = self.facts.placements[declared.name]
        new = self.emitter.placeholder(node, _local(val, placement, self.facts.mesh))
        self.emitter.mark(new, (val.shape, placement))
        batch = frozenset(range(len(placement))) if declared.role is Role.BATCH else frozenset[int]()
        self.values[node] = Value.of(node, val, placement, new, batch, weights=declared.role is Role.PARAMETER)
        return replace(declared, placement=placement)

    # Ops

    def _visit(self, node: fx.Node) -> None:
        self.wanted.note_origin(node)
        if node.target is getitem and isinstance(self.values[node.args[0]], tuple):  # type: ignore[index]
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.target is CONSTRAIN:
            self._constrain(node)
        elif isinstance(node.target, OpOverload) and any(infos(results(node.meta.get("val")))):
            self._op(node)
        else:
            self._number(node)
        self.parameters.note_update(node)
        self.sums.after(node)
        self.updates.after(node)

    def _constrain(self, node: fx.Node) -> None:
        """From here on the value lives where the user says; nobody takes it from where it was."""
        (held,) = self.forms.operands(node)
        place = constrained_to(node, held.primary)
        new = self.forms.want(held, place, reasons.for_constraint(held.source, node, self.facts))
        self.values[node] = Value(
            node, held.shape, held.dtype, place, {place: new}, held.batch_in(place), held.iota_dim, held.weights
        )

    def _number(self, node: fx.Node) -> None:
        """Arithmetic on numbers, and ops that give none: the same on every rank, on whole operands."""

        def whole(operand: fx.Node) -> fx.Node:
            held = self.values[operand]
            reason = reasons.for_operand(operand, node, self.facts)
            return self.forms.want(held, self.facts.whole, reason) if isinstance(held, Value) else held

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), whole)
        self.values[node] = self.emitter.number(node.target, args, kwargs, like=node)

    def _op(self, node: fx.Node) -> None:
        self.sums.before(node)
        operands = self.forms.operands(node)
        call = self.forms.call(node, operands)
        rows = rows_cut(call, operands)
        if rows:
            self.notes.rows_gathered(node)
            operands = [with_all_rows(node, operands[0], rows, self.forms)]
        apart = decomposition_of(call)
        if apart is not None and self._saves(apart[0], operands[0]):
            self.values[node] = self._apart(node, operands, apart[1])
            return
        self.values[node] = self._compute(node, call, operands)
        for part in results(self.values[node]) if rows else ():
            share_out_again(part, rows, self.forms)

    def _compute(self, node: fx.Node, call: OpCall, operands: Sequence[Value]) -> Any:
        """The op as it costs least, of all that is right."""
        phase: Phase | None = node.meta.get("phase")
        later = partial(self.ahead.of, node, operands) if phase in (Phase.FORWARD, Phase.BACKWARD) else None
        wanted, only = self.wanted.of(node), self.wanted.before(node)
        chosen = self.chooser.cheapest(call, operands, wanted, phase, only, later)
        self.wanted.note_draw(node, chosen)
        if rule_of(node.target) is None:
            self.notes.no_rule(node, operands)
        elif phase is Phase.UPDATE and chosen == self.chooser.whole(call):
            self.notes.whole_matrices(node, [self.forms.base(held) for held in operands])
        return self.forms.compute(node, call, operands, chosen)

    def _saves(self, dim: int, held: Value) -> bool:
        """Whether to reduce two numbers a row moves less than to gather the rows."""
        total = 0.0
        for k, axis in enumerate(self.facts.mesh.axes):
            if held.primary[k] == Shard(dim):
                nbytes = held.bytes_before(held.primary, k, self.facts.mesh)
                total += cost(Shard(dim), Replicate(), nbytes, axis)
                total -= 2 * cost(Partial(), Replicate(), nbytes / held.shape[dim], axis)
        return total > 0

    def _apart(self, node: fx.Node, operands: Sequence[Value], how: Callable[..., Any]) -> Any:
        """Walk, in the place of ``node``, the ops that ``how`` makes of it."""
        graph = traced(how, node.args)
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
        for value, output in zip(self.program.output_values(), self.program.outputs, strict=True):
            held = self.values[value] if isinstance(value, fx.Node) else value
            if isinstance(held, Value):
                placement = self.wanted.of_output(held, output)
                reason = reasons.for_output(held.source, output, self.facts)
                returned.append(self.forms.want(held, placement, reason))
                outputs.append(replace(output, placement=placement))
            else:
                returned.append(held)
                outputs.append(output)
        self.emitter.graph.output(tuple(returned))
        return outputs

    def _erase_unused(self) -> None:
        """Drop what was needed only for a whole value that nobody asked for in the end."""
        for node in reversed(self.emitter.graph.nodes):
            if not node.users and node.op == "call_function" and is_pure(node):
                self.emitter.graph.erase_node(node)


def _local(val: torch.Tensor, placement: Placements, mesh: Mesh) -> torch.Tensor:
    """A fake of this rank's part of a fake."""
    if not is_sharded(placement):
        return val
    with val.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(local_shape(val.shape, placement, mesh), dtype=val.dtype, device=val.device)
