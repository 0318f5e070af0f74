"""The report: counts, bytes, and what rich shows."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from passes import Report, Role
from passes.ir.report import _summary

from ..programs import all_gather, all_reduce, f64, make_program

aten = torch.ops.aten


def report() -> Report:
    def step(w: Any, x: Any) -> Any:
        return all_reduce(aten.sum.default(x)), all_reduce(aten.mm.default(x, x)), all_gather(w), all_reduce(x)

    roles = [Role.RESULT, Role.GRADIENT, Role.PARAMETER, Role.GRADIENT]
    program = make_program(step, {}, roles, w=torch.empty(5), x=f64(3, 3))
    for node, layer in zip(list(program.collectives())[1::2], (3, 10), strict=True):
        node.meta["collective"] = replace(node.meta["collective"], why=f"mm needs it so at model.{layer}.up")
    program.history.append("00 capture")
    return Report.of(program, {"capture": 1.25, "partition": 0.5}, ["aten.foo ran replicated"])


def test_counts_and_bytes() -> None:
    made = report()
    assert [made.count(kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")] == [3, 1, 0]
    assert made.bytes("all_reduce") == 8 * (1 + 9 + 9) and made.bytes("all_gather") == 4 * 5
    assert made.seconds == {"capture": 1.25, "partition": 0.5}


def test_rows() -> None:
    rows = [(row.kind, row.axis, row.role, row.dtype, row.count, row.bytes, row.why) for row in report().traffic]
    assert rows == [
        ("all_reduce", "dp", "result", "float64", 1, 8, "result of sum_1"),
        ("all_reduce", "dp", "gradient", "float64", 2, 144, "mm needs it so at model.*.up"),
        ("all_gather", "dp", "parameter", "float32", 1, 20, "parameter of w"),
    ]


def test_a_row_names_places_and_says_how_many_more() -> None:
    places = [*(f"model.{k}.up" for k in range(9)), "a", "b", "c", "d", "e"]
    assert (
        _summary([f"mm needs it so at {place}" for place in places])
        == "mm needs it so at model.*.up, a, b, c and 2 more"
    )
    assert _summary(["2 in one; a gradient is a sum", "a gradient is a sum"]) == "a gradient is a sum"
    assert _summary(["2 in one; a gradient is a sum"]) == "2 in one; a gradient is a sum"


def test_an_unknown_kind_names_the_five() -> None:
    with pytest.raises(ValueError, match="all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, got 'gather'"):
        report().count("gather")


def test_it_is_json() -> None:
    assert json.loads(json.dumps(report().to_dict()))["traffic"][1]["bytes"] == 144


def test_rich_prints_it() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report())
    text = console.export_text()
    for expected in ("program on dp=2", "reduce", "gradient", "144", "capture 1.25", "note: aten.foo ran replicated"):
        assert expected in text


def test_a_program_that_communicates_nothing() -> None:
    console = Console(record=True, file=io.StringIO())
    console.print(Report.of(make_program(lambda x: (x,), x=f64(2))))
    assert "one step communicates nothing" in console.export_text()
