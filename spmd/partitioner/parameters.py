"""The nodes that are parameters, and which of their users read them whole.

The result of an update is the parameter to a forward later in the step: a GAN's second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes import Phase, Role
from passes.ir.program import Placements

from .context import Context
from .values import Value


@dataclass
class Parameters:
    """The parameters as they are given, and as the step has updated them so far."""

    context: Context
    values: Mapping[fx.Node, Any]
    _updated: dict[fx.Node, str] = field(default_factory=dict)
    _casts: dict[fx.Node, str] = field(default_factory=dict)

    def name(self, node: fx.Node) -> str | None:
        """The name of the parameter that ``node`` is: as given, as an update made it, or cast for forward."""
        declared = self.context.inputs.get(node)
        if declared is not None:
            return declared.name if declared.role is Role.PARAMETER else None
        return self._updated.get(node) or self._casts.get(node)

    def is_gathered(self, operand: fx.Node, user: fx.Node) -> bool:
        """Whether ``operand`` is a parameter that ``user`` reads whole."""
        if not self.context.gathers_parameters:
            return False
        is_read = user.meta.get("phase") in (Phase.FORWARD, Phase.BACKWARD) and user not in self._casts
        return is_read and self.name(operand) is not None

    def note_cast(self, node: fx.Node) -> None:
        """Record ``node`` before its op is computed, if it casts a split parameter to a narrower dtype for forward.

        It is done on parts: what is gathered is the cast, in fewer bytes.
        """
        operands = node.all_input_nodes  # none where ``torch.vmap`` casts a number
        if node.target is not torch.ops.aten._to_copy.default or not operands:
            return
        if not self.is_gathered(operands[0], node):
            return
        old, new = operands[0].meta["val"], node.meta["val"]
        if old.is_floating_point() and new.is_floating_point() and new.itemsize < old.itemsize:
            self._casts[node] = self.name(operands[0]) or ""

    def cast_placement(self, node: fx.Node) -> Placements | None:
        """The placement in which ``node`` casts a parameter; None if it is no such cast."""
        return self.values[node.all_input_nodes[0]].primary if node in self._casts else None

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
        if name is not None and before not in self._casts and isinstance(old, Value) and old.shape == value.shape:
            self._updated[node] = name
