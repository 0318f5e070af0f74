"""A program to partition, as solvers see it: its options, and the cost of each assignment, with nothing emitted."""

from __future__ import annotations

from dataclasses import dataclass

from passes import Program

from .assignment import Assignment
from .calls import Calls
from .context import Context
from .greedy import Greedy
from .plan import Plan
from .tally import Cost, Tally
from .walk import Assigned, Walk


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
