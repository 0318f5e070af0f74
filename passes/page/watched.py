"""Statistics of ``step.watch`` over the calls of a run, from the JSON lines that it wrote."""

from __future__ import annotations

import json
import math
from typing import Any

_MOST = 2_000  # calls of a chart; of more, every second one is left out until they are so few


def watched(text: str) -> list[dict[str, Any]]:
    """A chart for each statistic: the numbers of its calls, and for each name its value in each, or None.

    NaN and infinite values are text, since JSON has no others. Raises ``ValueError`` for lines of another kind.
    """
    charts: dict[str, dict[int, dict[str, float]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
            for name, of in found["values"].items():
                for statistic, value in of.items():
                    charts.setdefault(statistic, {}).setdefault(int(found["call"]), {})[name] = float(value)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f"line {number} of the watched values is none that step.watch(..., to=FILE) wrote: {line[:80]!r}"
            ) from None
    return [_chart(statistic, calls) for statistic, calls in charts.items()]


def _chart(statistic: str, calls: dict[int, dict[str, float]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for values in calls.values() for name in values))
    numbers = sorted(calls)
    while len(numbers) > _MOST:
        numbers = [number for k, number in enumerate(numbers) if k % 2 == 0 or number == numbers[-1]]
    rows = [[name, [_plain(calls[number].get(name)) for number in numbers]] for name in names]
    return {"statistic": statistic, "calls": numbers, "rows": rows}


def _plain(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
