"""What a program does once, when it is bound to state, and what at every call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import passes
from passes import Program, Role
from passes.runtime.rooms import within
from spmd.lowering.bindings import direct
from spmd.lowering.codegen import Bound
from tests.passes.programs import f64, make_program

aten = torch.ops.aten


def program_of(function: Callable[..., Any], **inputs: Any) -> Program:
    """Inputs whose names begin with p are parameters, the others come with each call."""
    program = make_program(function, **inputs)
    program.inputs = [replace(i, role=Role.PARAMETER if i.name[0] == "p" else Role.BATCH) for i in program.inputs]
    return program


def count_views(run: Callable[[], Any]) -> int:
    """How many transposes a call makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run()
    return sum(event.count for event in seen.key_averages() if event.key == "aten::t")


def product(p: Any, x: Any) -> Any:
    return (aten.mm.default(x, aten.t.default(p)),)


def test_views_of_state_are_made_once() -> None:
    bound, p, x = Bound(program_of(product, p=f64(3, 2), x=f64(4, 2))), torch.rand(3, 2), torch.rand(4, 2)
    assert count_views(lambda: bound(p, x)) == 1
    assert count_views(lambda: bound(p, x)) == 0
    p.mul_(2)
    assert torch.equal(bound(p, x)[0], x @ p.t())


def test_views_of_state_can_be_looked_at() -> None:
    """As a debugger does with all tensors there are: autograd refuses a view whose base was written without it."""
    bound, p = Bound(program_of(product, p=f64(3, 2), x=f64(4, 2))), torch.nn.Parameter(torch.rand(3, 2))
    with torch.no_grad():
        bound(p, torch.rand(4, 2))
        p.mul_(2)
    views = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.data_ptr() == p.data_ptr()]
    assert views and all(each.is_leaf for each in views)


def test_views_of_arguments_are_made_at_each_call() -> None:
    bound = Bound(program_of(product, p=f64(3, 2), x=f64(4, 2)))
    for _ in range(3):
        p, x = torch.rand(3, 2), torch.rand(4, 2)
        assert torch.equal(bound(p, x)[0], x @ p.t())


def test_state_at_another_address_is_bound_anew() -> None:
    bound, p, x = Bound(program_of(product, p=f64(3, 2), x=f64(4, 2))), torch.rand(3, 2), torch.rand(4, 2)
    bound(p, x)
    p.data = torch.rand(3, 2)
    assert torch.equal(bound(p, x)[0], x @ p.t())
    assert torch.equal(bound(other := torch.rand(3, 2), x)[0], x @ other.t())


def test_results_written_in_place_are_bound_once() -> None:
    program = program_of(lambda p, g: (aten.sum.default(aten.t.default(aten.add.Tensor(p, g))),), p=f64(2), g=f64(2))
    (add,) = (node for node in program.graph.nodes if node.target is aten.add.Tensor)
    add.target = aten.add_.Tensor
    bound, p, g = Bound(program), torch.zeros(2), torch.ones(2)
    assert [bound(p, g)[0].item() for _ in range(3)] == [2, 4, 6]
    assert count_views(lambda: bound(p, g)) == 0


def test_a_returned_view_of_state_is_a_new_object() -> None:
    bound = Bound(program_of(lambda p, x: (aten.t.default(p), p), p=f64(3, 2), x=f64(2)))
    p, x = torch.rand(3, 2), torch.rand(2)
    (one, whole), (other, _) = bound(p, x), bound(p, x)
    one.t_()
    assert whole is p and other.shape == (2, 3) and bound(p, x)[0].shape == (2, 3)


def test_a_call_that_raises_leaves_nothing_broken() -> None:
    bound, p = Bound(program_of(product, p=f64(3, 2), x=f64(4, 2))), torch.rand(3, 2)
    with pytest.raises(RuntimeError):
        bound(p, torch.rand(4, 5))
    x = torch.rand(4, 2)
    assert torch.equal(bound(p, x)[0], x @ p.t())


def test_released_it_holds_no_state() -> None:
    bound, p = Bound(program_of(product, p=f64(3, 2), x=f64(4, 2))), torch.rand(3, 2)
    bound(p, torch.rand(4, 2))
    assert p._is_view() is False and bound._state
    bound.release()
    assert not bound._state and bound._halves is None


def test_no_look_for_room_stands_behind_a_write() -> None:
    """A pass of a user's may have moved it there; a call that has written cannot begin anew."""

    program = program_of(lambda p, x: (aten.add.Tensor(p, 1), within(x, 1, 8, 4)), p=f64(2), x=f64(2))
    program.inputs[0] = replace(program.inputs[0], in_place=True)
    (write,) = program.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    write.target = aten.add_.Tensor
    with pytest.raises(passes.PassError, match="within looks whether the program fits the call behind add"):
        Bound(program)(torch.zeros(2).double(), torch.ones(2).double())


def test_arguments_of_every_kind() -> None:
    def step(p: Any, x: Any) -> Any:
        whole = aten.full.default([2, 3], float("-inf"), dtype=torch.float64, device=torch.device("cpu"))
        first, second = aten.split.Tensor(x, 2)[0], aten.split.Tensor(x, 2)[1]
        picked = aten.index.Tensor(aten.cat.default([first, second]), [None, aten.arange.default(2)])
        return aten.maximum.default(whole, p), picked, aten._to_copy.default(x, dtype=torch.float32), 3, None

    bound, p, x = Bound(program_of(step, p=f64(2, 3), x=f64(4, 3))), torch.rand(2, 3).double(), torch.rand(4, 3)
    got = bound(p, x)
    assert torch.equal(got[0], p) and torch.equal(got[1], x[:, :2]) and got[2].dtype is torch.float32
    assert got[3:] == (3, None)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: aten.mm.default(x, x),
        lambda x, n: aten.add.Tensor(x, 1.5, alpha=2),
        lambda x, n: aten.mul.Tensor(x, n),
        lambda x, n: aten.sum.dim_IntList(x, [0], True),
        lambda x, n: aten.gelu_backward.default(x, x),
        lambda x, n: aten.lerp.Scalar(x, x, 0.5),
        lambda x, n: aten.div.Tensor_mode(x, 2, rounding_mode="floor"),
        lambda x, n: aten.pow.Scalar(2, x),
        lambda x, n: aten.reshape.default(x, [-1]),
        lambda x, n: aten.zeros_like.default(x, memory_format=torch.preserve_format),
    ],
)
def test_a_binding_performs_the_very_op(function: Any) -> None:
    program = make_program(lambda x, n: (function(x, n),), x=f64(4, 4), n=2.5)
    (node,) = (node for node in program.graph.nodes if node.op == "call_function")
    x = torch.rand(4, 4).double()
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda each: {"x": x.clone(), "n": 2.5}[each.name])
    again, _ = torch.fx.map_arg((node.args, {}), lambda each: {"x": x.clone(), "n": 2.5}[each.name])
    assert torch.equal(direct(node)(*args, **kwargs), node.target(*again, **kwargs))


def test_products_and_sums_take_the_binding() -> None:
    program = make_program(lambda x: (aten.mm.default(x, x), aten.mul.Tensor(x, 2), aten.gelu.default(x)), x=f64(4, 4))
    functions = [direct(node) for node in program.graph.nodes if node.op == "call_function"]
    assert functions == [torch.mm, torch.mul, torch.nn.functional.gelu]
