"""Emit: one rank's share of the global program, as the solver assigns node after node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes import Input, Output, Program
from passes.ir.effects import is_pure
from passes.runtime.rooms import within

from .._torch import LazyGraphModule
from ..interpreter.interrupts import interruptible
from .assignment import Assignment
from .diagnostics import Diagnostics
from .emit_op import OpEmitter
from .offload import offload
from .plan import Plan
from .prepare import prepared
from .solvers.greedy import Greedy
from .solvers.problem import Problem
from .values import Value
from .walk import Assigned, Walk


@interruptible
def partition(program: Program, plan: Plan, assignment: Assignment | None = None) -> Program:
    """One rank's share of ``program`` under ``plan``; ``program`` is left as it is.

    ``assignment``: how nodes are computed, all of them or some, instead of ``plan.assignment``; ``plan.solver`` decides
    the others. The whole assignment is the result's ``assignment``. Raises ``PartitionError`` if one does not fit the
    program, or if an op's local result has another shape than its placement says.
    """
    problem = Problem.of(prepared(program), plan)
    return emit(problem, problem.given(assignment))


def emit(problem: Problem, given: Assignment) -> Program:
    """The program of an assignment, which the greedy solver checks and completes on the way."""
    context, program = problem.context, problem.program
    emitter, diagnostics = OpEmitter(program), Diagnostics(context)
    greedy = Greedy(problem, given, emitter, diagnostics)
    emitted = _written(problem, emitter, *greedy.run())
    _note_captured(program.graph, greedy.walk)
    diagnostics.rounded(emitter.graph)
    diagnostics.masters()
    emitted = replace(emitted, notes=[*program.notes, *diagnostics.all()], assignment=greedy.assignment)
    offload(emitted, context.plan)
    return emitted


def emit_again(problem: Problem, assignment: Assignment) -> Program:
    """Emit again, for another rank whose parts have the same lengths: nothing is checked."""
    emitter = OpEmitter(problem.program)
    emitted = _written(problem, emitter, *Walk(problem, emitter).run(Assigned(problem, assignment)))
    offload(emitted, problem.plan)
    return emitted


def _written(
    problem: Problem, emitter: OpEmitter, inputs: Sequence[Input], returned: Sequence[Any], outputs: list[Output]
) -> Program:
    """The program of what was emitted."""
    context, program = problem.context, problem.program
    emitter.graph.output(tuple(returned))
    _erase_unused(emitter.graph)
    return replace(
        program,
        graph_module=LazyGraphModule(torch.nn.Module(), emitter.graph),
        inputs=[*inputs, *emitter.seed_input()],
        outputs=outputs,
        history=list(program.history),
        units=context.units,
        reshard=context.plan.reshard,
        kept_by=context.plan.kept_by,
        prefetch=context.plan.prefetch,
        limit_gathers=context.plan.limit_gathers,
        room=program.room if emitter.graph.find_nodes(op="call_function", target=within) else None,
    )


def _note_captured(captured: fx.Graph, walk: Walk) -> None:
    """Note, in each node that holds a global value, the captured node that computes it."""
    for node in captured.nodes:
        value = walk.values.get(node)
        for holder in value.nodes.values() if isinstance(value, Value) else ():
            holder.meta.setdefault("captured", node.name)


def _erase_unused(graph: fx.Graph) -> None:
    """Drop nodes that were emitted only for a whole value that no node reads in the end."""
    for node in reversed(graph.nodes):
        if not node.users and node.op == "call_function" and is_pure(node):
            graph.erase_node(node)
