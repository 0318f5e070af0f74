"""Which nodes are parameters, and who reads them whole.

What an update makes of a parameter is that parameter, to a forward later in the step: a GAN's second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from passes import Phase, Role

from .context import Facts
from .values import Value


@dataclass
class Parameters:
    """The parameters as they are given, and as the step has updated them so far."""

    facts: Facts
    values: Mapping[fx.Node, Any]
    _updated: dict[fx.Node, str] = field(default_factory=dict)

    def name(self, node: fx.Node) -> str | None:
        """The name of the parameter that ``node`` is, as given or as an update made it."""
        declared = self.facts.inputs.get(node)
        if declared is not None:
            return declared.name if declared.role is Role.PARAMETER else None
        return self._updated.get(node)

    def is_gathered(self, operand: fx.Node, user: fx.Node) -> bool:
        """Whether ``user`` computes with the whole of ``operand``, a parameter."""
        if not self.facts.gathers_parameters:
            return False
        return user.meta.get("phase") in (Phase.FORWARD, Phase.BACKWARD) and self.name(operand) is not None

    def rounded(self, operand: fx.Node, held: Value) -> str | None:
        """The name of the parameter, if a rank has no more of ``operand`` as it is than the part that it updates."""
        name = self.name(operand)
        if name is None or name not in self.facts.plan.updates or not self.facts.to_gather(name).narrows(held.dtype):
            return None
        return name if operand in self.facts.inputs or held.primary == self.facts.updates[name] else None

    def note_update(self, node: fx.Node) -> None:
        """Know what ``node`` is, if it updates a parameter."""
        before = node.args[0] if node.args and node.meta.get("phase") is Phase.UPDATE else None
        if not isinstance(before, fx.Node) or not isinstance(held := self.values.get(node), Value):
            return
        name, was = self.name(before), self.values[before]
        if name is not None and isinstance(was, Value) and was.shape == held.shape:
            self._updated[node] = name
