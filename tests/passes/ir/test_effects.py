"""Which nodes are pure, which draw, and which write to what."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes.ir.collectives import WAIT, c10d
from passes.ir.effects import is_profiling, is_pure, is_random, mutates, written
from passes.runtime.random import draw

aten = torch.ops.aten


def node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that calls ``target``; each string "x..." among the arguments is an input of that name."""
    graph = fx.Graph()
    inputs = {each: graph.placeholder(each) for each in args if isinstance(each, str) and each.startswith("x")}
    given = tuple(inputs.get(each, each) if isinstance(each, str) else each for each in args)
    return graph.call_function(target, given, kwargs)


def test_functions_of_their_arguments_are_pure() -> None:
    pure = (aten.add.Tensor, aten.view.default, operator.add, max, torch.sym_max)
    assert all(is_pure(node(target, "x")) for target in pure)


def test_collectives_and_waits_are_pure() -> None:
    assert is_pure(node(c10d.all_reduce.default, "x", "sum", "0")) and is_pure(node(WAIT, "x"))


def test_what_draws_writes_asserts_or_is_not_known_is_not_pure() -> None:
    impure = (aten.rand.default, aten.add_.Tensor, aten._assert_async.default, torch.add, print)
    assert not [target for target in impure if is_pure(node(target, "x"))]


def test_a_draw_with_a_seed_is_pure_and_not_random() -> None:
    drawn = node(draw, aten.rand.default, 0, 0, (), [2])
    assert is_pure(drawn) and not is_random(drawn) and not mutates(drawn)
    assert is_random(node(aten.rand.default, [2]))
    assert mutates(node(draw, aten.bernoulli_.float, 0, 0, (), "x"))


def test_methods_write_if_their_names_say_so() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert mutates(graph.call_method("add_", (x, 1)))
    assert not mutates(graph.call_method("add", (x, 1)))
    assert not mutates(graph.call_method("__add__", (x, 1)))
    assert not is_pure(graph.call_method("add", (x, 1))), "it may do anything else"


def test_a_batch_norm_writes_statistics_in_training() -> None:
    norm = aten.native_batch_norm.default
    assert mutates(node(norm, "x", None, None, "xmean", "xvar", True, 0.1, 1e-5))
    assert not mutates(node(norm, "x", None, None, "xmean", "xvar", False, 0.1, 1e-5))
    assert not mutates(node(norm, "x", None, None, None, None, True, 0.1, 1e-5))


def test_the_arguments_that_are_written_to() -> None:
    assert [each.name for each in written(node(aten.add_.Tensor, "x", "xother"))] == ["x"]
    assert written(node(aten.add.Tensor, "x", "xother")) == written(node(operator.add, "x", 1)) == []
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert written(graph.call_function(aten._foreach_mul_.Scalar, ([a, b], 2.0))) == [a, b]
    assert written(graph.call_function(aten.mm.out, (a, a), {"out": b})) == [b]


def test_profiler_ranges() -> None:
    assert is_profiling(node(torch.ops.profiler._record_function_enter_new.default, "step"))
    assert not is_profiling(node(aten.add.Tensor, "x", 1))
