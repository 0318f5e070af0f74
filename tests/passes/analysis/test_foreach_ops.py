"""Ops over lists, entry by entry."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes import Program
from passes.analysis.foreach_ops import entries_by_op, entry_of, erase_results, write_lists_in_place

from ..programs import f64, make_program, targets

aten = torch.ops.aten


def scaled() -> Program:
    def step(x: Any, y: Any) -> Any:
        results = aten._foreach_mul.Scalar([x, y], 2.0)
        return operator.getitem(results, 0), operator.getitem(results, 1)

    return make_program(step, x=f64(2), y=f64(3))


def stepped() -> Program:
    def step(p: Any, g: Any, m: Any) -> Any:
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0}
        flags = {"nesterov": False, "maximize": False, "is_first_step": False}
        lists = aten._fused_sgd.default([p], [g], [m], **options, **flags)
        return operator.getitem(operator.getitem(lists, 0), 0), operator.getitem(operator.getitem(lists, 2), 0)

    return make_program(step, p=f64(2), g=f64(2), m=f64(2))


def named(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def test_an_entry_of_one_list() -> None:
    program = scaled()
    first, second = program.output_values()
    entry = entry_of(second)
    assert entry is not None and entry.op is first.args[0]
    assert (entry.argument, entry.index, entry.source) == (0, 1, program.placeholders[1])


def test_an_entry_of_one_of_several_lists() -> None:
    program = stepped()
    p, _, momentum = program.placeholders
    entries = [entry_of(value) for value in program.output_values()]
    assert [entry and (entry.argument, entry.index, entry.source) for entry in entries] == [(0, 0, p), (2, 0, momentum)]


def test_other_nodes_are_no_entries() -> None:
    program = make_program(lambda x: (aten.split.Tensor(x, 1)[0], aten.neg.default(x)), x=f64(2))
    assert [entry_of(node) for node in program.graph.nodes] == [None] * len(program.graph.nodes)


def test_entries_by_op_are_in_graph_order() -> None:
    program = scaled()
    ((op, entries),) = entries_by_op(program.graph).items()
    assert op.target is aten._foreach_mul.Scalar
    assert [(node, entry.index) for node, entry in entries] == list(zip(program.output_values(), (0, 1), strict=True))


def test_what_may_not_be_overwritten_is_cloned() -> None:
    program = scaled()
    x, _ = program.placeholders
    first, second = program.output_values()
    became = write_lists_in_place(program.graph, {first})
    assert became[first] is x
    assert became[second].target is aten.clone.default
    assert targets(program) == ["clone.default", "_foreach_mul_.Scalar"]


def test_an_op_that_may_overwrite_nothing_stays() -> None:
    program = scaled()
    assert write_lists_in_place(program.graph, ()) == {}
    assert targets(program)[0] == "_foreach_mul.Scalar"


def test_a_fused_kernel_clones_what_it_writes_and_no_gradients() -> None:
    """Its functional form would clone everything."""
    program = stepped()
    write_lists_in_place(program.graph, {program.output_values()[0]})
    assert targets(program) == ["clone.default", "_fused_sgd_.default"]
    (clone,) = program.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert clone.args[0] is program.placeholders[2], "the momentum, which may not be overwritten"


def test_results_that_nobody_reads_are_erased() -> None:
    program = stepped()
    program.set_outputs([], [])
    (op,) = program.graph.find_nodes(op="call_function", target=aten._fused_sgd.default)
    erase_results(op)
    assert targets(program) == ["_fused_sgd.default"]


def test_the_graph_after_an_edit_is_sound() -> None:
    program = stepped()
    write_lists_in_place(program.graph, set(program.output_values()))
    program.graph.lint()
    assert targets(program) == ["_fused_sgd_.default"]
