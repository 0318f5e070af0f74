"""A simulated step in the trace event format of Chrome, which Perfetto opens.

One track for compute, one for each queue of transfers (an axis of the mesh, copies), and a counter of the bytes in use
by device. The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from .schedule.simulation import Span, Timeline

_PROCESS = 0
_SHOWN = ("kind", "axis", "role", "dtype", "bytes", "why", "by", "phase", "line", "exposed", "cause")  # of a collective


def trace_events(timeline: Timeline, name: str, collectives: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of a step called ``name``; ``collectives`` by node, of which arguments are shown. Times are in us."""
    queues = list(dict.fromkeys(["", *(span.queue for span in timeline.spans)]))
    events = [_named("process_name", f"{name} (estimated)")]
    events += [_named("thread_name", queue or "compute", track) for track, queue in enumerate(queues)]
    events += [_event(span, queues.index(span.queue), collectives.get(span.node)) for span in timeline.spans]
    return [*events, *_counters(timeline)]


def _named(kind: str, name: str, track: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": track, "name": kind, "args": {"name": name}}


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
