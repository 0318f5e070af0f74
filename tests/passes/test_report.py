"""The report: counts, bytes, and what rich shows."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console

from passes import Report, Role

from .programs import all_gather, all_reduce, f64, make_program

aten = torch.ops.aten


def report() -> Report:
    def step(w: Any, x: Any) -> Any:
        return all_reduce(aten.sum.default(x)), all_reduce(aten.mm.default(x, x)), all_gather(w), all_reduce(x)

    roles = [Role.RESULT, Role.GRADIENT, Role.PARAMETER, Role.GRADIENT]
    program = make_program(step, {}, roles, w=torch.empty(5), x=f64(3, 3))
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
        ("all_reduce", "dp", "gradient", "float64", 2, 144, "gradient of mm; and 1 more like it"),
        ("all_gather", "dp", "parameter", "float32", 1, 20, "parameter of w"),
    ]


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
