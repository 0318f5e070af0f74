"""Bodies of a pipeline's programs: what each computes, takes, receives and sends.

A program runs for each micro-batch (forward and backward of a stage), or once, behind all of them. What runs once and
reads values of other stages is divided by levels: a program begins with what the level before has sent, and ends with
what it sends itself, so that all messages between two stages have one order, whatever passes do.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from passes import Output, OutputKind, Program
from passes.analysis.aliases import is_view
from passes.ir.collectives import is_wait

from .place_nodes import Part, Placed


@dataclass
class Body(ABC):
    """One program of one stage, or of one rank for what runs once. ``bodies``: all of them, by that and name."""

    whole: Program
    placed: Placed
    stage: int
    bodies: Mapping[tuple[int, str], Body] = field(repr=False)
    computed: dict[fx.Node, None] = field(init=False, default_factory=dict)
    received: dict[fx.Node, int] = field(init=False, default_factory=dict)  # with the stage that each comes from
    kept: dict[fx.Node, Body] = field(init=False, default_factory=dict)  # with the program that hands it on
    sent: dict[tuple[fx.Node, int], None] = field(init=False, default_factory=dict)  # with the stages that receive
    handed_on: dict[fx.Node, None] = field(init=False, default_factory=dict)
    read: set[fx.Node] = field(init=False, default_factory=set)  # inputs

    @property
    @abstractmethod
    def name(self) -> str:
        """That of the programs of all stages for this purpose."""

    @property
    @abstractmethod
    def outputs(self) -> list[tuple[Any, Output]]:
        """Outputs of the whole program that this one returns."""

    @property
    @abstractmethod
    def before(self) -> Body | None:
        """The program of this stage that sends what is waited for at the end of this one."""

    @abstractmethod
    def _own(self) -> Iterator[fx.Node]:
        """The nodes that are placed here."""

    @abstractmethod
    def _find(self, node: fx.Node) -> Body | int | None:
        """Find a value's program: this one (None), one before it on this stage, or the one of this name on another."""

    @property
    def role(self) -> str:
        """``forward.0``."""
        return f"{self.name}.{self.stage}"

    @property
    def rank(self) -> int:
        """The rank along the axis of stages that runs it."""
        return self.stage % self.placed.ranks

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        ends = self.before is not None and self.before.sent
        return not (self.computed or self.received or self.kept or self.read or self.outputs or ends)

    def collect(self) -> None:
        """Find all that it needs; lets others send and hand on."""
        for node in [*self._own(), *self.handed_on, *(node for node, _ in self.sent)]:
            self._need(node)
        names = {each.name: node for node, each in zip(self.whole.placeholders, self.whole.inputs, strict=True)}
        for value, output in self.outputs:
            if output.kind is OutputKind.UPDATE:
                self._need(names[output.name])
            if isinstance(value, fx.Node):
                self._need(value)

    def _need(self, node: fx.Node) -> None:
        """Get the value of a node into this program, and all that it takes."""
        pending = [node]
        while pending:
            node = pending.pop()
            if node in self.computed or node in self.received or node in self.kept or node in self.read:
                continue
            if node.op == "placeholder":
                self.read.add(node)
                continue
            found = self._find(node)
            if found is None:
                self.computed[node] = None
                pending += self.operands(node)
            elif isinstance(found, Body) or (found - self.stage) % self.placed.ranks == 0:
                source = found if isinstance(found, Body) else self.sender(found)
                self.kept[node] = source
                source.handed_on[node] = None
            else:
                self._receive(node, found)

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """The operands that a node is computed from here."""
        return node.all_input_nodes

    def _receive(self, node: fx.Node, source: int) -> None:
        assert source != self.stage, f"{node} is computed on another stage"
        self.received[node] = source
        self.sender(source).sent[node, self.stage] = None

    def sender(self, source: int) -> Body:
        """The program of another stage that sends what this one receives."""
        return self.bodies[source, self.name]


@dataclass
class MicroBody(Body):
    """Forward or backward of a stage."""

    part: Part

    @property
    def name(self) -> str:
        """``forward``."""
        return self.part

    @cached_property
    def outputs(self) -> list[tuple[Any, Output]]:
        """The accumulators that grow here."""
        pairs = zip(self.whole.output_values(), self.whole.outputs, strict=True)
        return [(v, o) for v, o in pairs if o.role.is_sum and self._is_placed(v)]

    @property
    def before(self) -> Body | None:
        """None: a program of its own waits."""
        return None

    def _is_placed(self, node: fx.Node) -> bool:
        return self.placed.stages.get(node) == self.stage and self.placed.parts[node] is self.part

    def _own(self) -> Iterator[fx.Node]:
        return filter(self._is_placed, self.placed.stages)

    def _find(self, node: fx.Node) -> Body | int | None:
        placed, forward = self.placed, self.bodies[self.stage, Part.FORWARD]
        if node in placed.fixed or _is_view_of_values(node) or self._is_placed(node):
            return None
        if node in placed.free:
            return forward if self.part is not placed.parts[node] and self._forward_reads(node) else None
        if self.part is not Part.FORWARD and placed.parts[node] is Part.FORWARD:
            return forward
        return self.bodies[self.stage, Part.BACKWARD] if self.part is Part.WEIGHTS else placed.stages[node]

    def _forward_reads(self, node: fx.Node) -> bool:
        """Whether forward of this stage computes what follows from arguments, too."""
        readers = [user for user in node.users if self.placed.stages.get(user) == self.stage]
        return any(self.placed.parts[user] is Part.FORWARD for user in readers)


def _is_view_of_values(node: fx.Node) -> bool:
    """Whether a node can be taken again from its operand wherever that is."""
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_view(node) and is_tensor and not is_wait(node) and node.target is not operator.getitem


@dataclass(frozen=True)
class Levels:
    """For each node that runs once and rank, the level that computes it; the last of them has the update."""

    depth: int
    levels: Mapping[tuple[fx.Node, int], int]

    @classmethod
    def of(cls, program: Program, placed: Placed) -> Levels:
        """A value is computed in the first program that can, if that leads to a message, else in the last one."""
        levels, leading = dict[tuple[fx.Node, int], int](), dict[tuple[fx.Node, int], None]()
        nodes = [node for node in program.graph.nodes if node in placed.update and node.op != "placeholder"]
        for node in nodes:
            operands = (
                [] if node in placed.grown else [each for each in node.all_input_nodes if each.op != "placeholder"]
            )
            for stage in placed.update[node]:
                here = [levels[each, stage] for each in operands if stage in placed.update[each]]
                far = [(each, source_of(each, placed)) for each in operands if stage not in placed.update[each]]
                leading |= dict.fromkeys(far)
                levels[node, stage] = max([0, *here, *(levels[each] + 1 for each in far)])
        depth = max(levels.values(), default=0)
        for stage in range(placed.ranks):
            for value, _ in returned_by(program, placed, stage):
                if value in placed.update and value.op != "placeholder" and stage not in placed.update[value]:
                    leading[value, source_of(value, placed)] = None
                    depth = max(depth, levels[value, source_of(value, placed)] + 1)
        for node in reversed(nodes):
            for stage in placed.update[node]:
                if (node, stage) in leading and node not in placed.grown:
                    leading |= dict.fromkeys((e, stage) for e in node.all_input_nodes if (e, stage) in levels)
        return cls(depth, {key: level if key in leading else depth for key, level in levels.items()})

    def name(self, level: int) -> str:
        """``update``; ``exchange.0`` for those before it."""
        return Part.UPDATE if level == self.depth else f"exchange.{level}"


def returned_by(program: Program, placed: Placed, stage: int) -> list[tuple[Any, Output]]:
    """All results and new state, None where another stage keeps that, and the updates of state of this stage."""
    found = []
    for value, output in zip(program.output_values(), program.outputs, strict=True):
        home = placed.homes.get(output.name if output.kind is OutputKind.UPDATE else output.of or "")
        is_here = home is None or not output.shape or stage in home
        if not output.role.is_sum and (is_here or output.kind is OutputKind.NEW):
            in_memory_of_its_own = replace(output, replaces=False)  # a rank may run programs of other stages meanwhile
            found.append((value if is_here else None, in_memory_of_its_own))
    return found


def source_of(node: fx.Node, placed: Placed) -> int:
    """The stage that sends a value that runs once."""
    return min(placed.update[node])


@dataclass
class UpdateBody(Body):
    """The nodes that a stage computes once, in one level."""

    levels: Levels
    level: int

    @property
    def name(self) -> str:
        """``update``."""
        return self.levels.name(self.level)

    @property
    def before(self) -> Body | None:
        """That of the level before."""
        return self.sender(self.stage) if self.level else None

    @property
    def is_last(self) -> bool:
        """Whether it updates state and returns results."""
        return self.level == self.levels.depth

    @cached_property
    def outputs(self) -> list[tuple[Any, Output]]:
        """Outputs of its stage, in the last level."""
        return returned_by(self.whole, self.placed, self.stage) if self.is_last else []

    def _own(self) -> Iterator[fx.Node]:
        return (
            node for (node, stage), level in self.levels.levels.items() if (stage, level) == (self.stage, self.level)
        )

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Operands of the node; of what has been added up, the accumulator."""
        return [self.placed.grown[node]] if node in self.placed.grown else node.all_input_nodes

    def _find(self, node: fx.Node) -> Body | int | None:
        here = self.stage in self.placed.update[node]
        source = self.stage if here else source_of(node, self.placed)
        level = self.levels.levels[node, source] + (not here)
        is_number = not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
        if here and (is_number or node in self.placed.grown):
            return None  # computed again, or read where it has been added up
        if level < self.level:
            return self.bodies[self.stage, self.levels.name(level)]
        return None if here else source

    def sender(self, source: int) -> Body:
        """The program of the level before."""
        return self.bodies[source, self.levels.name(self.level - 1)]
