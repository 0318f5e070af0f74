"""Certify a step: derive which function of which global values each value of the final programs is, from rules alone.

The captured program runs on symbols (``symbols.py``), once. The final programs run on them in lockstep, each rank with
the symbols of its own parts (``machine.py``); a value that is still to be reduced is named by what it reduces to, and
marked with its axes. What only moves elements, moves symbols; pointwise ops are computed (``symbolic_ops.py``); any
other op must be one of the captured program's, on parts for which the op's sharding rule says what its results are
(``parts_by_rule.py``). Nothing that the partitioner says of a node is believed. At the end each output must be the
captured one's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from passes import Input, OutputKind, Program
from passes.ir.collectives import is_collective, is_wait
from passes.ir.inline import inlined
from passes.ir.program import Placements

from . import symbols
from .lockstep import LockstepError
from .machine import CapturedMachine, Machine
from .parts_by_rule import PartsByRule, is_part, part
from .stages import values_after
from .symbolic_collectives import Collectives
from .symbolic_ops import Unknown
from .wholes import part_of


@dataclass(frozen=True)
class Certificate:
    """The result of ``certify``; true if every output is shown to be the global output under its placement.

    ``outcome`` is ``"shown"``, ``"wrong"`` or ``"cannot show"``. Of the last two: ``what``, the output or the state,
    ``node`` and ``line``, the first node that is not shown, and ``why``. ``ranks``: how many were looked at.
    """

    outcome: str
    ranks: int
    nodes: int
    outputs: int
    what: str = ""
    node: str = ""
    line: str = ""
    why: str = ""

    def __bool__(self) -> bool:
        return self.outcome == "shown"

    def __str__(self) -> str:
        if self:
            count = f"{self.nodes} nodes, {self.ranks} ranks"
            return f"shown: each of {self.outputs} outputs is the global output under its placement ({count})"
        where = ", ".join(each for each in (self.what, f"at {self.node}") if each)
        return f"{self.outcome}: {where}: {self.why} {self.line}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return vars(self).copy()


def certify_programs(captured: Program, final: Sequence[Program]) -> Certificate:
    """Certify the final programs of all ranks, or of the first two and the last along each axis.

    Of a region, all that is inside is derived.
    """
    return _Certification(captured, [inlined(program) for program in final]).run()


@dataclass
class _Certification:
    captured: Program
    final: Sequence[Program]
    unshown: dict[fx.Node, Unknown] = field(default_factory=dict)  # of values that are known, something that is not

    def run(self) -> Certificate:
        """The outcome."""
        self.whole = CapturedMachine(self.captured)
        self.ranks = [Machine(program, self.whole) for program in self.final]
        self.parts = PartsByRule(self.whole, self.ranks)
        self.collectives = Collectives(self.whole, self.ranks)
        self.inputs = [self._inputs_of(program) for program in self.final]
        for machine, given in zip(self.ranks, self.inputs, strict=True):
            machine.start(given)
        try:
            self._steps()
        except LockstepError as error:
            return self._not_shown("wrong", "", error.node, str(error))
        return self._outputs()

    def _steps(self) -> None:
        end = self.final[0].output_node
        if len({len(program.graph.nodes) for program in self.final}) > 1:
            raise LockstepError("expected all ranks to run the same ops", end)
        for nodes in zip(*(program.graph.nodes for program in self.final), strict=True):
            if len({(each.op, str(each.target)) for each in nodes if each.op == "call_function"}) > 1:
                raise LockstepError("expected all ranks to run the same ops", nodes[0])
            self._step(nodes)
        self.collectives.end(end)

    # Inputs.

    def _inputs_of(self, program: Program) -> list[Any]:
        pairs = zip(self.captured.inputs, self.captured.placeholders, strict=True)
        wholes = {declared.name: self.whole.env[node] for declared, node in pairs}
        return [self._input(declared, wholes, program) for declared in program.inputs]

    def _input(self, declared: Input, wholes: dict[str, Any], program: Program) -> Any:
        """A rank's part of an input; of what the captured program does not have, a seed, the symbol of a number."""
        if declared.parts:
            parts = sorted(declared.parts, key=lambda each: each.offset)
            return torch.cat([self._input(each.input, wholes, program).reshape(-1) for each in parts])
        if declared.numbers:
            each = [self._input(Input(declared.role, name), wholes, program) for name in declared.numbers]
            assert declared.dtype is not None, "numbers on the device have a dtype"
            return symbols.elements(torch.stack(list(map(symbols.symbol, each))), symbols.mark_of(declared.dtype))
        whole = wholes.get(declared.name, torch.tensor(symbols.key("input", declared.name)))
        is_number = not isinstance(whole, Tensor) or whole.dtype != torch.complex128
        return whole if is_number else part_of(whole, declared.placement, program.mesh).clone()

    # Nodes.

    def _step(self, nodes: Sequence[fx.Node]) -> None:
        """Run a node on all ranks."""
        starts = is_collective(nodes[0])
        try:
            if starts:
                self.collectives.start(nodes)
            elif is_wait(nodes[0]):
                self.collectives.wait(nodes)
        except (Unknown, RuntimeError, ValueError) as error:
            self.unshown.setdefault(nodes[0], error if isinstance(error, Unknown) else Unknown(str(error)))
            for machine, node in zip(self.ranks, nodes, strict=True) if starts else ():
                machine.give_unknown(node)
        if not starts:
            self._compute(nodes)

    def _compute(self, nodes: Sequence[fx.Node]) -> None:
        unknown: dict[int, Unknown] = {}
        for rank, (machine, node) in enumerate(zip(self.ranks, nodes, strict=True)):
            try:
                machine.step(node)
            except Unknown as error:
                unknown[rank] = error
        if not unknown:
            return
        ours = [machine.operands(node) for machine, node in zip(self.ranks, nodes, strict=True)]
        follows = any(symbols.is_unknown(x) for of_rank in ours for x in of_rank)
        found = self.parts.find(nodes, ours) if all(map(self.whole.knows, ours[0])) else None
        for rank in unknown if found is None else range(len(self.ranks)):
            if found is None:
                self.ranks[rank].give_unknown(nodes[rank])
            else:
                self.ranks[rank].give(nodes[rank], self.parts.results(self.ranks[rank], found))
        if found is None and not follows:
            self.unshown.setdefault(nodes[0], next(iter(unknown.values())))

    # Outputs.

    def _outputs(self) -> Certificate:
        given = [self.whole.env[node] for node in self.captured.placeholders]
        expected = values_after(self.captured, given, self.whole.returned)
        found = [
            each
            for machine, own in zip(self.ranks, self.inputs, strict=True)
            for each in self._of(machine, own, expected)
        ]
        if found:
            return min(found, key=lambda each: each.outcome != "wrong")  # the first of those that are wrong, if any is
        return Certificate("shown", len(self.final), len(self.final[0].graph.nodes), len(expected))

    def _of(self, machine: Machine, inputs: list[Any], expected: dict[str, Any]) -> Iterator[Certificate]:
        """The wrong outputs of a rank, and those that are not shown."""
        program = machine.program
        after, placed = values_after(program, inputs, machine.returned), _placements(program)
        if _returned(self.captured) != _returned(program):
            yield self._not_shown("wrong", "", program.output_node, "it returns other values than the step does")
        for name, value in expected.items():
            if name not in after:
                yield self._not_shown("wrong", name, program.output_node, "it is no output of the program")
            elif not self._is_output(value, after[name], placed.get(name, ()), program):
                yield self._mismatch(name, after[name], placed.get(name, ()), machine)

    def _is_output(self, value: Any, own: Any, placed: Placements, program: Program) -> bool:
        pair = symbols.tensors_of([value, own])
        if len(pair) == 2:
            return is_part(own, part(value, placed, program.mesh), program.mesh)
        whole = any(x.ndim for x in pair)  # the other one is a number; a number on the device has no dims
        return not whole and own is not None and bool(symbols.symbol(value) == symbols.symbol(own))

    def _mismatch(self, name: str, own: Any, placed: Placements, machine: Machine) -> Certificate:
        """Wrong if all that it is computed from is known, or was used as it must not be; else it cannot be shown."""
        if own is None or any(map(symbols.is_unknown, symbols.tensors_of(own))):
            doubt = self._culprit(machine), Unknown("it computes a function that the captured program does not have")
            node, error = next(iter(self.unshown.items()), doubt)
            certain = bool(self.unshown) and all(each.wrong for each in self.unshown.values())
            return self._not_shown("wrong" if certain else "cannot show", name, node, str(error))
        expected = f"{name} under {' '.join(map(str, placed)) or 'no placement'}"
        why = f"expected {expected}, derived {self._derived(own, machine)}"
        return self._not_shown("wrong", name, self._culprit(machine), why)

    def _derived(self, own: Any, machine: Machine) -> str:
        for x in symbols.tensors_of(own):
            marks = symbols.pieces(x)[1]
            axes = [axis.name for k, axis in enumerate(machine.program.mesh.axes) if _is_pending(marks, k)]
            if machine.is_poisoned(x):
                return "memory without a value"
            if axes:
                return f"a value that is still to be reduced over {', '.join(axes)}"
            if self.whole.knows(x):
                return "another value of the captured program, or another part"
        return "another function of the inputs"

    def _culprit(self, machine: Machine) -> fx.Node:
        """The first node that computes what the captured program does not, of operands that it has."""
        strange: set[fx.Node] = set()
        for node in machine.program.graph.nodes:
            value = machine.first.get(node)
            if value is not None and not bool(self.whole.has(value).all()):
                strange.add(node)
                if not strange.intersection(node.all_input_nodes):
                    return node  # type: ignore[no-any-return]
        return machine.program.output_node

    def _not_shown(self, outcome: str, what: str, node: fx.Node, why: str) -> Certificate:
        count, line = len(self.final[0].graph.nodes), str(node.meta.get("source", ""))
        return Certificate(outcome, len(self.final), count, len(self.captured.outputs), what, str(node), line, why)


def _placements(program: Program) -> dict[str, Placements]:
    """The placements that a program declares of inputs, of parts of flat ones, and of outputs."""
    inputs = [*program.inputs, *(part.input for flat in program.inputs for part in flat.parts)]
    placed = {each.name: each.placement for each in inputs}
    return placed | {each.name: each.placement for each in program.outputs}


def _returned(program: Program) -> list[tuple[OutputKind, str]]:
    return [(each.kind, each.name) for each in program.outputs if each.kind is not OutputKind.UPDATE]


def _is_pending(marks: Tensor, axis: int) -> bool:
    bits = sum(symbols.pending(axis, each) for each in symbols.REDUCTIONS)
    return bool((marks & bits).any())
