"""Kernels of a partitioned program by section: its equal blocks once, and what comes before and after them.

Work is counted for one row of the batch, and apart from that what does not depend on rows: a value depends on them if
the partitioner has split it over the axis of the batch. So one program describes micro-batches of any size.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from passes import AxisRole, Kind, Phase, Program, Role
from passes.analysis.aliases import is_view
from passes.analysis.repeated_blocks import blocks_of
from passes.analysis.strides import Layouts
from passes.ir.collectives import is_collective, is_wait, kind_of
from passes.ir.effects import mutates
from passes.ir.ops import Trait, has
from passes.ir.region import region_of
from passes.memory.pieces import copies
from passes.schedule.op_work import OpClass, is_counted, work_of

from ..partitioner.experts.axis import EXPERTS_AXIS


@dataclass(frozen=True)
class Amount:
    """A quantity that grows with the rows of a micro-batch: ``fixed + rows * each``."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, rows: float) -> float:
        """The quantity for so many rows."""
        return self.fixed + rows * self.each

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.each + other.each)


@dataclass(frozen=True)
class Kernel:
    """One launch.

    ``flops`` of matrix products or attention, of ``dtype``; ``dims``: batch, rows, inner and columns. ``module``: the
    last part of the name of the module. ``made``: bytes of its results. ``is_split``: whether its largest operand is
    split over the axis "tensor". ``keys``: bytes of the keys and values of attention in forward. ``unknown``: the op,
    if its work is not known.
    """

    kind: OpClass
    bytes: Amount
    flops: Amount = Amount()
    dims: tuple[Amount, ...] = ()
    made: Amount = Amount()
    dtype: str = "bfloat16"
    module: str = ""
    is_causal: bool = False
    is_split: bool = False
    keys: Amount = Amount()
    unknown: str = ""


@dataclass(frozen=True)
class Message:
    """A collective along an axis that is not the batch's. ``bytes``: of the longer of operand and result.

    ``to_experts``: it is along the axis of experts, to these or back.
    """

    kind: Kind
    axis: str
    bytes: Amount
    to_experts: bool = False


@dataclass
class Section:
    """Work and state of a part of a model; ``count`` equal ones follow each other.

    ``parameters``: numbers of one rank's share, before anything splits them over the batch's axes; ``saved``: bytes
    that forward keeps for backward, and of those the ones ``saved_whole`` on all ranks along "tensor"; ``boundary``:
    bytes that it hands to the next section. ``expert_parameters``: those of the parameters that are of experts.
    """

    name: str
    count: int
    kernels: dict[Phase, list[Kernel]]
    messages: dict[Phase, list[Message]]
    parameters: float = 0.0
    saved: Amount = Amount()
    saved_whole: Amount = Amount()
    boundary: Amount = Amount()
    expert_parameters: float = 0.0


FIRST, LAST = "first", "last"
_COUNTED = (Phase.FORWARD, Phase.BACKWARD)  # updates are counted by bytes of state


def sections_of(program: Program) -> list[Section]:
    """The sections of a partitioned program in the order of forward: what precedes the blocks, the blocks, the rest.

    A program without equal blocks is one section, the last.
    """
    return _Sections(program).all()


class _Sections:
    """Sorts the nodes of a program into sections."""

    def __init__(self, program: Program) -> None:
        self.program, self.layouts = program, Layouts(program.graph)
        self.batch = {k for k in program.mesh.axes_with(AxisRole.BATCH) if program.mesh.axes[k].size > 1}
        self.tensor = {k for k, axis in enumerate(program.mesh.axes) if k not in self.batch and axis.size > 1}
        self.experts = set(program.mesh.axes_with(EXPERTS_AXIS))
        self.rows = self._rows()
        self.inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self.kinds = kinds_of_blocks(program)
        self.shown = {blocks[min(1, len(blocks) - 1)]: kind for kind, blocks in self.kinds.items()}
        self.of_block = {block: kind for kind, blocks in self.kinds.items() for block in blocks}
        names = [FIRST, *self.kinds, LAST]
        counts = {kind: len(blocks) for kind, blocks in self.kinds.items()}
        self.sections = {
            name: Section(name, counts.get(name, 1), {p: [] for p in _COUNTED}, {p: [] for p in _COUNTED})
            for name in names
        }

    def all(self) -> list[Section]:
        """Sections that do or hold anything."""
        started = dict.fromkeys(_COUNTED, False)
        for node in self.program.graph.nodes:
            phase, block = self._phase(node), self._block(node)
            if node.op != "call_function" or phase is None:
                continue
            started[phase] = started[phase] or block is not None
            is_before = started[phase] == (phase is Phase.BACKWARD)
            name = self.shown.get(block) if block else FIRST if is_before and self.kinds else LAST
            if name is not None:
                self._add(self.sections[name], phase, node)
        self._add_parameters()
        self._add_values()
        return [each for each in self.sections.values() if each.parameters or any(each.kernels.values())]

    def _add(self, section: Section, phase: Phase, node: fx.Node) -> None:
        if is_collective(node):
            described = node.meta["collective"]
            kind = described.kind or kind_of(node)
            to_experts = kind is not Kind.ALL_REDUCE and described.axis in self._names(self.experts)
            if to_experts or described.axis not in self._names(self.batch):
                wait = next(iter(node.users), node)
                longer = max([node.all_input_nodes[0], wait], key=lambda each: each.meta["val"].nbytes)
                size = self._bytes(longer, self._grows(wait))
                section.messages[phase].append(Message(kind, described.axis, size, to_experts))
        elif self._runs(node):
            section.kernels[phase].append(self._kernel(node))

    def _names(self, axes: set[int]) -> set[str]:
        return {self.program.mesh.axes[k].name for k in axes}

    def _kernel(self, node: fx.Node) -> Kernel:
        work = work_of(node)
        operands = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
        results = _results(node)
        made = sum((self._bytes(each, self._grows(each)) for each in results), Amount())
        looks_up = has(node.target, Trait.LOOKS_UP)  # of the table, it reads as much as it gives
        read = operands[1:] if looks_up else operands
        moved = sum((self._bytes(each, self._grows(each)) for each in read), made + made if looks_up else made)
        if not looks_up:
            moved = _scaled(moved, work.bytes / max(1.0, moved.at(self.rows)))
        grows = any(map(self._grows, operands))
        largest = max((*operands, *results), key=lambda each: each.meta["val"].nbytes, default=node)
        name = str(next(iter(_inside(node))).meta.get("module") or "").rpartition(".")[2]
        flops = Amount(0.0, work.flops / self.rows) if grows else Amount(work.flops)
        dims = self._dims(operands[-2:]) if work.kind is OpClass.MATMUL and len(operands) >= 2 else ()
        causal = work.kind is OpClass.ATTENTION and any(arg is True for arg in (*node.args, *node.kwargs.values()))
        dtype = str(work.dtype).removeprefix("torch.")
        keys = Amount()
        if work.kind is OpClass.ATTENTION and self._phase(node) is Phase.FORWARD:
            keys = sum((self._bytes(each, self._grows(each)) for each in operands[1:3]), keys)
        is_split = self._has(largest, self.tensor)
        unknown = next((str(each.target) for each in _inside(node) if not is_counted(each)), "")
        return Kernel(work.kind, moved, flops, dims, made, dtype, name, causal, is_split, keys, unknown)

    def _dims(self, operands: list[fx.Node]) -> tuple[Amount, ...]:
        """Batch, rows, inner and columns of a product, each in proportion to the rows that it is split by."""
        one, other = operands
        left, right = one.meta["val"], other.meta["val"]
        sizes = [math.prod(left.shape[:-2]), left.shape[-2], left.shape[-1], right.shape[-1]]
        split = [
            any(self._grows(one, k) for k in range(left.dim() - 2)),
            self._grows(one, left.dim() - 2),
            self._grows(one, left.dim() - 1),
            self._grows(other, right.dim() - 1),
        ]
        pairs = zip(sizes, split, strict=True)
        return tuple(Amount(0.0, size / self.rows) if grows else Amount(size) for size, grows in pairs)

    def _bytes(self, node: fx.Node, grows: bool) -> Amount:
        size = node.meta["val"].nbytes
        return Amount(0.0, size / self.rows) if grows else Amount(size)

    def _grows(self, node: fx.Node, dim: int | None = None) -> bool:
        return self._has(node, self.batch, dim)

    def _has(self, node: fx.Node, axes: set[int], dim: int | None = None) -> bool:
        """Whether a value is split over ``axes``, along ``dim`` if that is given; one of unknown placement is."""
        placement = self.inputs[node].placement if node in self.inputs else node.meta.get("placement")
        if placement is None:
            return bool(axes) and node.op != "placeholder"
        found = [placement[k] for k in axes]
        return any(isinstance(p, Shard) and dim in (None, p.dim) for p in found)

    def _runs(self, node: fx.Node) -> bool:
        if is_wait(node) or node.target is operator.getitem or "val" not in node.meta:
            return False
        if has(node.target, Trait.COMPOSITE):
            return copies(node, self.layouts)
        return mutates(node) or not (is_view(node) or has(node.target, Trait.UNDECLARED_VIEW))

    def _phase(self, node: fx.Node) -> Phase | None:
        phase = _inside(node)[0].meta.get("phase")
        return phase if phase in _COUNTED else None

    def _block(self, node: fx.Node) -> str | None:
        """The block that a node belongs to, by the name of its module."""
        parts = str(_inside(node)[0].meta.get("module") or "").split(".")
        names = (".".join(parts[:k]) for k in range(1, len(parts) + 1))
        return next((name for name in names if name in self.of_block), None)

    def _rows(self) -> float:
        """The rows of one rank."""
        batch = [i for i in self.program.inputs if i.role is Role.BATCH]
        splits = [(i.shape, i.placement[k]) for i in batch for k in self.batch]
        sizes = [shape[placement.dim] for shape, placement in splits if isinstance(placement, Shard)]
        ranks = math.prod(self.program.mesh.axes[k].size for k in self.batch)
        return max(sizes, default=1) / ranks

    def _add_parameters(self) -> None:
        first_block = True
        for node, declared in self.inputs.items():
            if declared.role is not Role.PARAMETER:
                continue
            block = next((b for b in self.of_block if declared.name.startswith(f"{b}.")), None)
            first_block = first_block and block is None
            name = self.shown.get(block) if block else FIRST if first_block and self.kinds else LAST
            if name is not None:
                self.sections[name].parameters += node.meta["val"].numel()
                if any(declared.placement[k].is_shard() for k in self.experts):
                    self.sections[name].expert_parameters += node.meta["val"].numel()

    def _add_values(self) -> None:
        """Add the values of forward that backward reads, each memory once, and those handed to the next block."""
        bases: dict[fx.Node, fx.Node] = {}
        seen, end = set[fx.Node](), FIRST if self.kinds else LAST
        for node in self.program.graph.nodes:
            end = end if self._block(node) is None else LAST
            is_view = node.op == "call_function" and not (self._runs(node) or is_collective(node))
            is_view = is_view and node.target is not operator.getitem and bool(node.all_input_nodes)
            bases[node] = base = bases[node.all_input_nodes[0]] if is_view else node
            if base in seen or base.op != "call_function" or not isinstance(base.meta.get("val"), torch.Tensor):
                continue
            if self._phase(base) is Phase.FORWARD and any(self._phase(user) is Phase.BACKWARD for user in node.users):
                seen.add(base)
                block = self._block(base)
                section = self.sections.get(self.shown.get(block, "") if block else end)
                if section is not None:
                    size = self._bytes(base, self._grows(base))
                    section.saved += size
                    section.saved_whole += Amount() if self._has(base, self.tensor) else size
            self._add_boundary(node)

    def _add_boundary(self, node: fx.Node) -> None:
        block = self._block(node)
        if block not in self.shown or self._phase(node) is not Phase.FORWARD:
            return
        readers = [user for user in node.users if self._phase(user) is Phase.FORWARD]
        if any(self._block(user) != block for user in readers) and isinstance(node.meta.get("val"), torch.Tensor):
            self.sections[self.shown[block]].boundary += self._bytes(node, self._grows(node))


def kinds_of_blocks(program: Program) -> dict[str, list[str]]:
    """The outermost repeated blocks, equal ones together, by the name of the first."""
    shapes = {i.name: tuple(i.shape) for i in program.inputs if i.role is Role.PARAMETER}
    outermost = {name: blocks[0] for name, blocks in blocks_of(shapes).items() if blocks}
    members: dict[str, list[Any]] = {}
    for name, block in outermost.items():
        members.setdefault(block, []).append((name[len(block) :], shapes[name]))
    kinds: dict[Any, list[str]] = {}
    for block, inside in members.items():
        kinds.setdefault((block.rpartition(".")[0], tuple(inside)), []).append(block)
    return {blocks[0]: blocks for blocks in kinds.values()}


def _inside(node: fx.Node) -> list[fx.Node]:
    """The nodes of a region, or the node."""
    region = region_of(node)
    return list(region.nodes) if region is not None else [node]


def _results(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node makes: itself, or what takes them out of its tuple."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [user for user in node.users if isinstance(user.meta.get("val"), torch.Tensor)]


def _scaled(amount: Amount, by: float) -> Amount:
    return Amount(amount.fixed * by, amount.each * by)
