"""Reshard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from passes import MergeEqual, Phase, Program, Reshard, Role, run

from ..programs import all_gather, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def step(w: Any, v: Any, x: Any) -> Any:
    """Two layers forward, and back through both; the second one's bias is read in forward alone."""
    gathered = all_gather(w)
    h = aten.mm.default(x, aten.t.default(gathered))
    y = aten.add.Tensor(h, all_gather(v))
    return y, aten.mm.default(y, gathered)


def program_of(*reshard: str) -> Program:
    """The program with its last product in backward."""
    program = make_program(step, {}, [Role.PARAMETER], w=f64(2, 4), v=f64(2), x=f64(3, 4))
    for node in program.graph.find_nodes(op="call_function", target=aten.mm.default):
        node.meta["phase"] = Phase.FORWARD
    node.meta["phase"] = Phase.BACKWARD
    for gather, name in zip(program.collectives(), ("w", "v"), strict=True):
        gather.meta["collective"] = replace(gather.meta["collective"], of=(name,), why="parameter: gathered before use")
    program.reshard = frozenset(reshard)
    return program


def test_reshard(golden: Any) -> None:
    program = program_of("w", "v")
    after, text = before_and_after(program, Reshard())
    golden(text)
    assert_same_bits(program, after)
    assert [node.meta["collective"].ahead for node in after.collectives()] == [1, 1, 1]


def test_what_is_repeated_is_not_merged_back() -> None:
    assert len(run(run(program_of("w"), [Reshard()]), [MergeEqual()]).collectives()) == 3


def test_parameters_that_stay_whole_are_left_alone() -> None:
    assert run(program_of(), [Reshard()]).history == ["02 Reshard: nothing to do"]


def test_a_gather_that_nothing_reads_is_left_alone() -> None:
    program = program_of("w", "v")
    for node in program.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
    assert len(run(program, [Reshard()]).collectives()) == 3  # that of v, and two of w
