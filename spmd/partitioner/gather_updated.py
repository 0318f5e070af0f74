"""When what was updated in parts is gathered: as soon as the step is done with it, to where the parameter lives.

Later in the step it is whole then to all that read it, an average of the model, say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from passes import OutputKind

from .context import Facts
from .materialize import Forms
from .values import Value


@dataclass
class Updates:
    """Gathers what the walk has come to."""

    facts: Facts
    forms: Forms

    @cached_property
    def last(self) -> dict[fx.Node, str]:
        """The parameters that are updated elsewhere than they live, by the node that is their value at the end."""
        program = self.facts.program
        ends = zip(program.output_values(), program.outputs, strict=True)
        return {
            node: output.name
            for node, output in ends
            if output.kind is OutputKind.UPDATE and output.name in self.facts.plan.updates
        }

    @cached_property
    def _inputs(self) -> dict[str, fx.Node]:
        return {declared.name: node for node, declared in self.facts.inputs.items()}

    def after(self, node: fx.Node) -> None:
        """Bring a parameter to where it lives, once it has its value."""
        parameter, held = self.last.get(node), self.forms.values.get(node)
        if parameter is not None and isinstance(held, Value):
            self._mark(parameter, held)
            place = self.facts.placements[parameter]
            held.move(place, self.forms.want(held, place, self.facts.to_gather(parameter)))

    def _mark(self, parameter: str, updated: Value) -> None:
        """Tell passes what this rank updates, and what becomes of it: neither is an input or output of the program."""
        given = self.forms.values[self._inputs[parameter]]
        place = self.facts.updates[parameter]
        for key, held in (("part_of", given), ("update_of", updated)):
            if place in held.forms:
                held.forms[place].meta[key] = parameter
