"""A program of a row in time: what its report estimates is a step that could be."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from passes import Report


def simulated(report: Report) -> list[str]:
    """A line for what no step can be: of its estimated time, its queues, and its memory."""
    assert str(report)
    time, timeline = report.estimated, report.timeline
    if time is None or timeline is None:
        return [f"simulation of {report.name}: there is none"]
    wrong = [each for each in vars(time).values() if not (math.isfinite(each) and each >= 0)]
    lines = [f"{time}"] if wrong or time.compute > time.seconds else []
    queues = defaultdict[str, list[tuple[float, float]]](list)
    for span in timeline.spans:
        queues[span.queue].append((span.start, span.end))
    lines += [f"{queue or 'compute'} does two things at once" for queue, spans in queues.items() if _overlap(spans)]
    return [f"simulation of {report.name}: {line}" for line in lines]


def _overlap(spans: Sequence[tuple[float, float]]) -> bool:
    return any(start < end - 1e-12 for (_, end), (start, _) in pairwise(sorted(spans)))
