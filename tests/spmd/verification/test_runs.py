"""What a watch sees of programs that run several times: the values of one node in all runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Shard

from passes import Program
from passes.ir.program import MicroBatches
from spmd.verification.runs import run_programs
from tests.passes.programs import f64, make_program

aten = torch.ops.aten


def waves(x: Any) -> tuple[Any, ...]:
    return aten.sin.default(x), aten.cos.default(x), aten.exp.default(x)


def named(names: dict[str, str], rows: int) -> Program:
    """The program with other names of nodes, each of which knows the captured one."""
    program = make_program(waves, x=f64(rows))
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta |= {"captured": node.name, "in_time": Shard(0)}
            node.name = names.get(node.name, node.name)
    return program


def test_nodes_of_one_name_that_compute_other_values_are_not_joined() -> None:
    """A pass may name what it inserts otherwise in a program of other sizes, as that of a shorter last part."""
    others = named({"sin": "first", "cos": "second"}, 3)
    last = named({"cos": "first", "sin": "second"}, 2)
    micro = MicroBatches(2, {"x": 0}, joined={each.name: 0 for each in last.outputs}, accumulating=others)
    seen, x = dict[str, Any](), torch.arange(5, dtype=torch.float64)

    def watch(nodes: Any, values: Any) -> None:
        if "captured" in nodes[0].meta:
            seen[nodes[0].meta["captured"]] = values[0]

    (returned,) = run_programs([replace(last, micro_batches=micro)], [[x]], watch)
    assert torch.equal(returned[0], x.sin())
    assert list(seen) == ["exp"] and torch.equal(seen["exp"], x.exp())
