"""How an op writes its result into given memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.analysis.out_variants import CONSTANT_BYTES, fill_value, is_constant, out_variant, results_of
from passes.ir.collectives import OUT_VARIANTS, c10d

aten = torch.ops.aten


def node(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that calls ``op``; each "x" among the arguments is an input of shape (4, 4)."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, 4)
        made = graph.call_function(op, tuple(x if each == "x" else each for each in args), kwargs)
        made.meta["val"] = op(*(x.meta["val"] if each == "x" else each for each in args), **kwargs)
    return made


def written(made: fx.Node) -> tuple[Any, ...] | None:
    """The op that writes into "out", with all arguments of its call."""
    variant = out_variant(made)
    if variant is None:
        return None
    args, kwargs = variant.call(["out"])
    return variant.op, *map(str, args), *(f"{name}={value}" for name, value in kwargs.items())


def test_a_kernel_of_its_own() -> None:
    assert written(node(aten.mm.default, "x", "x")) == (aten.mm.out, "x", "x", "out=out")


def test_a_copy_writes_by_nature() -> None:
    assert written(node(aten.clone.default, "x")) == (aten.copy_.default, "out", "x")
    assert written(node(aten._to_copy.default, "x", dtype=torch.float64)) == (aten.copy_.default, "out", "x")


def test_a_fill_writes_by_nature() -> None:
    assert written(node(aten.full.default, [2], 7)) == (aten.fill_.Scalar, "out", "7")
    assert written(node(aten.zeros_like.default, "x")) == (aten.fill_.Scalar, "out", "0")


def test_a_collective() -> None:
    made = node(aten.neg.default, "x")
    made.target, made.args = c10d.all_reduce.default, (made.args[0], "sum", "0")
    expected = (OUT_VARIANTS[c10d.all_reduce.default], "x", "sum", "0", "out=out")
    assert written(made) == expected


@pytest.mark.parametrize(
    "made",
    [
        node(aten.view.default, "x", [16]),
        node(aten.constant_pad_nd.default, "x", [1, 1]),
        node(aten.add_.Tensor, "x", "x"),
        node(torch.add, "x", "x"),
        node(aten.sym_size.int, "x", 0),
    ],
    ids=["a view", "a variant that copies", "an op in place", "Python code", "a number"],
)
def test_none(made: fx.Node) -> None:
    assert out_variant(made) is None


def test_several_results_have_memory_each() -> None:
    made = node(aten.topk.default, "x", 2)
    variant = out_variant(made)
    assert len(results_of(made)) == 2
    assert variant is not None and variant.outs == ("values", "indices")
    assert variant.call(["v", "i"])[1] == {"values": "v", "indices": "i"}


def test_the_number_that_fills() -> None:
    assert fill_value(node(aten.full.default, [2], 7)) == 7
    assert fill_value(node(aten.full_like.default, "x", 3)) == 3
    assert fill_value(node(aten.new_full.default, "x", [2], 5)) == 5
    assert fill_value(node(aten.zeros.default, [2])) == 0
    assert fill_value(node(aten.ones_like.default, "x")) == 1
    assert fill_value(node(aten.neg.default, "x")) is None


def test_constants_are_small_and_made_from_nothing() -> None:
    assert is_constant(node(aten.full.default, [2], 7))
    assert not is_constant(node(aten.zeros.default, [CONSTANT_BYTES]))
    assert not is_constant(node(aten.zeros_like.default, "x"))
    assert not is_constant(node(aten.rand.default, [2]))
