"""Reduce what all runs of a call have in common in the first one, such as the count of labels of the whole batch."""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from ..analysis.reachability import reached
from ..ir.collectives import Collective, Kind, waits_of
from ..ir.effects import is_random
from ..ir.program import Program
from ..ir.roles import Role
from .keep_over_runs import Known, keep_over_runs, keys_of


def reduce_once(program: Program) -> None:
    """Leave the all_reduces of a split program whose operands no run changes to its first run.

    Results stay in memory as long as the call lasts: none is larger than what was reduced.
    """
    varying = {each.name for each in program.inputs if program.varies(each)}  # runs that are split off do not know it
    keep_over_runs(program, Role.REDUCED, lambda run, known: _reduced(run, known, varying))


def _reduced(program: Program, known: Known, varying: Container[str]) -> dict[int, list[fx.Node]]:
    """The results that are read for more than others of them, by key."""
    keys = keys_of(program, known, lambda each: each.name not in varying, lambda node: not is_random(node))
    waits = {wait for node in program.collectives() if node in keys and _reduces(node) for wait in waits_of(node)}
    needed = reached([program.output_node], lambda node: [] if node in waits else node.all_input_nodes)
    found = dict[int, list[fx.Node]]()
    for node in sorted(waits & needed.keys()):
        found.setdefault(keys[node], []).append(node)
    return found


def _reduces(node: fx.Node) -> bool:
    described = node.meta.get("collective")
    return isinstance(described, Collective) and described.kind is Kind.ALL_REDUCE
