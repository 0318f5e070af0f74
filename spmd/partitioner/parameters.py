"""The nodes that are parameters, and which of their users read them whole.

The result of an update is the parameter to a forward later in the step: a GAN's second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from passes import Phase, Role

from .context import Context
from .values import Value


@dataclass
class Parameters:
    """The parameters as they are given, and as the step has updated them so far."""

    context: Context
    values: Mapping[fx.Node, Any]
    _updated: dict[fx.Node, str] = field(default_factory=dict)

    def name(self, node: fx.Node) -> str | None:
        """The name of the parameter that ``node`` is, as given or as an update made it."""
        declared = self.context.inputs.get(node)
        if declared is not None:
            return declared.name if declared.role is Role.PARAMETER else None
        return self._updated.get(node)

    def is_gathered(self, operand: fx.Node, user: fx.Node) -> bool:
        """Whether ``operand`` is a parameter that ``user`` reads whole."""
        if not self.context.gathers_parameters:
            return False
        return user.meta.get("phase") in (Phase.FORWARD, Phase.BACKWARD) and self.name(operand) is not None

    def rounded(self, operand: fx.Node, value: Value) -> str | None:
        """The name of the parameter, if a rank has ``operand`` unrounded only in the part that it updates."""
        name = self.name(operand)
        context = self.context
        if name is None or name not in context.plan.updates or not context.to_gather(name).narrows(value.dtype):
            return None
        return name if operand in context.inputs or value.primary == context.update_placements[name] else None

    def note_update(self, node: fx.Node) -> None:
        """Record ``node`` as its parameter's new value, if it updates one."""
        before = node.args[0] if node.args and node.meta.get("phase") is Phase.UPDATE else None
        if not isinstance(before, fx.Node) or not isinstance(value := self.values.get(node), Value):
            return
        name, old = self.name(before), self.values[before]
        if name is not None and isinstance(old, Value) and old.shape == value.shape:
            self._updated[node] = name
