"""The contents of the page, as plain data: a function of the files of a dump."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .advice import advice
from .dumped_stages import StageTables
from .state import axes_of, inputs_of
from .watched import watched

WATCHED = "watched.jsonl"
"""The name of the file of watched values."""

_STAGE = re.compile(r"\d\d_\w+\.py")


def contents(files: Mapping[str, str]) -> dict[str, Any]:
    """The data of the page. ``files``: by name, those of a dumped program; all but ``report.json`` may be missing.

    Raises ``ValueError`` for files that no dump has written.
    """
    report = _json(files, "report.json")
    if not isinstance(report, dict) or not {"name", "mesh", "every", "memory", "history"} <= report.keys():
        raise ValueError("report.json is no report of this version")
    texts = {name.removesuffix(".py"): files[name] for name in sorted(files) if _STAGE.fullmatch(name)}
    did = {line[:2]: line.partition(": ")[2] for line in report["history"]}
    axes, partitioned = axes_of(report["mesh"]), next((t for name, t in texts.items() if name[:2] == "01"), "")
    inputs = list(inputs_of(partitioned))
    return {
        "report": report,
        "axes": axes,
        "timelines": {kind: _timeline(each, report) for kind, each in _json(files, "timeline.json").items()},
        "graph": StageTables(texts, files.get("nodes.json", ""), did).to_dict(),
        "watched": watched(files.get(WATCHED, "")),
        "inputs": [asdict(each) for each in inputs],
        "advice": {
            device: [asdict(each) for each in advice(memory, inputs, axes)]
            for device, memory in report["memory"].items()
        },
    }


def _json(files: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(files.get(name, "{}"))
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}") from error


def _timeline(given: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """Spans as ``[node, lane, start, end, part]``. A collective, but not its launch, is in the lane of its axis.

    ``part``: empty but in the lanes of a pipeline, where a span is a micro-batch in its forward, backward or update.
    """
    axis = {one["node"]: one["axis"] for one in report["every"]}
    transfers = {(each["node"], each["start"], each["end"]) for each in given["transfers"]}
    spans = [
        [_text(bar), lane["name"], bar["start"], bar["end"], bar["role"].partition(".")[0]]
        for lane in report.get("lanes", ())
        for bar in lane["bars"]
    ]
    for span in given["spans"]:
        node, start, end = span["node"], span["start"], span["end"]
        lane = axis.get(node, "") if (node, start, end) in transfers else ""
        spans.append([node, lane or span["queue"] or "compute", start, end, ""])
    return {"seconds": given["seconds"], "spans": spans, "memory": given["memory"]}


def _text(bar: Mapping[str, Any]) -> str:
    return bar["role"] if bar["micro_batch"] is None else f"{bar['role']} of {bar['micro_batch']}"
