"""Notes for users: values that a partition gathers beyond the expected, at which line, and how to avoid it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import Axis, AxisRole, OutputKind, Phase, Role
from passes.ir.collectives import is_collective, operands
from passes.ir.ops import Trait, has
from passes.ir.program import Placements, is_sharded

from ..placements import all_shapes
from ..rules import rule_of
from ..rules.attention import KERNELS
from ..rules.cat_split import CUTS
from .context import Context
from .redistribute import Reason
from .values import Value

CUTS_THE_BATCH = "cuts the batch across ranks"


@dataclass
class Diagnostics:
    """Collects the notes; each is given once, for the first line it holds for."""

    context: Context
    _notes: dict[str, str] = field(default_factory=dict)
    _rows: dict[str, list[int]] = field(default_factory=dict)  # bytes of the values, by note
    _matrices: dict[tuple[str, str], dict[fx.Node, int]] = field(default_factory=dict)  # bytes, by op and line

    def no_rule(self, node: fx.Node, operands: Sequence[Value]) -> None:
        """Report an op without a rule, if some operand is gathered for it."""
        split = sum(value.nbytes for value in operands if any(not isinstance(p, Replicate) for p in value.primary))
        if split:
            self._notes.setdefault(
                str(node.target),
                f"{node.target} at {_line(node)} has no rule, so every rank runs it whole and {split} bytes are "
                "gathered. Register a rule with spmd.register_rule",
            )

    def whole_attention(self, node: fx.Node, queries: Placements) -> None:
        """Report attention that every rank along an axis of sequences computes as a whole."""
        for k in self.context.mesh.axes_with(AxisRole.SEQUENCE):
            axis = self.context.mesh.axes[k]
            if axis.size > 1 and isinstance(queries[k], Replicate):
                self._notes.setdefault(
                    f"{axis.name}, {_line(node)}",
                    f"attention at {_line(node)} is computed whole by each of the {axis.size} ranks of {axis.name}, "
                    "since its queries are whole there: pass sequences of a length that the ranks divide "
                    "(spmd.pad_to_longest)",
                )

    def moved(self, value: Value, placement: Placements, reason: Reason) -> None:
        """Note rows that are communicated over an axis of the batch so that ``reason.reader`` has them otherwise.

        And rows of sequences, but for those that attention reads, as the user asks.
        """
        source, reader = value.nearest(placement, self.context.mesh), reason.reader
        axes = [k for k, p in enumerate(source) if isinstance(p, Shard) and p != placement[k]]
        axes = [k for k in axes if k not in self.context.model_axes and self.context.mesh.axes[k].size > 1]
        if reader in self.context.routes.hints:  # tokens go to their experts, as the user asks
            return
        if axes and reader is not None and not value.is_weight and self._is_noted(reader):
            along = [self.context.mesh.axes[k] for k in axes]
            if all(AxisRole.SEQUENCE in axis.roles and AxisRole.BATCH not in axis.roles for axis in along):
                note = None if reader.target in KERNELS else _sequence_note(reader, along)
            else:
                note = _rows_note(reader, all(self._is_even(value, source, k) for k in axes))
            if note is not None:
                self._rows.setdefault(note, []).append(value.nbytes)

    def _is_noted(self, reader: fx.Node) -> bool:
        """Whether gathers for an op have no other note: those of an update, and of an op without a rule, have."""
        return reader.meta.get("phase") in (Phase.FORWARD, Phase.BACKWARD) and rule_of(reader.target) is not None

    def _is_even(self, value: Value, placement: Placements, axis: int) -> bool:
        """Whether all ranks of an axis have equal parts of the rows."""
        split = placement[axis]
        return isinstance(split, Shard) and value.shape[split.dim] % self.context.mesh.axes[axis].size == 0

    def whole_matrices(self, node: fx.Node, operands: Sequence[Value]) -> None:
        """Note the matrices that an update gathers; ``operands`` are no views."""
        gathered = self._matrices.setdefault((str(node.target), _line(node)), {})
        for value in operands:
            if is_sharded(value.primary) and self.context.replicated not in value.nodes:
                gathered[value.source] = value.nbytes

    def rounded(self, graph: fx.Graph) -> None:
        """Report the dtypes in which gradients and parameters are sent, where that rounds them."""
        for role, option in ((Role.GRADIENT, "reduce_dtype"), (Role.PARAMETER, "gather_dtype")):
            dtype = self.context.plan.options.get(option)
            sent = [node for node in graph.nodes if is_collective(node) and node.meta["collective"].role is role]
            count = sum(_rounds(node, dtype) for node in sent)
            if count:
                self._notes[option] = f"{option}={dtype} rounds {count} of {len(sent)} {role}s before they are sent"

    def masters(self) -> None:
        """Report the exact parts of parameters that a rank keeps beside what all ranks hold."""
        found, axes = self.context.masters.values(), self.context.mesh.axes
        sizes = [prod(all_shapes(m.shape, m.placement, axes)[0]) * m.dtype.itemsize for m in found if m.dtype]
        if sizes:
            self._notes["masters"] = (
                f"each rank keeps the parts of {len(sizes)} parameters that it updates exact ({sum(sizes)} bytes), "
                "beside what ranks sent each other of them, which the model holds"
            )

    def all(self) -> list[str]:
        """All notes, once the walk is over; none on what would be gathered where there is one rank."""
        if self.context.program.mesh.size == 1:
            return [*self._notes.values()]
        matrices = [
            f"{op} at {source} needs whole matrices, so every rank runs it: {len(gathered)} matrices "
            f"({sum(gathered.values())} bytes) are gathered, each once"
            for (op, source), gathered in self._matrices.items()
            if gathered
        ]
        rows = [note.format(_values(sizes)) for note, sizes in self._rows.items()]
        return [*self._notes.values(), *rows, *matrices, *self._whole_gradients()]

    def _whole_gradients(self) -> list[str]:
        """Report gradients that are reduced whole only because they outlive the step."""
        updated = {o.name for o in self.context.program.outputs if o.kind is OutputKind.UPDATE}
        whole = self.context.lasting_gradients & self.context.plan.updates.keys() & updated
        if not whole:
            return []
        return [
            f"{len(whole)} gradients stay in .grad after the step, so every rank reduces them whole. "
            "With zero_grad() at the end of the step each rank reduces only the part that it updates"
        ]


def _rows_note(reader: fx.Node, even: bool) -> str:
    """The note on rows of the batch that an op needs from other ranks, with braces for what they are."""
    at = _braced(reader)
    if reader.target in CUTS:
        return (
            f"{at} {CUTS_THE_BATCH}, so its rows are gathered first ({{}}). To avoid that, pass each part "
            "as an argument, or stack the parts and set input_batch_dim=1"
        )
    if not even:
        way_out = "choose a batch of which all ranks have equal parts"
    elif has(reader.target, Trait.JOINS):
        way_out = "concatenate parts of equal length, or along another dim than that of the rows"
    elif has(reader.target, Trait.POINTWISE):
        way_out = "give its operands their rows in the same order, each made from the batch in the same way"
    else:
        way_out = "work on each row by itself, or, where rows are compared with all others, on fewer columns of them"
    return f"{at} needs rows of the batch that other ranks have: {{}} are gathered. To avoid that, {way_out}"


def _sequence_note(reader: fx.Node, along: Sequence[Axis]) -> str:
    """The note on rows of a split sequence that an op needs from other ranks, with braces for what they are."""
    names = " and ".join(axis.name for axis in along)
    return f"{_braced(reader)} needs rows of the sequence that other ranks of {names} have: {{}} are gathered"


def _braced(reader: fx.Node) -> str:
    """An op and its line, for a text with braces of its own."""
    return f"{reader.target} at {_line(reader)}".replace("{", "{{").replace("}", "}}")


def _values(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} value{'' if len(sizes) == 1 else 's'}, {sum(sizes)} bytes"


def _rounds(node: fx.Node, dtype: torch.dtype | None) -> bool:
    """Whether the operand of ``node`` was cast to ``dtype`` to be sent."""
    sent = operands(node)[0]
    return sent.target is torch.ops.aten._to_copy.default and sent.kwargs.get("dtype") == dtype


def _line(node: fx.Node) -> str:
    return node.meta.get("source") or node.name
