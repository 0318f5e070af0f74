"""The report: counts, bytes, and what rich shows."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from passes import EstimatedTime, LiveValue, PassEffect, PlannedMemory, Report, Role
from passes.report import Traffic, _summary

from .programs import all_gather, all_reduce, f64, make_program

aten = torch.ops.aten


def report() -> Report:
    def step(w: Any, x: Any) -> Any:
        return all_reduce(aten.sum.default(x)), all_reduce(aten.mm.default(x, x)), all_gather(w), all_reduce(x)

    roles = [Role.RESULT, Role.GRADIENT, Role.PARAMETER, Role.GRADIENT]
    program = make_program(step, {}, roles, w=torch.empty(5), x=f64(3, 3))
    for node, layer in zip(list(program.collectives())[1::2], (3, 10), strict=True):
        node.meta["collective"] = replace(
            node.meta["collective"], why=f"gradient: sum over dp for mm at model.{layer}.up"
        )
    program.history.append("00 capture")
    return Report.of(program, {"capture": 1.25, "partition": 0.5}, ["aten.foo ran replicated"])


def test_counts_and_bytes() -> None:
    made = report()
    assert [made.count(kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")] == [3, 1, 0]
    assert made.bytes("all_reduce") == 8 * (1 + 9 + 9) and made.bytes("all_gather") == 4 * 5
    assert made.seconds == {"capture": 1.25, "partition": 0.5}


def test_scalars_are_floats_by_name() -> None:
    made = report()
    found = made.scalars()
    assert all(type(value) is float for value in found.values())
    assert (found["count/all_reduce"], found["bytes/all_gather"], found["compile/capture"]) == (3, 20, 1.25)
    assert made.estimated is not None and found["estimated/exposed"] == made.estimated.exposed
    assert found["memory/cpu"] == made.memory["cpu"].peak
    assert not any(name.startswith("measured/") for name in found)


def test_a_notebook_shows_the_tables() -> None:
    made = replace(report(), name="<step>")._repr_html_()
    assert made.startswith("<pre") and "&lt;step&gt; on dp=2" in made and "model.*.up" in made


def test_rows() -> None:
    rows = [(row.kind, row.axis, row.role, row.dtype, row.count, row.bytes, row.why) for row in report().traffic]
    assert rows == [
        ("all_reduce", "dp", "result", "float64", 1, 8, "result of sum_1"),
        ("all_reduce", "dp", "gradient", "float64", 2, 144, "gradient: sum over dp for mm at model.*.up"),
        ("all_gather", "dp", "parameter", "float32", 1, 20, "parameter of w"),
    ]


def test_a_row_names_modules_and_how_many_more_there_are() -> None:
    modules = [*(f"model.{k}.up" for k in range(9)), "a", "b", "c", "d", "e"]
    text = "activation: gathered for mm at"
    assert _summary([f"{text} {module}" for module in modules]) == f"{text} model.*.up, a, b, c and 2 more"
    assert _summary(["gradient: sum over dp; 2 in one", "gradient: sum over dp"]) == "gradient: sum over dp"
    assert _summary(["gradient: sum over dp; 2 in one"]) == "gradient: sum over dp; 2 in one"
    assert _summary([f"{text} a.0 and others; 2 in one", f"{text} a.1"]) == f"{text} a.*"


def test_an_unknown_kind_names_all() -> None:
    with pytest.raises(ValueError, match="reduce_scatter, all_to_all, broadcast, send, recv, got 'gather'"):
        report().count("gather")


def test_it_is_json() -> None:
    assert json.loads(json.dumps(report().to_dict()))["traffic"][1]["bytes"] == 144


def text_of(report: Report, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report)
    return console.export_text()


PASSES = (
    PassEffect("02_drop_profiler", "nothing to do", 5_000, 5_000, 0.0001),
    PassEffect("10_bucket_reduce_scatter", "1,200 -> 6 collectives, reassociates", 5_000, 4_646, 0.0056),
    PassEffect("20_reduce_in_place", "nothing to do", 4_646, 4_646, 0.0001),
)


def test_each_pass_says_what_it_did_and_idle_ones_are_named_together() -> None:
    lines = text_of(replace(report(), passes=PASSES), 80).splitlines()
    (row,) = (line.split() for line in lines if line.startswith("10_bucket"))
    assert row[1:5] == ["1,200", "->", "6", "collectives,"] and row[-3:] == ["5,000", "4,646", "5.6"]
    assert lines[-2].startswith("nothing to do: 02_drop_profiler, 20_reduce_in_place")
    assert max(map(len, lines)) <= 80


def test_printed_as_text_it_is_the_same_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip() for line in text_of(report(), 80).splitlines()]
    assert str(report()).splitlines() == lines
    assert str(report()).startswith("program on dp=2: collectives of one step\ncollective ")


def test_what_to_dict_makes_is_read_back() -> None:
    made = replace(report(), passes=PASSES)
    assert Report.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_rich_prints_it() -> None:
    text = text_of(report(), 120)
    for expected in ("program on dp=2", "reduce", "gradient", "144", "capture 1.25", "note: aten.foo ran replicated"):
        assert expected in text


LARGE = Report(
    "train_step/program-1",
    "dp=2 x tp=2",
    (
        Traffic("all_reduce", "dp", "activation", "int64", 1, 8, "label count: sum over dp"),
        Traffic(
            "all_gather", "dp", "parameter", "bfloat16", 1, 6_738_415_616, "parameter: gathered before use; 21 in one"
        ),
        Traffic(
            "reduce_scatter",
            "tp",
            "activation",
            "float32",
            10,
            100_663_296,
            "activation: sum over tp for spmd.constrain at model.blocks.*.attention.out, model.blocks.*",
            "through shared memory",
        ),
    ),
)


def test_at_80_columns_no_word_is_broken() -> None:
    text = text_of(LARGE, 80)
    words = set(text.split())
    assert max(map(len, text.splitlines())) <= 80
    for row in LARGE.traffic:
        assert {row.kind, row.axis, f"{row.bytes:,}", *row.by.split()} <= words
    assert {"label", "gathered", "spmd.constrain", "...attention.out,", "model.blocks.*", "bf16"} <= words


MEMORY = PlannedMemory(
    peak=12_345_678_901,
    roles={"parameters": 6_738_415_616, "gathered": 0, "optimizer state": 5_000_000_000, "activations": 600_000_000},
    unused=7_263_285,
    arena=1_234_567_890,
    arena_used=1_227_304_605,
    allocated=0,
    at="gelu at model.blocks.0.mlp",
    largest=(
        LiveValue("optimizer.exp_avg_sq of unit 12", "optimizer state", 2_500_000_000, "float32", (625_000_000,)),
        LiveValue("model.blocks.11.attention.qkv.weight and 15 more", "gathered", 9_437_184, "float32", (2_359_296,)),
    ),
)


def test_memory_fits_80_columns() -> None:
    report = replace(LARGE, memory={"cpu": MEMORY, "cpu, shared with local ranks": replace(MEMORY, arena=0)})
    text = text_of(report, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "memory on cpu: 12,345,678,901 bytes at the peak, 1,234,567,890 in an arena" in text
    assert "memory on cpu, shared with local ranks: 12,345,678,901 bytes at the peak\n" in text
    assert "\nactivations " in text and "\ngathered " not in text  # of which there is none
    assert {"model.blocks.11.attention.qkv.wei", "ght", "2,500,000,000", "7,263,285"} <= set(text.split())
    assert json.loads(json.dumps(report.to_dict()))["memory"]["cpu"]["largest"][1]["shape"] == [2_359_296]


def test_the_algorithm_is_a_column_unless_all_ops_are_the_backend_s() -> None:
    assert "algorithm" in text_of(LARGE, 80)
    assert "algorithm" not in text_of(replace(LARGE, traffic=LARGE.traffic[:2]), 80)


def test_the_estimated_time_fits_80_columns() -> None:
    rows = [replace(row, seconds=12.3456, exposed=1234.5678) for row in LARGE.traffic]
    estimated = EstimatedTime(seconds=1534.5678, compute=300.0, communication=37.04, exposed=3703.70)
    text = text_of(replace(LARGE, traffic=tuple(rows), estimated=estimated), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "one step, estimated: 1,534,567.80 ms; 3,703,700.00 ms of 37,040.00 ms" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("reduce_scatter  tp    activation")]
    assert row[-3:] == ["10", "12,345.60", "1,234,567.80"]
    assert "estimated" not in text_of(LARGE, 80)


def test_it_estimates_the_time_of_each_collective() -> None:
    made = report()
    assert made.estimated is not None and made.estimated.seconds > 0
    assert sum(row.seconds for row in made.traffic) == pytest.approx(made.estimated.communication)
    assert [one.seconds for one in made.every if one.kind == "all_gather"] == [
        row.seconds for row in made.traffic if row.kind == "all_gather"
    ]
    assert sum(one.exposed for one in made.every) == pytest.approx(made.estimated.exposed)
    again = Report.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again.estimated == made.estimated and again.every == made.every
    older = {key: each for key, each in made.to_dict().items() if key != "estimated"}
    assert Report.from_dict(older).estimated is None


def test_a_program_that_communicates_nothing() -> None:
    assert "one step communicates nothing" in text_of(Report.of(make_program(lambda x: (x,), x=f64(2))), 80)
