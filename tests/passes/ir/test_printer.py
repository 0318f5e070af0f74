"""The printed text is runnable Python with the meaning of the program."""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from passes import Axis, Mesh, Phase, Program, Role, interpret, print_program
from passes.runtime.random import draw

from ..programs import GROUP, all_reduce, f64, make_program

aten = torch.ops.aten


def execute(program: Program, *inputs: Any, **keywords: Any) -> tuple[Any, ...]:
    """Run the printed text."""
    scope: dict[str, Any] = {}
    exec(compile(print_program(program), "program.py", "exec"), scope)
    groups = {axis.name: axis.group for axis in program.mesh.axes}
    returned: tuple[Any, ...] = scope["program"](*inputs, **groups, **keywords)
    return returned


def assert_text_runs(program: Program, *inputs: Any, **keywords: Any) -> None:
    for one, other in zip(interpret(program, *inputs), execute(program, *inputs, **keywords), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other or one != one


def test_values_of_all_kinds_can_be_written() -> None:
    def step(x: Any, lr: Any) -> Any:
        parts = aten.split_with_sizes.default(x, [1, 2])
        tail = aten.slice.Tensor(parts[1], 0, 0, sys.maxsize)
        ones = aten.new_full.default(x, [2, 4], -math.inf, dtype=torch.float64, device=torch.device("cpu"))
        scaled = aten.mul.Tensor(aten.maximum.default(tail, ones), operator.mul(lr, 2.0))
        copied = aten._to_copy.default(scaled, dtype=torch.float32, memory_format=torch.preserve_format)
        picked = aten.index.Tensor(x, [None, aten.argsort.default(aten.select.int(x, 0, 0))])
        values = aten.max.dim(copied, 1)
        return values[0], values[1], picked, aten.nan_to_num.default(x, math.nan, math.inf), math.sqrt(4.0), None, 3

    program = make_program(step, x=f64(3, 4), lr=0.5)
    assert_text_runs(program, torch.randn(3, 4, dtype=torch.float64), 0.25)


def test_python_functions_methods_and_slices() -> None:
    def step(x: Any) -> Any:
        y = torch.add(x, nn.functional.gelu(x))
        y = torch.nn.functional.layer_norm(y, [4]).clamp(min=0.5)
        return y[0:2, ..., None], y[:, 1], operator.neg(y), y.reshape((-1,)), abs(y), torch.linalg.norm(y)

    program = make_program(step, x=f64(3, 4))
    assert_text_runs(program, torch.randn(3, 4, dtype=torch.float64))


def test_functions_of_this_package_are_imported_by_name() -> None:
    def step(x: Any, seed: Any) -> Any:
        return (aten.add.Tensor(x, 1), aten.neg.default(x))

    program = make_program(step, x=f64(3), seed=7)
    seed = program.placeholders[1]
    with program.graph.inserting_before(program.output_node):
        drawn = program.graph.call_function(draw, (torch.ops.prims.normal.default, seed, 0, ((0, 3),), [3]))
        drawn.kwargs = {
            "mean": 0.0,
            "std": 1.0,
            "dtype": torch.float64,
            "device": torch.device("cpu"),
            "requires_grad": False,
        }
    program.set_outputs([drawn], program.outputs[:1])
    assert "import passes.runtime.random" in print_program(program)
    assert_text_runs(program, torch.zeros(3, dtype=torch.float64), 7)


def test_constants_and_modules_are_taken_from_the_graph_module() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)).double()
            self.offset = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            return (self.layers(x) + self.offset * self.layers[1].bias,)

    program = Program.from_graph(torch.fx.symbolic_trace(Block()))
    with torch.no_grad():
        x = torch.randn(5, 4, dtype=torch.float64)
        assert_text_runs(program, x, module=program.graph_module)


def test_names_that_the_text_needs_are_not_hidden() -> None:
    def step(torch: Any, dp: Any, aten: Any) -> Any:
        return (operator.add(operator.add(torch, dp), aten),)

    program = make_program(step, torch=f64(2), dp=f64(2), aten=f64(2))
    program.graph.find_nodes(op="call_function", target=operator.add)[0].target = torch.ops.aten.add.Tensor
    x = torch.randn(2, dtype=torch.float64)
    assert_text_runs(program, x, x, x)


def test_collectives_name_the_mesh_axis(golden: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        return (aten.add.Tensor(w, all_reduce(aten.mm.default(aten.t.default(x), x))),)

    program = make_program(step, {0: "w"}, [Role.GRADIENT], w=f64(3, 3), x=f64(5, 3))
    from torch.distributed.tensor import Shard

    program.inputs = [
        replace(program.inputs[0], role=Role.PARAMETER, name="model.up.weight", placement=(Shard(0),), shape=(6, 3)),
        replace(program.inputs[1], role=Role.BATCH),
    ]
    program.outputs = [replace(program.outputs[0], name="model.up.weight")]
    program.name, program.history = "train_step", ["00 capture: 5 nodes", "01 partition: 1 collective"]
    for node in program.graph.nodes:
        late = node.name == "add"
        node.meta["phase"] = Phase.UPDATE if late else Phase.BACKWARD
        node.meta["module"] = "model.up" if node.name == "mm" else "model"
        node.meta["source"] = "train.py:14: optimizer.step()" if late else "train.py:12: loss.backward()"
    text = print_program(program)
    golden(text)
    assert "c10d.all_reduce.default(mm, 'sum', dp)" in text


def test_an_axis_whose_name_is_no_identifier() -> None:
    program = make_program(lambda x: (all_reduce(x),), roles=[Role.RESULT], x=f64(2))
    program.mesh = Mesh((Axis("data parallel", 2, GROUP),))
    assert "    data_parallel: str," in print_program(program)


def test_a_program_without_inputs_or_outputs() -> None:
    program = make_program(lambda: ())
    assert execute(program) == ()
