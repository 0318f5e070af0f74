"""How many bytes a collective moves, as all ranks know it."""

from __future__ import annotations

from typing import Any

from passes import Program
from passes.analysis.agreed_sizes import most_bytes, of_all

from ..programs import all_gather, all_reduce, f64, make_program, reduce_scatter


def program() -> Program:
    def step(x: Any, y: Any) -> Any:
        return all_gather(x), reduce_scatter(y), all_reduce(x)

    return make_program(step, x=f64(3), y=f64(8))


def test_the_larger_of_operand_and_result_counts() -> None:
    assert [most_bytes(node) for node in program().collectives()] == [8 * 6, 8 * 8, 8 * 3]


def test_what_the_partitioner_says_is_more_than_this_rank_has() -> None:
    gather = program().collectives()[0]
    gather.meta["most_bytes"] = 80
    assert most_bytes(gather) == 80


def test_one_collective_for_several_moves_their_sum() -> None:
    nodes = program().collectives()
    for node, size in zip(nodes, (80, 64, 24), strict=True):
        node.meta["most_bytes"] = size
    assert of_all(nodes) == {"most_bytes": 168}


def test_the_size_of_several_is_unknown_if_one_is() -> None:
    nodes = program().collectives()
    nodes[0].meta["most_bytes"] = 80
    assert of_all(nodes) == {}
