"""The trace of an estimated step: one track a queue, nothing overlaps in a track, and it is as long as the step."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from passes import Report
from tests.harness.cases import MLP
from tests.harness.structure import compile_on_fake_ranks

CASE = MLP(sizes=(64, 64, 64, 4), rows=8, optimizer="SGD")


def events_of(report: Report, folder: Path) -> list[dict[str, Any]]:
    report.trace(folder / "step.json")
    events: list[dict[str, Any]] = json.loads((folder / "step.json").read_text())["traceEvents"]
    return events


@pytest.fixture(scope="module")
def report() -> Report:
    compiled = compile_on_fake_ranks(2, CASE.step, CASE.build(), *CASE.part(0, 0))
    made: Report = compiled.report()
    return made


def test_tracks_are_compute_and_axes_and_hold_the_whole_step(report: Report, tmp_path: Path) -> None:
    events = events_of(report, tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {0: "compute", 1: "dp"}
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["tid"]]].append(event)
    for track in tracks.values():
        for one, following in pairwise(sorted(track, key=lambda event: event["ts"])):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-6
    assert report.estimated is not None
    end = max(e["ts"] + e["dur"] for track in tracks.values() for e in track)
    assert end == pytest.approx(1e6 * report.estimated.seconds)
    moved = sum(event["dur"] for event in tracks["dp"])
    assert moved == pytest.approx(1e6 * report.estimated.communication) and moved > 0


def test_a_collective_says_why_and_memory_is_a_counter(report: Report, tmp_path: Path) -> None:
    events = events_of(report, tmp_path)
    (gradients,) = [e for e in events if e.get("tid") == 1 and e["args"].get("role") == "gradient"]
    assert gradients["args"]["why"].startswith("gradient: sum over dp") and gradients["args"]["bytes"] > 0
    counted = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == "bytes on cpu"]
    memory = report.memory["cpu"]
    assert max(counted) == memory.peak - memory.unused


def test_a_report_from_a_file_has_no_timeline(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no timeline: only that of a compiled step has one"):
        Report.from_dict(report.to_dict()).trace(tmp_path / "step.json")
    assert not list(tmp_path.iterdir())
