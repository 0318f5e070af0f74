"""What torch declares of ops, and what calls give for their arguments."""

from __future__ import annotations

import operator

import torch
from torch import fx

from passes.ir.schemas import argument, name_of, position_of, schema

aten = torch.ops.aten


def test_a_schema_in_plain_python() -> None:
    add = schema(aten.add_.Tensor)
    assert (add.name, add.overload, add.names, add.written) == ("add_", "Tensor", ["self", "other", "alpha"], [0])
    assert add.is_mutable and add.shares and add.results == ("Tensor",)
    this, other, alpha = add.arguments
    assert (this.type, this.shared, this.written, this.is_out) == ("Tensor", True, True, False)
    assert not other.shared and not other.written
    assert alpha.kwarg_only and alpha.default == 1
    assert schema(aten.add_.Tensor) is add, "read once"


def test_views_share_and_do_not_write() -> None:
    view = schema(aten.view.default)
    assert view.shares and view.arguments[0].shared and not view.is_mutable and view.written == []
    assert view.overload == "default"


def test_memory_for_results_is_not_among_the_typed_arguments() -> None:
    assert schema(aten.mm.out).typed == schema(aten.mm.default).typed == [("self", "Tensor"), ("mat2", "Tensor")]
    assert [each.name for each in schema(aten.mm.out).arguments if each.is_out] == ["out"]


def test_names_are_those_that_tracing_gives() -> None:
    assert name_of(aten.add.Tensor) == "add"
    assert name_of(operator.getitem) == "getitem"


def test_arguments_by_position_by_name_and_left_out() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sliced = graph.call_function(aten.slice.Tensor, (x, 1), {"end": 2})
    assert argument(sliced, "self") is x
    assert (argument(sliced, "dim"), argument(sliced, "end"), argument(sliced, "step")) == (1, 2, None)
    assert argument(sliced, "no_such_argument") is None
    assert position_of(aten.slice.Tensor, "end") == 3
    assert position_of(aten.slice.Tensor, "no_such_argument") is None
