"""Calls of one memo key share a rule's options and their results' shapes; calls that may differ have other keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from spmd.memo import Shapes, memo_key

LOOKALIKES = [
    (1, 1.0),
    (1, True),
    ([1, 2], (1, 2)),
    ([None], [0]),
    ({"dim": 0}, {"dim": False}),
    (torch.empty(2, 3), torch.empty(3, 2).t()),
    (torch.empty(2), torch.empty(2, dtype=torch.float64)),
    (torch.empty(2, dtype=torch.complex64), torch.empty(2, dtype=torch.complex64).conj()),
    (torch.empty(4)[:2], torch.empty(4)[2:]),
]


@pytest.mark.parametrize(("one", "other"), LOOKALIKES)
def test_arguments_that_can_give_other_results_have_other_keys(one: Any, other: Any) -> None:
    assert memo_key(one) == memo_key(one) != memo_key(other)
    assert hash(memo_key(one)) == hash(memo_key(one))


@pytest.mark.parametrize("later", [False, True])
def test_an_op_runs_once_for_all_calls_of_one_key(later: bool) -> None:
    def adding(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        return [x + 1, y + 1, z + 1]

    mode, add = FakeTensorMode(), torch.ops.aten.add.Tensor
    with mode:
        graph = make_fx(adding, tracing_mode="fake")(torch.empty(2, 3), torch.empty(2, 3), torch.empty(6)).graph
    _, y, z = graph.find_nodes(op="placeholder")
    shapes, first = Shapes(mode), graph.find_nodes(op="call_function", target=add)[0]
    (shapes.learn_later if later else shapes.learn)(first)
    assert shapes.of(add, (y, 1), {}) is first.meta["val"]
    other = shapes.of(add, (z, 1), {})
    assert tuple(other.shape) == (6,) and shapes.of(add, (z, 1), {}) is other
    assert shapes.of(add, (z, 1.0), {}) is not other
