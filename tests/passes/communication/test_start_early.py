"""StartEarly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from passes import Role, StartEarly, run

from ..programs import all_gather, all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def test_start_early(golden: Any) -> None:
    def step(w: Any, v: Any, x: Any) -> Any:
        h = aten.mm.default(x, all_gather(w))
        grad = aten.sum.default(h)
        h = aten.mm.default(h, all_gather(aten.constant_pad_nd.default(v, [0, 0, 0, 1])))  # packed, then sent
        return aten.exp.default(h), all_reduce(grad)

    program = make_program(step, {}, [Role.PARAMETER], w=f64(2, 4), v=f64(1, 5), x=f64(3, 4))
    after, text = before_and_after(program, StartEarly())
    golden(text)
    assert_same_bits(program, after)
    assert after.history == ["02 StartEarly: 2 edits"]


def test_packing_with_other_readers_stays() -> None:
    def step(v: Any, x: Any) -> Any:
        y = aten.exp.default(x)
        packed = aten.view.default(v, [4])
        return aten.add.Tensor(all_gather(packed), y), aten.neg.default(packed)

    program = make_program(step, {}, [Role.PARAMETER], v=f64(2, 2), x=f64(8))
    names = [node.name for node in run(program, [StartEarly()]).graph.nodes]
    assert names.index("exp") < names.index("view") < names.index("all_gather_into_tensor")


def test_values_of_the_arguments_alone_are_known_when_the_call_begins() -> None:
    def step(w: Any, x: Any, t: Any) -> Any:
        h = aten.mm.default(x, w)
        labels = aten.view.default(t, [4])  # which others read, too
        count = all_reduce(aten.sum.default(aten.ne.Scalar(labels, -1)))
        drawn = all_reduce(aten.sum.default(aten.bernoulli.p(t, 0.5)))
        return aten.div.Tensor(h, count), aten.neg.default(labels), drawn

    program = make_program(step, {}, [Role.ACTIVATION], w=f64(2, 4), x=f64(3, 2), t=f64(2, 2))
    roles = {"w": Role.PARAMETER, "x": Role.BATCH, "t": Role.BATCH}
    program.inputs = [replace(each, role=roles[each.name]) for each in program.inputs]
    names = [node.name for node in run(program, [StartEarly()]).graph.nodes]
    assert names[3:7] == ["view", "ne", "sum_1", "all_reduce"]
    assert names.index("mm") < names.index("bernoulli") < names.index("all_reduce_1")


def test_no_wait_moves_to_where_the_call_begins() -> None:
    def step(w: Any, x: Any) -> Any:
        h = aten.mm.default(x, w)
        return h, all_reduce(aten.neg.default(all_reduce(aten.sum.default(x))))

    program = make_program(step, {}, [Role.ACTIVATION], w=f64(2, 4), x=f64(3, 2))
    program.inputs = [replace(i, role=Role.BATCH if i.name == "x" else Role.PARAMETER) for i in program.inputs]
    names = [node.name for node in run(program, [StartEarly()]).graph.nodes]
    assert names.index("all_reduce") < names.index("mm") < names.index("wait_tensor") < names.index("neg")
