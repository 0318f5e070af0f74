"""Partition: from the global program to one rank's share, with collectives.

One walk over the global graph. Each global value has nodes of this rank's graph that hold it, by placement. For each op
the walk chooses the combination of placements that costs least, and materializes the operands in them. What keeps a
data-parallel step local is given, not searched for: the parameters to gather and when, hints for the placements of
results, the node that is a gradient's complete value. None of that can change a value, only its cost: rules and
redistributions alone decide what is right.

Three steps: a solver enumerates the options of each op and chooses, the choices are an ``Assignment``, and emitting
writes what it says. The greedy solver is the one of all modes; a plan may hand over an assignment or another solver.

The files, in the order in which an op comes to them:

- ``plan.py``, ``context.py``: the decisions of the mode; all that program and plan say before the walk
- ``prepare/``: rewrites of the global program to ops that have rules, before anything is decided
- ``calls.py``, ``options.py``, ``narrow.py``: *enumerate*: the calls of the program; the options of a call, axis by
  axis; a call as the next axis sees it
- ``assignment.py``: *assign*: the choice for each node, its text and hash
- ``solvers/``: what a solver implements, the question to it, with the cost of an answer; the solver of all modes
- ``check_given.py``: the errors of an assignment that is handed over
- ``cheapest_option.py``, ``option_costs.py``, ``lookahead.py``: the option that costs least; the cost of an option in
  the op itself, and in the ops that follow
- ``hints.py``, ``moves.py``, ``parameters.py``: the placement that a result should have, where that is known; moves
  before and after an op; the nodes that are parameters
- ``walk.py``: the order of everything: inputs, ops, outputs, as they are assigned
- ``values.py``, ``materialize.py``, ``local_op.py``: global values and what holds them; values in the placements that
  an op reads; the op on this rank's parts
- ``redistribution_steps.py``, ``tally.py``: the steps from one placement to another and their costs; those of an
  assignment, counted
- ``partition_program.py``, ``emit_op.py``, ``emit.py``: *emit*: this rank's program, op by op, node by node
- ``redistribute.py``, ``reasons.py``: the nodes of a step; its purpose, as reports and dumps state it
- ``operand_layouts.py``: operands that kernels read in one layout, and that are copied if they lie otherwise
- ``offload.py``: state in host memory, with copies between host and device
- ``diagnostics.py``: notes for users about all that
"""

from .partition_program import partition

__all__ = ["partition"]
