"""Recompute, and what of a program can be computed again."""

from __future__ import annotations

from typing import Any

import torch

from passes import MergeEqual, Phase, Program, Recompute, Role, run
from passes.memory.recomputable import Recomputable
from passes.runtime.host_memory import to_device, to_host
from passes.runtime.random import draw

from ..programs import all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def step(w: Any, x: Any) -> Any:
    """A product over ranks, a function of it with dropout, and backward, which reads both."""
    h = all_reduce(aten.mm.default(x, w))
    a = aten.tanh.default(h)
    b = aten.mul.Tensor(aten.exp.default(a), aten.bernoulli.p(h, 0.5))
    y = aten.sum.default(b)
    return y, aten.mul.Tensor(aten.view.default(b, [8]), 2.0), aten.add.Tensor(b, h)


def program_of_sum(function: Any) -> Program:
    """The program with all that follows the sum in backward."""
    program = make_program(function, {}, [Role.ACTIVATION], w=f64(4, 4), x=f64(2, 4))
    phase = Phase.FORWARD
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta["phase"] = phase
            phase = Phase.BACKWARD if node.target is aten.sum.default else phase
    return program


def program_of() -> Program:
    """That of ``step``, with a seed for what is drawn, and a view in forward that backward reads."""
    program = program_of_sum(step)
    (drawn,) = program.graph.find_nodes(op="call_function", target=aten.bernoulli.p)
    drawn.args, drawn.target = (aten.bernoulli.p, 1, 0, (), *drawn.args), draw
    (view,) = program.graph.find_nodes(op="call_function", target=aten.view.default)
    view.meta["phase"] = Phase.FORWARD
    return program


def test_recompute(golden: Any) -> None:
    program = program_of()
    after, text = before_and_after(program, Recompute(("mul", "tanh")))
    golden(text)
    assert_same_bits(program, after)
    assert run(after, [MergeEqual()]).history[-1].endswith("nothing to do")


def test_results_wait_in_host_memory() -> None:
    """Also where what runs again reads one; each comes back when backward reads the one before it."""

    def step(w: Any, x: Any) -> Any:
        a = aten.tanh.default(aten.mm.default(x, w))
        b = aten.exp.default(a)
        c = aten.sin.default(b)
        y = aten.sum.default(c)
        return y, aten.mul.Tensor(c, 2.0), aten.mul.Tensor(aten.view.default(b, [8]), 3.0), aten.add.Tensor(a, 1.0)

    program = program_of_sum(step)
    after = run(program, [Recompute(("sin",), offloaded=("exp", "tanh"))])
    assert_same_bits(program, after)
    assert after.history[-1].endswith(": 3 edits")  # also what only comes back is one
    names = [node.name for node in after.graph.nodes if node.target in (aten.sin.default, to_host, to_device)]
    assert names == ["to_host", "to_host_1", "sin", "to_device", "to_device_1", "sin_1"]
    assert [node.args[0].name for node in after.graph.find_nodes(op="call_function", target=to_host)] == ["tanh", "exp"]
    assert [node.args[0].name for node in after.graph.nodes if node.name == "sin_1"] == ["to_device"]


def test_what_is_kept_and_can_be_had_again() -> None:
    program = program_of()
    found = Recomputable(program)
    assert {op.name: size for op, size in found.kept.items()} == {"mul": 64}  # not the sum over ranks
    (kept,) = found.kept
    again = found.ops_for(kept, [kept])
    assert [op.name for op in again] == ["tanh", "exp", "bernoulli", "mul"]


def test_backward_may_read_a_view_of_its_own_of_what_runs_again() -> None:
    def viewed(x: Any) -> Any:
        a = aten.tanh.default(x)
        y = aten.sum.default(a)
        view = aten.view.default(a, [8])
        return y, aten.mul.Tensor(view, 2.0), aten.mul.Tensor(view, 3.0)

    program = make_program(viewed, {}, [Role.ACTIVATION], x=f64(2, 4))
    for node in program.graph.find_nodes(op="call_function", target=aten.tanh.default):
        node.meta["phase"] = Phase.FORWARD
    for target in (aten.view.default, aten.mul.Tensor):
        for node in program.graph.find_nodes(op="call_function", target=target):
            node.meta["phase"] = Phase.BACKWARD
    after = run(program, [Recompute(("tanh",))])
    assert [node.meta["recompute_of"] for node in after.graph.nodes if "recompute_of" in node.meta] == ["tanh"]
    assert_same_bits(program, after)


def test_what_no_rank_can_have_alone_is_kept_for_what_runs_again() -> None:
    def unkept(w: Any, x: Any) -> Any:
        a = aten.tanh.default(all_reduce(aten.mm.default(x, w)))
        return aten.sum.default(a), aten.mul.Tensor(a, 2.0)

    program = program_of_sum(unkept)
    found = Recomputable(program)
    (kept,) = found.kept
    assert [op.name for op in found.ops_for(kept, [kept])] == ["tanh"]
    after = run(program, [Recompute(("tanh",))])
    assert [node.meta["recompute_of"] for node in after.graph.nodes if "recompute_of" in node.meta] == ["tanh"]
    assert len(after.collectives()) == 1
    assert_same_bits(program, after)
