"""What the user is told of a partition: what is gathered for want of a better way, where, and what can be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.distributed.tensor import Replicate

from passes import OutputKind, Role
from passes.ir.collectives import is_collective, operands
from passes.ir.program import is_sharded

from .context import Facts
from .values import Value


@dataclass
class Notes:
    """Each thing is told once, at the first place where it was met."""

    facts: Facts
    _told: dict[str, str] = field(default_factory=dict)
    _matrices: dict[tuple[str, str], dict[fx.Node, int]] = field(default_factory=dict)  # bytes, by op and line

    def no_rule(self, node: fx.Node, operands: Sequence[Value]) -> None:
        """Tell of an op that has no rule, if it makes a difference."""
        split = sum(held.nbytes for held in operands if any(not isinstance(p, Replicate) for p in held.primary))
        if split:
            self._told.setdefault(
                str(node.target),
                f"{node.target} at {_line(node)} has no rule and runs whole on every rank, "
                f"for which {split} bytes are gathered: register a rule with spmd.register_rule",
            )

    def rows_gathered(self, node: fx.Node) -> None:
        """Report rows of the batch that are gathered to be cut."""
        self._told.setdefault(
            f"{node.target} cuts",
            f"{node.target} at {_line(node)} cuts the batch across ranks, so its rows are gathered first. To avoid "
            "that, pass each part as an argument, or stack the parts and set input_batch_dim=1",
        )

    def whole_matrices(self, node: fx.Node, operands: Sequence[Value]) -> None:
        """Keep in mind what an update gathers to compute with whole; ``operands`` are no views."""
        gathered = self._matrices.setdefault((str(node.target), _line(node)), {})
        for held in operands:
            if is_sharded(held.primary) and self.facts.whole not in held.forms:
                gathered[held.source] = held.nbytes

    def rounded(self, graph: fx.Graph) -> None:
        """Tell in which dtypes gradients and parameters are sent, where that rounds them."""
        for role, option in ((Role.GRADIENT, "reduce_dtype"), (Role.PARAMETER, "gather_dtype")):
            dtype = self.facts.plan.options.get(option)
            sent = [node for node in graph.nodes if is_collective(node) and node.meta["collective"].role is role]
            count = sum(_rounds(node, dtype) for node in sent)
            if count:
                self._told[option] = f"{option}={dtype}: {count} of {len(sent)} {role}s are rounded to be sent"

    def all(self) -> list[str]:
        """All that is to be told, once the walk is over."""
        matrices = [
            f"{op} at {source} needs whole matrices and runs on every rank: {len(gathered)} of them, "
            f"{sum(gathered.values())} bytes, are gathered, each once"
            for (op, source), gathered in self._matrices.items()
            if gathered
        ]
        return [*self._told.values(), *matrices, *self._whole_gradients()]

    def _whole_gradients(self) -> list[str]:
        """Tell of gradients that could be reduced in parts, if nobody kept them."""
        updated = {o.name for o in self.facts.program.outputs if o.kind is OutputKind.UPDATE}
        whole = self.facts.kept_gradients & self.facts.plan.updates.keys() & updated
        if not whole:
            return []
        return [
            f"{len(whole)} gradients stay in .grad after the step, so they are reduced whole on every rank: "
            "zero_grad() at the end of the step lets each rank reduce the part that it updates"
        ]


def _rounds(node: fx.Node, dtype: torch.dtype | None) -> bool:
    """Whether what ``node`` sends was cast to ``dtype`` for that."""
    sent = operands(node)[0]
    return sent.target is torch.ops.aten._to_copy.default and sent.kwargs.get("dtype") == dtype


def _line(node: fx.Node) -> str:
    return node.meta.get("source") or node.name
