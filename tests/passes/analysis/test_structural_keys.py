"""Keys say what a node computes and for whom, in whatever order nodes stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes.analysis.structural_keys import structural_keys

from ..programs import f64, make_program

aten = torch.ops.aten


def keys_of(step: Callable[..., tuple[Any, ...]], outputs: tuple[str, ...] = ("first", "second")) -> list[str]:
    """The keys of all nodes of a step on ``x`` and ``y``, in the order of the graph."""
    program = make_program(step, x=f64(2), y=f64(2))
    names = {node: node.name for node in program.placeholders}
    return list(structural_keys(program.graph, names, outputs).values())


def plain(x: Any, y: Any) -> Any:
    a, b = aten.exp.default(x), aten.exp.default(y)
    return aten.mul.Tensor(a, b), aten.sin.default(b)


def test_another_order_of_nodes_and_operands_has_the_same_keys() -> None:
    def other(x: Any, y: Any) -> Any:
        b = aten.exp.default(y)
        second = aten.sin.default(b)
        return aten.mul.Tensor(b, aten.exp.default(x)), second

    assert keys_of(plain) != keys_of(other) and sorted(keys_of(plain)) == sorted(keys_of(other))


def test_another_op_argument_or_output_has_other_keys() -> None:
    def other_operand(x: Any, y: Any) -> Any:
        a, b = aten.exp.default(x), aten.exp.default(y)
        return aten.mul.Tensor(a, b), aten.sin.default(a)

    def typed(value: Any) -> Callable[..., Any]:
        return lambda x, y: (aten.mul.Tensor(x, value), y)

    assert sorted(keys_of(plain)) != sorted(keys_of(other_operand))
    assert sorted(keys_of(plain)) != sorted(keys_of(plain, ("second", "first")))
    assert len({tuple(sorted(keys_of(typed(value)))) for value in (1, 1.0, True)}) == 3


def test_nodes_that_compute_the_same_differ_by_their_readers() -> None:
    def twice(x: Any, y: Any) -> Any:
        return aten.sin.default(aten.exp.default(x)), aten.cos.default(aten.exp.default(x))

    def read_once(x: Any, y: Any) -> Any:
        return aten.exp.default(x), aten.exp.default(x)

    assert len(set(keys_of(twice))) == len(keys_of(twice))
    assert len(set(keys_of(read_once, ("same", "same")))) == len(keys_of(read_once)) - 1


def in_either_order(op: Any) -> tuple[list[str], list[str]]:
    """The sorted keys of a step that runs ``op`` on x, then on y, and of one that does so the other way round."""

    def forth(x: Any, y: Any) -> Any:
        a = op(x)
        return a, op(y)

    def back(x: Any, y: Any) -> Any:
        b = op(y)
        return op(x), b

    graphs = [fx.symbolic_trace(step).graph for step in (forth, back)]
    names = [{node: node.name for node in graph.find_nodes(op="placeholder")} for graph in graphs]
    first, second = (structural_keys(graph, names[k], ("a", "b")) for k, graph in enumerate(graphs))
    return sorted(first.values()), sorted(second.values())


def test_draws_may_change_places_and_writes_may_not() -> None:
    first, second = in_either_order(aten.rand_like.default)
    assert first == second
    first, second = in_either_order(aten.exp_.default)
    assert first != second
