"""Certify a step: derive which function of which global values each value of the final programs is, from rules alone.

The captured program runs on symbols (``symbols.py``), once. The final programs run on them in lockstep, each rank with
the symbols of its own parts (``machine.py``); a value that is still to be reduced is named by what it reduces to, and
marked with its axes. What only moves elements, moves symbols; pointwise ops are computed (``symbolic_ops.py``); any
other op must be one of the captured program's, on parts for which the op's sharding rule says what its results are
(``parts_by_rule.py``). Nothing that the partitioner says of a node is believed. At the end each output must be the
captured one's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes import Input, OutputKind, Program, Role
from passes.ir.bundle import Bundle, InFlight, numbered
from passes.ir.collectives import is_collective, is_message, is_wait
from passes.ir.inline import inlined
from passes.ir.program import MicroBatches, Placements

from . import symbols
from .compared_stages import values_after
from .lockstep import LockstepError
from .machine import CapturedMachine, Machine
from .parts_by_rule import PartsByRule, is_part, part
from .symbolic.sums_of_runs import Run, Shares
from .symbolic_collectives import Collectives, Messages
from .symbolic_ops import Unknown
from .wholes import part_of


@dataclass(frozen=True)
class Certificate:
    """The result of ``certify``; true if every output is shown to be the global output under its placement.

    ``outcome`` is ``"shown"``, ``"wrong"`` or ``"cannot show"``. Of the last two: ``what``, the output or the state,
    ``node`` and ``line``, the first node that is not shown, and ``why``. ``ranks``: how many were looked at.
    ``routed``: whole numbers, such as which rows go to which experts and which keys a mask hides, were those of the
    arguments, or drawn, so that this holds for these, and any other values. ``rounded``: dtypes to which the options of
    the mode let ranks round what they send; what a value is rounded to there was not looked at. ``ways``: that a call
    can take, of a step that branches on values; the rest is of the worst of them.
    """

    outcome: str
    ranks: int
    nodes: int
    outputs: int
    what: str = ""
    node: str = ""
    line: str = ""
    why: str = ""
    routed: bool = False
    rounded: tuple[str, ...] = ()
    ways: int = 1

    def __bool__(self) -> bool:
        return self.outcome == "shown"

    def __str__(self) -> str:
        if self:
            count = f"{self.nodes} nodes, {self.ranks} ranks"
            shown = "shown for whole numbers as in this call" if self.routed else "shown"
            but = f", but for rounding to {' and '.join(self.rounded)}" if self.rounded else ""
            count += f", in each of {self.ways} ways through its branches that were looked at" * (self.ways > 1)
            return f"{shown}: each of {self.outputs} outputs is the global output under its placement{but} ({count})"
        where = ", ".join(each for each in (self.what, f"at {self.node}") if each)
        return f"{self.outcome}: {where}: {self.why} {self.line}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return vars(self).copy()


def certify_programs(
    captured: Program,
    final: Sequence[Program],
    numbers: Mapping[str, Tensor] | None = None,
    certification: type[Certification] | None = None,
) -> Certificate:
    """Certify the final programs of all ranks, or of the first two and the last along each axis.

    Of a region, all that is inside is derived. ``numbers``: arguments that are whole numbers, by name. Where rows go to
    experts, or a mask says which keys they see, what cannot be shown for any numbers is derived for these.
    ``certification``: how ranks run them.
    """
    final, certification = [inlined(program) for program in final], certification or Certification
    found = certification(captured, final).run()
    if found.outcome == "cannot show" and any(role.by_values for axis in captured.mesh.axes for role in axis.roles):
        routed = certification(captured, final, numbers or {}).run()
        return replace(routed, outcome="shown" if routed else "cannot show")  # what differs may be an identity
    return found


def certify_bundle(captured: Program, ranks: Sequence[tuple[Bundle, int]], call: str) -> Certificate:
    """Certify one call of a bundle that begins with empty channels. ``ranks``: the bundle of each, and its coordinate.

    Each output of the captured program has to be one of some rank's, and right on all that have it.
    """
    return _BundleCertification(captured, ranks, call).run()


@dataclass
class Certification:
    """The programs of some ranks, which run once in lockstep; ``runs``: of which parts of the batch, if of some."""

    captured: Program
    final: Sequence[Program]
    numbers: Mapping[str, Tensor] | None = None
    runs: Sequence[Run] = ()
    whole: CapturedMachine = field(init=False)
    unshown: dict[fx.Node, Unknown] = field(default_factory=dict)  # of values that are known, something that is not

    def run(self) -> Certificate:
        """The outcome."""
        self.whole = CapturedMachine(self.captured, self.numbers)
        try:
            for node in self.steps([self._inputs_of(program) for program in self.final]):
                raise LockstepError(f"{node} waits for ranks of another program, and all of them run this one", node)
        except LockstepError as error:
            return self.not_shown("wrong", "", error.node, str(error))
        return self.outcome()

    def steps(self, inputs: list[list[Any]], messages: Messages | None = None, flying: Any = None) -> Iterator[fx.Node]:
        """Run all nodes; yields those that wait for ranks of other programs."""
        runs: Sequence[Run | None] = self.runs or [None] * len(self.final)
        self.ranks = [Machine(program, self.whole, run) for program, run in zip(self.final, runs, strict=True)]
        self.parts = PartsByRule(self.whole, self.ranks)
        self.collectives, self.inputs = Collectives(self.whole, self.ranks, messages, flying), inputs
        for machine, given in zip(self.ranks, inputs, strict=True):
            machine.start(given)
        end = self.final[0].output_node
        if len({len(program.graph.nodes) for program in self.final}) > 1:
            raise LockstepError("expected all ranks to run the same ops", end)
        for nodes in zip(*(program.graph.nodes for program in self.final), strict=True):
            if len({(each.op, str(each.target)) for each in nodes if each.op == "call_function"}) > 1:
                raise LockstepError("expected all ranks to run the same ops", nodes[0])
            if is_message(nodes[0]):
                self.collectives.start_message(nodes)
                continue
            if is_wait(nodes[0]):
                yield from self.collectives.end_messages(nodes)
            self._step(nodes)
        self.collectives.end(end)

    # Inputs.

    def _inputs_of(self, program: Program) -> list[Any]:
        return [self.input_of(declared, self.wholes(), program) for declared in program.inputs]

    def wholes(self) -> dict[str, Any]:
        """The inputs of the captured program, by name."""
        pairs = zip(self.captured.inputs, self.captured.placeholders, strict=True)
        return {declared.name: self.whole.env[node] for declared, node in pairs}

    def input_of(self, declared: Input, wholes: dict[str, Any], program: Program) -> Any:
        """A rank's part of an input; of what the captured program does not have, a seed, the symbol of a number."""
        if declared.parts:
            parts = sorted(declared.parts, key=lambda each: each.offset)
            return torch.cat([self.input_of(each.input, wholes, program).reshape(-1) for each in parts])
        if declared.numbers:
            each = [self.input_of(Input(declared.role, name), wholes, program) for name in declared.numbers]
            assert declared.dtype is not None, "numbers on the device have a dtype"
            return symbols.elements(torch.stack(list(map(symbols.symbol, each))), symbols.mark_of(declared.dtype))
        name = declared.of if declared.role is Role.MASTER else declared.name
        whole = wholes.get(name or "", torch.tensor(symbols.key("input", declared.name)))
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
        found = self.parts.find(nodes, ours) if all(map(self.parts.may_be, ours[0])) else None
        for rank in unknown if found is None else range(len(self.ranks)):
            results = unknown[rank].results if found is None else self.parts.results(self.ranks[rank], found)
            if results is None:
                self.ranks[rank].give_unknown(nodes[rank])
            else:
                self.ranks[rank].give(nodes[rank], results)
        first = next(iter(unknown.values()))
        if found is None and not follows and first.results is None:
            self.unshown.setdefault(nodes[0], first)

    # Outputs.

    def outcome(self) -> Certificate:
        """The outputs of all ranks beside those that the captured program has."""
        expected = self.expected()
        found = [
            each
            for machine, own in zip(self.ranks, self.inputs, strict=True)
            for each in self._of(machine, own, expected)
        ]
        shown = Certificate(
            "shown", len(self.final), len(self.final[0].graph.nodes), len(expected), routed=self.whole.routes
        )
        return _first([*found, shown])

    def expected(self) -> dict[str, Any]:
        """The values that the captured program returns and leaves in its inputs, by name."""
        given = [self.whole.env[node] for node in self.captured.placeholders]
        return values_after(self.captured, given, self.whole.returned)

    def _of(self, machine: Machine, inputs: list[Any], expected: dict[str, Any]) -> Iterator[Certificate]:
        """The wrong outputs of a rank, and those that are not shown."""
        program = machine.program
        after = values_after(program, inputs, machine.returned)
        if _returned(self.captured) != _returned(program):
            yield self.not_shown("wrong", "", program.output_node, "it returns other values than the step does")
        for name, value in _as_held(program.inputs, expected).items():
            if name not in after:
                yield self.not_shown("wrong", name, program.output_node, "it is no output of the program")
            else:
                yield from self.compared(name, value, after[name], machine)

    def compared(self, name: str, value: Any, own: Any, machine: Machine) -> Iterator[Certificate]:
        """Compare one output of a rank with the expected value; yields a certificate if it is wrong or not shown."""
        placed = _placements(machine.program).get(name, ())
        if not self._is_output(value, own, placed, machine.program):
            yield self._mismatch(name, own, placed, machine)

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
            return self.not_shown("wrong" if certain else "cannot show", name, node, str(error))
        expected = f"{name} under {' '.join(map(str, placed)) or 'no placement'}"
        why = f"expected {expected}, derived {self._derived(own, machine)}"
        return self.not_shown("wrong", name, self._culprit(machine), why)

    def _derived(self, own: Any, machine: Machine) -> str:
        for x in symbols.tensors_of(own):
            marks = symbols.pieces(x)[1]
            axes = [axis.name for k, axis in enumerate(machine.mesh.axes) if symbols.is_pending(marks, k)]
            if machine.is_poisoned(x):
                return "memory without a value"
            if machine.run is not None and machine.run.is_sum(x):
                return "a sum over micro-batches that is not that over all, in order, or of another value"
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

    def not_shown(self, outcome: str, what: str, node: fx.Node, why: str) -> Certificate:
        """A certificate of another outcome."""
        count, line = len(self.final[0].graph.nodes), str(node.meta.get("source", ""))
        return Certificate(outcome, len(self.final), count, len(self.captured.outputs), what, str(node), line, why)


class _BundleCertification:
    """The ranks at one coordinate go through their programs together, as ``Certification`` has it.

    The k-th run of a program is that of the k-th micro-batch, if there are some: what it adds to a sum has the share of
    that (``sums_of_runs.py``). ``sums``: of each rank its accumulators, and arguments and results with all rows.
    """

    def __init__(self, captured: Program, ranks: Sequence[tuple[Bundle, int]], call: str) -> None:
        self.captured, self.ranks, self.call = captured, ranks, call
        self.whole, self.messages = CapturedMachine(captured), Messages(axis=ranks[0][0].axis)
        self.after: list[dict[str, tuple[Certification, Machine, Any]]] = [{} for _ in ranks]
        self.micro, self.sums = ranks[0][0].micro_batches, [dict[str, Tensor]() for _ in ranks]
        if self.micro is not None:
            axes = next(iter(ranks[0][0].programs.values())).mesh.axes
            self.shares = Shares(self.micro.count, len(axes), in_a_tree=False)
            self.sums = [_no_sums(bundle, call, k, self.micro, self.shares) for bundle, k in ranks]

    def run(self) -> Certificate:
        together: dict[int, list[int]] = {}
        for number, (_, coordinate) in enumerate(self.ranks):
            together.setdefault(coordinate, []).append(number)
        going = [self._programs(coordinate, numbers) for coordinate, numbers in together.items()]
        try:
            while going:
                before = len(going), self.messages.moves
                blocked = [(steps, at) for steps in going if (at := next(steps, None)) is not None]
                going = [steps for steps, _ in blocked]
                if going and before == (len(going), self.messages.moves):
                    raise LockstepError("the ranks wait for each other for ever", blocked[0][1])
            self.messages.check_received()
        except LockstepError as error:
            nodes, line = self._nodes(), str(error.node.meta.get("source", ""))
            return Certificate("wrong", len(self.ranks), nodes, 0, "", str(error.node), line, str(error))
        return self._outputs()

    def _programs(self, coordinate: int, numbers: list[int]) -> Iterator[fx.Node]:
        bundles = [self.ranks[number][0] for number in numbers]
        order, flying, channels = bundles[0].order(self.call, coordinate), list[Any](), [InFlight(b) for b in bundles]
        for role, number in numbered(order):
            programs = [inlined(bundle.programs[role]) for bundle in bundles]
            run = None if self.micro is None else Run(number, self.shares)
            certification = Certification(self.captured, programs, runs=() if run is None else [run] * len(programs))
            certification.whole = self.whole
            ends = order.count(role) == 1
            inputs = [
                self._inputs(certification, number, program, held.take(role, order), ends)
                for number, program, held in zip(numbers, programs, channels, strict=True)
            ]
            yield from certification.steps(inputs, self.messages, flying)
            for k, machine in enumerate(certification.ranks):
                after = values_after(programs[k], inputs[k], machine.returned)
                if run is not None:
                    self._add_up(numbers[k], programs[k], after, run)
                given = {each.name: after[each.given] for each in bundles[k].channels if each.given in after}
                channels[k].put(role, after | given)
                self.after[numbers[k]] |= {name: (certification, machine, value) for name, value in after.items()}
        for message in flying:
            raise LockstepError(f"{message.nodes[0]} is never waited for", message.nodes[0])
        left = (each for role in order for each in _returned(bundles[0].programs[role]))
        returned = [each for each in left if each[0] is not OutputKind.CHANNEL]
        if self.micro is not None and returned != _returned(self.captured):
            raise LockstepError("a rank returns other values than the step does", programs[0].output_node)

    def _inputs(
        self, certification: Certification, number: int, program: Program, taken: Mapping[str, Any], ends: bool
    ) -> list[Any]:
        """``ends``: whether the program runs once, behind all micro-batches, whose sums are complete."""
        before = {name: value for name, (_, _, value) in self.after[number].items()} | dict(taken)
        for name, held in self.sums[number].items():
            before[name] = self.shares.completed(held, self.whole.symbols) if ends else held.clone()
        wholes, argument = certification.wholes(), self.micro.whole if self.micro is not None else {}
        found = [
            before[each.name]
            if each.name in before
            else certification.input_of(replace(each, name=argument.get(each.name, each.name)), wholes, program)
            for each in program.inputs
        ]
        if self.micro is None:
            return found
        for declared, value in zip(program.inputs, found, strict=True):
            if declared.name in self.micro.split:
                self.sums[number].setdefault(declared.name, value.clone())
        return self.micro.of_run(program.inputs, found, certification.runs[0].number)

    def _add_up(self, number: int, program: Program, after: dict[str, Any], run: Run) -> None:
        """Keep what a run has left in accumulators, and where all rows lie; that is there after it."""
        assert self.micro is not None, "a bundle that runs micro-batches"
        for declared in program.inputs:
            held = self.sums[number].get(declared.name)
            if held is None:
                continue
            if declared.name in self.micro.split:
                self.micro.of_run([declared], [held], run.number)[0].copy_(after[declared.name])
            elif declared.name not in self.micro.whole:
                held = self.sums[number][declared.name] = run.outside(after[declared.name])
            after[declared.name] = held

    def _outputs(self) -> Certificate:
        certification = next(iter(self.after[0].values()))[0]
        inputs = [i for bundle, _ in self.ranks for program in bundle.programs.values() for i in program.inputs]
        expected, found = _as_held(inputs, certification.expected()), list[Certificate]()
        for name, value in expected.items():
            own = [after[name] for after in self.after if name in after]
            if not own and value is not certification.wholes().get(name):  # what the step leaves as it is
                end = certification.final[0].output_node
                found.append(certification.not_shown("wrong", name, end, "it is no output of any rank"))
            found += [each for of, machine, held in own for each in of.compared(name, value, held, machine)]
        return _first([*found, Certificate("shown", len(self.ranks), self._nodes(), len(expected))])

    def _nodes(self) -> int:
        return sum(len(each.graph.nodes) for each in self.ranks[0][0].programs.values())


def _no_sums(bundle: Bundle, call: str, coordinate: int, micro: MicroBatches, shares: Shares) -> dict[str, Tensor]:
    """Accumulators of a rank that are empty, and memory for rows, without a value."""
    found, all_rows = dict[str, Tensor](), set(micro.whole)
    for role in dict.fromkeys(bundle.order(call, coordinate)):
        program = bundle.programs[role]
        for declared, node in zip(program.inputs, program.placeholders, strict=True):
            if declared.role.is_sum:
                assert declared.dtype is not None, "an accumulator is a tensor"
                is_rows = declared.name in all_rows
                held = torch.full(node.meta["val"].shape, symbols.UNWRITTEN if is_rows else 0, dtype=torch.int64)
                mark: Any = symbols.mark_of(declared.dtype) | (0 if is_rows else shares.summed)
                found.setdefault(declared.name, symbols.elements(held, mark))
    return found | {part: found[rows] for rows, part in micro.whole.items() if rows in found}


def _as_held(inputs: Iterable[Input], expected: dict[str, Any]) -> dict[str, Any]:
    """Values that ranks have to hold of those that a step leaves: of parameters with master copies, what is sent."""
    held = dict(expected)
    for master in (declared for declared in inputs if declared.role is Role.MASTER and declared.of in expected):
        assert master.of is not None and master.wire is not None and master.dtype is not None
        held[master.name] = exact = expected[master.of]
        held[master.of] = symbols.with_dtype(symbols.with_dtype(exact, master.wire), master.dtype)
    return held


def _first(found: Sequence[Certificate]) -> Certificate:
    """The first of those that are wrong, if any is; else the first."""
    return min(found, key=lambda each: each.outcome != "wrong")


def _placements(program: Program) -> dict[str, Placements]:
    """The placements that a program declares of inputs, of parts of flat ones, and of outputs."""
    inputs = [*program.inputs, *(part.input for flat in program.inputs for part in flat.parts)]
    placed = {each.name: each.placement for each in inputs}
    return placed | {each.name: each.placement for each in program.outputs}


def _returned(program: Program) -> list[tuple[OutputKind, str]]:
    return [(each.kind, each.name) for each in program.outputs if each.kind is not OutputKind.UPDATE]
