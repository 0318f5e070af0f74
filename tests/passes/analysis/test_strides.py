"""What all ranks know of how values lie, where they hold unequal parts: of a single row strides say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from passes.analysis.strides import Layouts, is_dense, overlaps

from ..programs import all_reduce, f64, make_program

aten = torch.ops.aten


def layouts_of(function: Callable[..., Any], uneven: bool, *shape: int) -> tuple[Layouts, fx.Node]:
    """What is known of a function's result; its argument of this local shape is held in unequal parts, or not."""
    program = make_program(lambda x: (function(x),), x=f64(*shape))
    program.placeholders[0].meta["uneven"] = "some rows each" if uneven else ""
    return Layouts(program.graph), program.output_values()[0]


CONTIGUOUS: dict[str, Callable[..., Any]] = {
    "elementwise": lambda x: aten.add.Tensor(aten.neg.default(x), 1),
    "there and back": lambda x: aten.t.default(aten.transpose.int(x, 0, 1)),
    "rows": lambda x: aten.slice.Tensor(x, 0, 0, 1),
    "communicated": lambda x: all_reduce(aten.view.default(x, [-1, 1])),
    "a copy": lambda x: aten.neg.default(aten.contiguous.default(aten.t.default(x))),
    "a product": lambda x: aten.mm.default(aten.t.default(x), x),
    "one dim": lambda x: aten.sum.dim_IntList(aten.t.default(x), [1]),
    "made flat": lambda x: aten.cat.default([aten.view.default(x, [-1])]),
}
UNKNOWN: dict[str, Callable[..., Any]] = {
    "turned": lambda x: aten.t.default(x),
    "of what is turned": lambda x: aten.neg.default(aten.t.default(x)),
    "columns": lambda x: aten.slice.Tensor(x, 1, 0, 2),
    "every other row": lambda x: aten.slice.Tensor(x, 0, 0, 4, 2),
    "a reshape": lambda x: aten.reshape.default(aten.t.default(x), [-1]),
    "a sum": lambda x: aten.sum.dim_IntList(aten.t.default(x), [1], True),
    "expanded": lambda x: aten.expand.default(x, [-1, 3]),
}


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("name", CONTIGUOUS)
def test_contiguous_for_any_number_of_rows(name: str, rows: int) -> None:
    layouts, node = layouts_of(CONTIGUOUS[name], True, rows, 3)
    assert layouts.is_contiguous(node)
    assert node.meta["val"].is_contiguous()


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_the_number_of_rows(name: str, rows: int) -> None:
    layouts, node = layouts_of(UNKNOWN[name], True, rows, 3)
    assert not layouts.is_known(node)
    assert not layouts.is_contiguous(node)
    assert not layouts.is_viewable(node, node.meta["val"].shape)
    assert not layouts.have_same_layout(node, node)


@pytest.mark.parametrize("name", [*CONTIGUOUS, *UNKNOWN])
def test_of_equal_parts_everything_is_known(name: str) -> None:
    layouts, node = layouts_of((CONTIGUOUS | UNKNOWN)[name], False, 2, 3)
    assert layouts.is_known(node)
    assert layouts.is_even(node)
    assert layouts.is_contiguous(node) == node.meta["val"].is_contiguous()


def test_meta_of_a_node_counts() -> None:
    """What is gathered is whole again; sizes, too, are known then."""
    program = make_program(lambda x: (aten.slice.Tensor(aten.neg.default(x), 0, 0, 1),), x=f64(2, 3))
    x, (result,) = program.placeholders[0], program.output_values()
    x.meta["uneven"], result.meta["uneven"] = "some rows each", ""
    layouts = Layouts(program.graph)
    assert not layouts.is_even(x)
    assert layouts.is_even(result)


def test_strides_of_dims_of_length_one_say_nothing() -> None:
    program = make_program(lambda x: (aten.t.default(x), aten.view.default(x, [1, 3])), x=f64(3, 1))
    one, other = program.output_values()
    assert one.meta["val"].stride() != other.meta["val"].stride()
    assert Layouts(program.graph).have_same_layout(one, other)


def test_dense_and_overlapping() -> None:
    x = torch.empty(3, 4)
    assert is_dense(x.t())
    assert not is_dense(x[:, :2])
    assert not is_dense(x[:, :1].expand(3, 4))
    assert overlaps(x[:1].expand(3, 4))
    assert not overlaps(x[:1].expand(1, 4))
