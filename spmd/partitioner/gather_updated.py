"""Gather parameters that are updated in parts: each as soon as it has its last value, to the placement it lives in.

What reads it later in the step, an average of the model, say, reads it whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from passes import OutputKind

from .context import Context
from .materialize import Materializer
from .values import Value


@dataclass
class UpdatedParts:
    """The parameters whose ranks update a part each."""

    context: Context
    materializer: Materializer

    @cached_property
    def last(self) -> dict[fx.Node, str]:
        """The names of these parameters, by the node that is their value at the end of the step."""
        program = self.context.program
        ends = zip(program.output_values(), program.outputs, strict=True)
        return {
            node: output.name
            for node, output in ends
            if output.kind is OutputKind.UPDATE and output.name in self.context.plan.updates
        }

    @cached_property
    def _inputs(self) -> dict[str, fx.Node]:
        return {declared.name: node for node, declared in self.context.inputs.items()}

    def gather_after(self, node: fx.Node) -> None:
        """Bring a parameter to the placement it lives in, if ``node`` is its last value."""
        parameter, value = self.last.get(node), self.materializer.values.get(node)
        if parameter is not None and isinstance(value, Value):
            self._mark(parameter, value)
            placement, reason = self.context.placements[parameter], self.context.to_gather(parameter)
            value.move(placement, self.materializer.materialize(value, placement, reason))

    def _mark(self, parameter: str, updated: Value) -> None:
        """Mark, for passes, this rank's part before and after its update: neither is an input or output."""
        given = self.materializer.values[self._inputs[parameter]]
        placement = self.context.update_placements[parameter]
        for key, value in (("part_of", given), ("update_of", updated)):
            if placement in value.nodes:
                value.nodes[placement].meta[key] = parameter
