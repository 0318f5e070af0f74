"""Sums over ranks that the first run of a call reduces for all runs, such as a count of labels of the whole batch."""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from ..analysis.reachability import reached
from ..ir.collectives import Collective, Kind, waits_of
from ..ir.effects import is_random
from ..ir.program import Program
from .keep_over_runs import Known, keys_of


def reduced_for_all(program: Program, known: Known, varying: Container[str]) -> dict[int, list[fx.Node]]:
    """The results of all_reduces that are the same in all runs, and read for more than others of them, by key.

    ``varying``: the inputs of which each run may find another value. No result is larger than what was reduced.
    """
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
