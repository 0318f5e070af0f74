"""Tally: what emitting would communicate, without a graph.

``Tally`` stands where ``OpEmitter`` does: solvers decide on it, and it gives the cost of an assignment. A ``Step``
holds a value as a node would; what nobody reads in the end counts for nothing, as it is not in the program either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes import Axis, Kind, Mesh
from passes.ir.effects import is_pure
from passes.ir.program import Placements

from .context import Context
from .local_op import LocalOp
from .redistribute import Reason
from .redistribution_steps import Traffic, total_cost, traffic
from .values import Value


@dataclass(eq=False, slots=True)
class Step:
    """Something that emitting would compute; ``kept``: also if no step reads it."""

    reads: Sequence[Any] = ()
    kept: bool = False
    traffic: tuple[Traffic, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Cost:
    """The cost of an assignment: ``seconds`` as solvers estimate them, one after the other, and each collective."""

    seconds: float
    traffic: tuple[Traffic, ...]

    def count(self, kind: Kind | str) -> int:
        """The number of collectives of a kind."""
        return sum(each.kind == kind for each in self.traffic)

    def bytes(self, kind: Kind | str) -> int:
        """The bytes of one rank's local inputs to collectives of a kind, padding included."""
        return sum(each.nbytes for each in self.traffic if each.kind == kind)


@dataclass
class Tally:
    """Counts instead of emitting."""

    mesh: Mesh
    steps: list[Step] = field(default_factory=list)

    def placeholder(self, node: fx.Node, placement: Placements | None, prefix: str = "") -> Step:
        """An input."""
        return self._add(Step())

    def number(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> Step:
        """A call that gives no tensor."""
        return self._add(Step(tuple(operands.values()), not is_pure(node)))

    def compute(self, op: LocalOp, operands: Sequence[Step], values: Mapping[fx.Node, Any]) -> list[Step]:
        """An op on this rank's parts: one step that holds all results."""
        numbers = [value for leaf in op.node.all_input_nodes if isinstance(value := values.get(leaf), Step)]
        val = op.node.meta["val"]
        kept = op.body is None and not is_pure(op.node)
        sent = tuple(op.sends)
        seconds = sum(self._axis(each).rate.seconds(each.nbytes) for each in sent)
        step = self._add(Step((*operands, *numbers), kept, sent, seconds))
        return [step] * (1 if isinstance(val, torch.Tensor) else len(val))

    def own_rows(self, value: Value, step: Step, placement: Placements, length: int) -> Step:
        """The first rows of a count."""
        return self._add(Step((step,)))

    def redistributed(self, value: Value, placement: Placements, reason: Reason) -> Step:
        """A redistribution, from the nearest placement that the value has."""
        source = value.nearest(placement, self.mesh)
        dtype = reason.wire if reason.wire is not None and reason.casts(value.dtype) else value.dtype
        sent = tuple(traffic(value.shape, dtype.itemsize, source, placement, self.mesh))
        seconds = total_cost(source, placement, value.nbytes, self.mesh)
        return self._add(Step((value.nodes[source],), False, sent, seconds))

    def current(self, node: fx.Node, master: Step, part: Step, *options: Any) -> Step:
        """A part of a parameter, exact."""
        return self._add(Step((master, part)))

    def mark_parts(self, parameter: str, context: Context, given: Value, updated: Value) -> None:
        """Steps have no marks."""

    def cost(self, returned: Sequence[Any]) -> Cost:
        """The cost of all steps that are kept, or are read for what is returned."""
        live = {id(step) for step in returned}
        found = []
        for step in reversed(self.steps):
            if step.kept or id(step) in live:
                live.update(map(id, step.reads))
                found.append(step)
        sent = tuple(each for step in reversed(found) for each in step.traffic)
        return Cost(sum(step.seconds for step in found), sent)

    def _axis(self, sent: Traffic) -> Axis:
        return next(axis for axis in self.mesh.axes if axis.name == sent.axis)

    def _add(self, step: Step) -> Step:
        self.steps.append(step)
        return step
