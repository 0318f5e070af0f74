"""A program to partition, as solvers see it: its options, and the cost of each assignment, with nothing emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from passes import Program

from ..assignment import Assignment, Choice
from ..calls import Calls
from ..context import Context
from ..plan import Plan
from ..tally import Cost, Tally
from ..values import Value
from ..walk import Assigned, Walk
from .greedy import Greedy


@dataclass
class Problem(Calls):
    """A program and its plan, to be solved."""

    @classmethod
    def of(cls, program: Program, plan: Plan) -> Problem:
        """The problem of a program under a plan."""
        return cls(Context(program, plan))

    @property
    def program(self) -> Program:
        """The captured program: global shapes, and the nodes that an assignment names."""
        return self.context.program

    @property
    def plan(self) -> Plan:
        """The placements of its inputs, and more that is decided."""
        return self.context.plan

    def solve(self, given: Assignment | None = None) -> Assignment:
        """The whole assignment: ``given``, or the plan's; then what the plan's solver decides, and the greedy one."""
        return self.complete(self.given(given))

    def given(self, given: Assignment | None = None) -> Assignment:
        """The choices made before the greedy solver: ``given``, or the plan's, and what the plan's solver adds."""
        given = given or self.plan.assignment or Assignment(self.axes)
        return given if self.plan.solver is None else self.plan.solver.solve(self, given)

    def complete(self, given: Assignment) -> Assignment:
        """``given`` with choices of the greedy solver for the rest; a whole one is checked and looked up.

        Raises ``PartitionError``, with node, op and the user's line, if it does not fit the program.
        """
        return Greedy(self, given).solve()

    def cost(self, given: Assignment) -> Cost:
        """The seconds, collectives and bytes of an assignment, of which nothing is emitted; a partial one is completed.

        The estimate of seconds is that by which the greedy solver chooses. Raises ``PartitionError`` as ``complete``.
        """
        tally = Tally(self.context.mesh)
        _, returned, _ = Walk(self, tally).run(Assigned(self, self.complete(given)))
        return tally.cost(returned)

    def alternatives(self, given: Assignment) -> dict[str, list[tuple[Choice, float]]]:
        """All choices of each op, by name, on operands as ``given`` leaves them, with the seconds of each in the op.

        Raises ``PartitionError`` as ``complete``.
        """
        listing = _Listing(self, given)
        listing.solve()
        return listing.listed


class _Listing(Greedy):
    """Solves, and lists what there was to choose from."""

    def __init__(self, calls: Calls, given: Assignment) -> None:
        super().__init__(calls, given)
        self.listed = dict[str, list[tuple[Choice, float]]]()

    def computed(self, node: fx.Node, operands: Sequence[Value], given: Choice) -> Choice:
        """The solver's choice for a node, after a note of the alternatives."""
        call, hint = self.call(node, operands), self.hints.of(node)
        costs = self.chooser.costs(call, operands, hint, node.meta.get("phase"))
        combined = self.calls.options.of_all_axes(call, operands, hint)
        self.listed[self.calls.name(node)] = [
            (
                replace(Choice.of(options, len(operands)), first=None, then=None),
                sum(cost(option) for cost, option in zip(costs, options, strict=True)),
            )
            for options in combined
        ]
        return super().computed(node, operands, given)
