"""A simulated step in the trace event format of Chrome, which Perfetto opens.

One track for compute, one for each queue of transfers (an axis of the mesh, copies), and a counter of the bytes in use
by device; of a pipeline also a track for each of its ranks. The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from .schedule.lanes import Bar, Lane
from .schedule.simulation import Span, Timeline

_PROCESS, _PIPELINE = 0, 1
_SHOWN = ("kind", "axis", "role", "dtype", "bytes", "why", "by", "phase", "line", "exposed", "cause")  # of a collective


def trace_events(
    timeline: Timeline, name: str, collectives: Mapping[str, Any], lanes: Sequence[Lane] = ()
) -> list[dict[str, Any]]:
    """The events of a step called ``name``; ``collectives`` by node, of which arguments are shown. Times are in us."""
    queues = list(dict.fromkeys(["", *(span.queue for span in timeline.spans)]))
    events = [_named("process_name", f"{name} (estimated)")]
    events += [_named("thread_name", queue or "compute", track) for track, queue in enumerate(queues)]
    events += [_event(span, queues.index(span.queue), collectives.get(span.node)) for span in timeline.spans]
    return [*events, *_counters(timeline), *_of_pipeline(lanes)]


def _named(kind: str, name: str, track: int = 0, process: int = _PROCESS) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": {"name": name}}


def _of_pipeline(lanes: Sequence[Lane]) -> Iterator[dict[str, Any]]:
    if lanes:
        yield _named("process_name", "ranks of the pipeline (estimated)", process=_PIPELINE)
    for track, lane in enumerate(lanes):
        yield _named("thread_name", lane.name, track, _PIPELINE)
        yield from (_bar(each, track) for each in lane.bars)


def _bar(bar: Bar, track: int) -> dict[str, Any]:
    times = {"ts": bar.start * 1e6, "dur": (bar.end - bar.start) * 1e6}
    return {"ph": "X", "pid": _PIPELINE, "tid": track, "name": bar.text, **times, "args": {}}


def _event(span: Span, track: int, collective: Any) -> dict[str, Any]:
    arguments = {"module": span.module} if span.module else {}
    if collective is not None:
        shown = {each.name: getattr(collective, each.name) for each in fields(collective) if each.name in _SHOWN}
        arguments |= {key: value for key, value in shown.items() if value != ""}
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": track,
        "name": span.node,
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": arguments,
    }


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for device, changes in timeline.memory.items():
        for seconds, count in changes:
            yield {
                "ph": "C",
                "pid": _PROCESS,
                "name": f"bytes on {device}",
                "ts": seconds * 1e6,
                "args": {"bytes": count},
            }
