"""The greedy solver: node after node, the option that costs least, with a look ahead at what follows.

It keeps what is given, checks it, and fills in the rest; so it also completes what other solvers leave open. Another
solver implements ``Solver`` (``solver.py``) over a ``Problem`` (``problem.py``), and is ``Plan.solver``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from passes import Input, Output, PartitionError, Phase
from passes.ir.program import Placements

from ...capture.constraint import CONSTRAIN, constrained_to
from ...rules import OpCall, decomposition_of
from ..assignment import Assignment, Choice, Move
from ..calls import Calls
from ..cheapest_option import Chooser
from ..check_given import (
    check_axes,
    check_constraint,
    check_moves,
    check_names,
    check_output,
    check_result_moves,
    check_sizes,
)
from ..diagnostics import Diagnostics
from ..emit_op import OpEmitter
from ..hints import Hints
from ..lookahead import Lookahead
from ..moves import Moves
from ..redistribution_steps import cost
from ..tally import Tally
from ..values import Value
from ..walk import Walk

_OPEN = Choice()  # nothing is given


class Greedy:
    """The decisions of the greedy solver, and the assignment that they make. ``given``: what is decided already.

    It counts what comes of them, or hands it to an ``emitter``.
    """

    def __init__(
        self,
        calls: Calls,
        given: Assignment,
        emitter: OpEmitter | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        check_axes(calls, given)
        self.calls, self.context, self.given = calls, calls.context, given
        self.walk = Walk(calls, emitter or Tally(self.context.mesh), diagnostics)
        values, self.parameters = self.walk.values, self.walk.parameters
        self.chooser = Chooser(calls.options, self.context.model_axes, self.context.expert_axes)
        self.lookahead = Lookahead(self.context.mesh, calls.options, values, self.context.differentiated)
        self.hints = Hints(self.context, self.parameters, values)
        self.moves = Moves(self.context, self.parameters, self.hints, values)
        self.choices, self.outputs = dict[str, Choice](), dict[str, Placements]()

    def solve(self) -> Assignment:
        """The whole assignment. Raises ``PartitionError`` if what is given does not fit the program."""
        self.run()
        return self.assignment

    def run(self) -> tuple[list[Input], list[Any], list[Output]]:
        """Decide everything; returns what the walk does. Raises as ``solve``."""
        walked = self.walk.run(self)
        check_names(self.calls, self.given, self.choices, self.outputs)
        return walked

    @property
    def assignment(self) -> Assignment:
        """The choices so far, as an assignment."""
        return Assignment(self.calls.axes, self.choices, self.outputs)

    def first(self, node: fx.Node, operands: Sequence[Value]) -> Iterable[Move]:
        """The moves that are given, or those of gradients and parameters, then of rows that are cut."""
        given = self._given(node)
        if given is _OPEN:
            return self._first(node, operands)
        check_sizes(self.calls, node, given, operands)
        if given.first is None:
            return self._first(node, operands)
        check_moves(self.calls, node, given.first, self.parameters, self.walk.values)
        return given.first

    def _first(self, node: fx.Node, operands: Sequence[Value]) -> Iterator[Move]:
        yield from self.moves.of_operands(node)
        if operands:
            yield from self.moves.of_cut_rows(node, self.call(node, operands), operands)

    def choice(self, node: fx.Node, operands: Sequence[Value]) -> Choice:
        """The choice that is given, or the one of the least cost."""
        given, first = self._given(node), tuple(self.walk.materializer.moves[node])
        if node.target is CONSTRAIN:
            choice = self._constrained(node, operands[0], given)
        elif self._is_decomposed(node, operands, given):
            choice = Choice((), (), (), (), (), decomposed=True)
        else:
            choice = self.computed(node, operands, given)
        choice = self.choices[self.calls.name(node)] = replace(choice, first=first) if first else choice
        return choice

    def then(self, node: fx.Node, value: Any) -> Iterator[Move]:
        """The moves of results that are given, or those of rows, gradients, sums and updated parameters."""
        self.hints.note_origin(node)
        given, made = self._given(node).then, list[Move]()
        if given:
            check_result_moves(self.calls, node, given, value, self.walk.materializer.moves.get(node, ()))
        for move in self.moves.of_results(node, value) if given is None else given:
            made.append(move)
            yield move
        if made:
            name = self.calls.name(node)
            choice = self.choices.get(name, Choice((), (), (), (), (), decomposed=False))
            self.choices[name] = replace(choice, then=tuple(made))

    def output(self, output: Output, value: Value) -> Placements:
        """The placement of an output; of a result, it may be given."""
        key = f"{output.kind} {output.name}"
        placement = self.hints.of_output(value, output)
        if key in self.given.outputs and self.given.outputs[key] != placement:
            placement = check_output(self.calls, key, self.given.outputs[key], placement)
        self.outputs[key] = placement
        return placement

    # One choice

    def _given(self, node: fx.Node) -> Choice:
        choices = self.given.choices
        return choices.get(self.calls.name(node), _OPEN) if choices else _OPEN

    def call(self, node: fx.Node, operands: Sequence[Value]) -> OpCall:
        """The call of a node on global shapes."""
        return self.calls.call(node, operands, self.walk.values)

    def _constrained(self, node: fx.Node, value: Value, given: Choice) -> Choice:
        goal = (given.gives and given.gives[0]) or value.primary
        placement = constrained_to(node, goal, self.context.mesh)
        check_constraint(self.calls, node, given, placement)
        return Choice((placement,), (placement,), (), (), (), decomposed=False)

    def computed(self, node: fx.Node, operands: Sequence[Value], given: Choice) -> Choice:
        """The op, by the options that cost least."""
        call, phase = self.call(node, operands), node.meta.get("phase")
        later = partial(self.lookahead.of, node, operands) if phase in (Phase.FORWARD, Phase.BACKWARD) else None
        hint, required = self.hints.of(node), self.hints.required(node)
        fixed = given if (given.reads, given.gives, given.by) != (None, None, None) else None
        try:
            choice = self.chooser.cheapest(call, operands, hint, phase, required, later, fixed)
        except PartitionError as error:
            raise PartitionError(f"{self.calls.describe(node)} cannot be computed as assigned: {error}") from None
        self.hints.note_draw(node, choice.options)
        self._check_experts_stay(node, operands, choice)
        return choice

    def _check_experts_stay(self, node: fx.Node, operands: Sequence[Value], choice: Choice) -> None:
        """Raise ``PartitionError`` for an op that would read the weights of experts of other ranks."""
        if node.meta.get("phase") not in (Phase.FORWARD, Phase.BACKWARD):
            return
        for value, reads in zip(operands, choice.reads or (), strict=True):
            split = [k for k in self.context.expert_axes if isinstance(value.primary[k], Shard)]
            moved = [k for k in split if value.is_weight and reads[k] != value.primary[k]]
            if moved:
                raise PartitionError(
                    f"{self.calls.describe(node)} reads the weights of all experts, {list(value.shape)}, of which each "
                    f"rank along {self.calls.axes[moved[0]]} has a part: compute experts by "
                    "torch.nn.functional.grouped_mm, by bmm or einsum over their dim, or look them up by number, as "
                    "docs/experts.md lists, or leave these weights out with experts="
                )

    def _is_decomposed(self, node: fx.Node, operands: Sequence[Value], given: Choice) -> bool:
        """Whether the ops of a decomposition are computed instead, where there is one."""
        decomposition = decomposition_of(self.call(node, operands))
        if decomposition is None:
            if given.decomposed:
                raise PartitionError(f"{self.calls.describe(node)} is assigned decomposed, but has no decomposition")
            return False
        return self._decomposing_saves(decomposition[0], operands[0]) if given.decomposed is None else given.decomposed

    def _decomposing_saves(self, dim: int, value: Value) -> bool:
        """Whether to reduce two numbers a row costs less than to gather the rows."""
        saved = 0.0
        for k, axis in enumerate(self.context.mesh.axes):
            if value.primary[k] == Shard(dim):
                nbytes = value.bytes_before(value.primary, k, self.context.mesh)
                saved += cost(Shard(dim), Replicate(), nbytes, axis)
                saved -= 2 * cost(Partial(), Replicate(), nbytes / value.shape[dim], axis)
        return saved > 0
