"""The interpreter, and the inference of shapes for nodes that somebody added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from passes import PassError, fill_vals, interpret

from ..programs import f64, make_program

aten = torch.ops.aten


def test_it_runs_the_graph() -> None:
    program = make_program(lambda x, s: (aten.mul.Tensor(x, s), None, s), x=f64(2), s=0.5)
    x = torch.ones(2, dtype=torch.float64)
    result, nothing, scale = interpret(program, x, 3.0)
    assert torch.equal(result, 3 * x) and nothing is None and scale == 3.0


def test_it_says_how_many_inputs_it_takes() -> None:
    program = make_program(lambda x: (x,), x=f64(2))
    with pytest.raises(TypeError, match="program takes 1 inputs, got 2"):
        interpret(program, 1, 2)


def test_vals_of_functions_methods_modules_and_constants_are_inferred() -> None:
    program = make_program(lambda x: (aten.neg.default(x),), x=f64(3, 4))
    program.graph_module.add_submodule("linear", nn.Linear(4, 2).double())
    program.graph_module.register_buffer("offset", torch.ones(2, dtype=torch.float64))
    graph = program.graph
    with graph.inserting_before(program.output_node):
        x = graph.call_function(torch.add, (program.placeholders[0], 1))
        x = graph.call_module("linear", (x,))
        x = graph.call_function(torch.mul, (x, graph.get_attr("offset")))
        x = graph.call_method("sum", (x, 0))
    program.set_outputs([x], program.outputs)
    assert fill_vals(program) == 5
    assert x.meta["val"].shape == (2,) and x.meta["val"].dtype is torch.float64
    assert fill_vals(program) == 0


def test_arguments_that_do_not_fit_raise() -> None:
    program = make_program(lambda x: (x,), x=f64(3, 4))
    with program.graph.inserting_before(program.output_node):
        program.graph.call_function(aten.mm.default, (program.placeholders[0], program.placeholders[0]))
    with pytest.raises(PassError, match=r"mm_default = aten\.mm\.default.*does not fit"):
        fill_vals(program)


def test_a_shape_that_cannot_be_inferred_raises() -> None:
    def step(x: Any) -> Any:
        return (aten.neg.default(x),)

    program = make_program(step, x=f64(3))
    del program.placeholders[0].meta["val"]
    del program.graph.find_nodes(op="call_function", target=aten.neg.default)[0].meta["val"]
    with pytest.raises(PassError, match="neg reads x, whose shape is not known"):
        fill_vals(program)
