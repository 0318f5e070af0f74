"""What the page shows beside the graphs: placements of inputs, lanes of the timeline, what would shrink the peak."""

from __future__ import annotations

import json
from typing import Any

import pytest

from passes.page.advice import advice
from passes.page.contents import contents
from passes.page.render import render
from passes.page.state import Held, axes_of, inputs_of
from passes.page.watched import watched

REPORT: dict[str, Any] = {"name": "step/program-0", "mesh": "dp=2 x tp=4", "every": [], "memory": {}, "history": []}
REPORT |= {"traffic": [], "notes": [], "seconds": {}, "estimated": None, "passes": []}
PARTITIONED = """def program(
    w: "f32[3, 1]",  # parameter model.weight: f32[6, 4] as Shard(dim=0), Shard(dim=1)
    m: "f32[6, 4]",  # optimizer state optimizer.exp_avg[model.weight]: f32[6, 4] as Replicate(), Replicate(), updated
    lr: "float",  # hyper-parameter optimizer.0.lr
    scale: "f32[]",  # buffer model.scale: f32[] as Replicate(), Replicate()
    *,
    dp: str,
):
    return ()
"""


def test_inputs_and_how_they_are_split() -> None:
    found = list(inputs_of(PARTITIONED))
    assert [(each.role, each.name, each.shape, each.split) for each in found] == [
        ("parameter", "model.weight", (6, 4), (0, 1)),
        ("optimizer state", "optimizer.exp_avg[model.weight]", (6, 4), (-1, -1)),
        ("buffer", "model.scale", (), (-1, -1)),
    ]
    assert axes_of("dp=2 x tp=4") == [("dp", 2), ("tp", 4)] and axes_of("one rank") == []


def memory(**roles: int) -> dict[str, Any]:
    return {"peak": sum(roles.values()), "roles": {"offloaded": 0, **roles}, "unused": 0}


def held(role: str, split: int) -> Held:
    return Held(role, "w", "f32", (4, 4), ("",), (split,))


def test_what_is_whole_on_every_rank_can_be_split() -> None:
    (found,) = advice({**memory(parameters=1000), "unused": 1}, [held("parameter", -1)], [("dp", 4)])
    assert found.saves == 750 and "fully_shard" in found.text
    (found,) = advice(memory(parameters=1000), [held("parameter", 0)], [("dp", 4)])
    assert found.saves == 0 and "split already" in found.text
    (found,) = advice(memory(parameters=1000), [held("parameter", -1)], [])
    assert found.saves == 0, "one rank has nothing to split over"


def test_the_largest_comes_first_and_what_is_small_is_left_out() -> None:
    found = advice(memory(activations=600, gathered=380, other=20), [], [("dp", 2)])
    assert [each.role for each in found] == ["activations", "gathered"]


def test_a_collective_is_in_the_lane_of_its_axis_and_its_launch_is_compute() -> None:
    transfer = {"node": "all_reduce", "start": 1.0, "end": 2.0, "queue": ""}
    spans = [
        {**transfer, "start": 0.5, "end": 0.6},
        transfer,
        {"node": "copy", "start": 3, "end": 4, "queue": "copies"},
    ]
    timeline = {"estimated": {"seconds": 2.0, "transfers": [transfer], "spans": spans, "memory": {}}}
    report = REPORT | {"every": [{"node": "all_reduce", "axis": "tp"}]}
    made = contents({"report.json": json.dumps(report), "timeline.json": json.dumps(timeline)})
    assert [span[1] for span in made["timelines"]["estimated"]["spans"]] == ["compute", "tp", "copies"]


def test_foreign_text_is_text() -> None:
    name = "</script><img src=x onerror=alert(1)>&'\""
    page = render({"report.json": json.dumps(REPORT | {"name": name, "notes": [name]})})
    assert "<img" not in page and page.count("</script>") == 2
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["report"]["notes"] == [name]


@pytest.mark.parametrize("files, why", [
    ({"report.json": "{}"}, "no report of this version"),
    ({"report.json": "x"}, "report.json cannot be read"),
    ({"report.json": json.dumps(REPORT), "00_capture.py": "x = 3"}, "00_capture.py is no printed program"),
], ids=["empty", "no JSON", "no program"])  # fmt: skip
def test_other_files_are_refused(files: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        contents(files)


def lines(values: list[dict[str, dict[str, float]]]) -> str:
    return "".join(json.dumps({"call": k + 1, "values": each}) + "\n" for k, each in enumerate(values))


def test_watched_values_are_rows_of_a_chart_for_each_statistic() -> None:
    nan = float("nan")
    text = lines([{"a": {"norm": 1.0, "nan": 0}}, {"a": {"norm": nan}, "b": {"norm": -float("inf")}}])
    assert watched(text) == [
        {"statistic": "norm", "calls": [1, 2], "rows": [["a", [1.0, "NaN"]], ["b", [None, "-Infinity"]]]},
        {"statistic": "nan", "calls": [1], "rows": [["a", [0.0]]]},
    ]
    assert watched("") == []
    (chart,) = watched(lines([{"a": {"max": k}} for k in range(5_001)]))
    assert len(chart["calls"]) <= 2_000 and (chart["calls"][0], chart["calls"][-1]) == (1, 5_001)
    assert [each - 1 for each in chart["calls"]] == chart["rows"][0][1]


@pytest.mark.parametrize("line", ["x", "[1]", '{"call": 1}', '{"call": 1, "values": {"a": {"norm": "?"}}}'])
def test_other_lines_than_those_of_watch_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"line 2 of the watched values is none that step\.watch"):
        watched(lines([{}]) + line)
