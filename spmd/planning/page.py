"""A page of plans in one HTML file: scaling, time against memory, seconds by cause, and the mode of each layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from .changes import MEANT, duration, size_of
from .plans import Candidate, Plans, name

_COLORS = {
    "compute": "#4a7fbf",
    "tensor": "#e3962f",
    "gathers": "#cf4436",
    "pipeline": "#9aa1a9",
    "messages": "#b3a03a",
    "reduction": "#8663b8",
    "update": "#4b9a6a",
    "waiting": "#5f6670",
}
_WIDTH, _HEIGHT, _EDGE = 720, 260, 56  # of the drawing, in pixels
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>spmd plan</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2126; }
text { font: 12px system-ui, sans-serif; fill: #5f6670; } line { stroke: #c4c6c0; }
pre { background: #f1f1ee; padding: .8rem; overflow-x: auto; } summary { cursor: pointer; }
.bar { display: flex; height: 14px; } .key { display: inline-block; width: 12px; height: 12px; margin: 0 .3rem 0 1rem; }
.number { float: right; color: #5f6670; }
</style></head><body><h1>{{ title }}</h1>
<p>All figures are estimates.{% for cause, color in colors.items() %}
<span class="key" style="background: {{ color }}"></span>{{ meant[cause] }}{% endfor %}</p>
{% if scaling %}<h2>Tokens a second of each GPU</h2>
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="tokens a second of each GPU, by the number of GPUs">
<line x1="{{ edge }}" y1="{{ height - edge }}" x2="{{ width }}" y2="{{ height - edge }}"/>
<line x1="{{ edge }}" y1="0" x2="{{ edge }}" y2="{{ height - edge }}"/>
{% for each in scaling %}<polyline points="{{ each.points }}" fill="none" stroke="{{ each.color }}"/>
{% for dot in each.dots %}<circle cx="{{ dot.x }}" cy="{{ dot.y }}" r="4" fill="{{ each.color }}"/>
<text x="{{ dot.x }}" y="{{ dot.y - 8 }}" text-anchor="end">{{ dot.rate }}</text>
<text x="{{ dot.x }}" y="{{ height - edge + 18 }}" text-anchor="middle">{{ dot.gpus }}</text>{% endfor %}
<text x="{{ edge + 8 + 90 * loop.index0 }}" y="{{ height - 12 }}" style="fill: {{ each.color }}">{{ each.gpu }}</text>
{% endfor %}</svg>{% endif %}
{% for plan in plans %}<h2>{{ plan.title }}</h2>
{% if plan.missing %}<p>{{ plan.missing }}</p>{% endif %}
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="step time against memory">
<line x1="{{ edge }}" y1="{{ height - edge }}" x2="{{ width }}" y2="{{ height - edge }}"/>
<line x1="{{ edge }}" y1="0" x2="{{ edge }}" y2="{{ height - edge }}"/>
<text x="{{ edge }}" y="{{ height - 12 }}">memory of a GPU, {{ plan.memory }}; dashed: what fits (logarithmic)</text>
<text x="4" y="14">step</text><text x="4" y="30">{{ plan.most_time }}</text>
<text x="4" y="{{ height - edge }}">{{ plan.least_time }}</text>
<line x1="{{ plan.limit }}" y1="0" x2="{{ plan.limit }}" y2="{{ height - edge }}" stroke-dasharray="4"/>
{% for dot in plan.dots %}<a href="#{{ dot.id }}" onclick="document.getElementById('{{ dot.id }}').open = true">
<circle cx="{{ dot.x }}" cy="{{ dot.y }}" r="5" fill="{{ dot.color }}"><title>{{ dot.label }}</title></circle></a>
{% endfor %}</svg>
{% for each in plan.layouts %}<details id="{{ each.id }}"><summary>{{ each.name }}
<span class="number">{{ each.figures }}</span>
<div class="bar">{% for part in each.parts %}<span title="{{ part.label }}"
 style="background: {{ part.color }}; width: {{ part.width }}%"></span>{% endfor %}</div></summary>
<pre>{{ each.python }}</pre></details>{% endfor %}{% endfor %}</body></html>
"""


def page(plans: Sequence[Plans]) -> str:
    """The page of one plan, or of several beside each other."""
    from jinja2 import Environment, StrictUndefined  # here, since most plans are not drawn

    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_PAGE)
    sizes = {"width": _WIDTH, "height": _HEIGHT, "edge": _EDGE}
    title = f"Layouts of a step of {plans[0].rows} rows"
    drawn = [_drawn(each, f"plan-{k}") for k, each in enumerate(plans)]
    return template.render(title=title, plans=drawn, scaling=_scaling(plans), colors=_COLORS, meant=MEANT, **sizes)


def _scaling(plans: Sequence[Plans]) -> list[dict[str, Any]]:
    """A line for each kind of GPU: tokens a second of one of them by how many there are. Empty for one number."""
    counts = sorted({each.gpus for each in plans if each})
    if len(counts) < 2:
        return []
    most, kinds = max(each.rate / each.gpus for each in plans), dict.fromkeys(each.gpu for each in plans if each)
    span = math.log2(counts[-1] / counts[0])

    def dot(each: Plans) -> dict[str, Any]:
        across = 2 * _EDGE + (_WIDTH - 3 * _EDGE) * math.log2(each.gpus / counts[0]) / span
        down = (_HEIGHT - _EDGE) * (1 - each.rate / each.gpus / most) + 20 * each.rate / each.gpus / most
        rate = f"{each.rate / each.gpus:,.0f}"
        return {"x": round(across, 1), "y": round(down, 1), "gpus": each.gpus, "rate": rate}

    lines = []
    for gpu, color in zip(kinds, cycle(_COLORS.values()), strict=False):
        dots = [dot(each) for each in sorted(plans, key=lambda each: each.gpus) if each and each.gpu == gpu]
        points = " ".join(f"{each['x']},{each['y']}" for each in dots)
        lines.append({"gpu": gpu, "color": color, "dots": dots, "points": points})
    return lines


def _drawn(plan: Plans, key: str) -> dict[str, Any]:
    listed = [*plan.layouts, *(each for each in plan.front if each not in plan.layouts)]
    times, sizes = [each.estimate.seconds for each in listed], [each.estimate.peak for each in listed]
    smallest, largest = min(plan.memory, *sizes), max(plan.memory, *sizes)
    scale = max(each.estimate.seconds for each in plan.layouts or plan.front)  # of bars; longer ones are cut

    def across(size: float) -> float:
        return round(_EDGE + 8 + (_WIDTH - _EDGE - 16) * _along(size, smallest, largest), 1)

    def dot(each: Candidate) -> dict[str, Any]:
        down = 6 + (_HEIGHT - _EDGE - 12) * (1 - _along(each.estimate.seconds, min(times), max(times)))
        color = _COLORS["compute"] if each.estimate.peak <= plan.memory else _COLORS["pipeline"]
        return {"x": across(each.estimate.peak), "y": round(down, 1), "color": color, "label": _label(each)}

    ids = [f"{key}-{k}" for k in range(len(listed))]
    return {
        "title": f"{plan.gpus} {plan.gpu}, {plan.per_host} a host",
        "missing": "" if plan else plan.missing(),
        "memory": f"{size_of(smallest)} to {size_of(largest)}",
        "least_time": duration(min(times)),
        "most_time": duration(max(times)),
        "limit": across(plan.memory),
        "dots": [dot(each) | {"id": id_} for each, id_ in zip(listed, ids, strict=True)],
        "layouts": [_bar(plan, each, scale) | {"id": id_} for each, id_ in zip(listed, ids, strict=True)],
    }


def _along(value: float, least: float, most: float) -> float:
    """The position of a value between two others, from 0 to 1, by the logarithm."""
    return math.log(value / least) / math.log(most / least) if most > least else 0.0


def _bar(plan: Plans, each: Candidate, scale: float) -> dict[str, Any]:
    causes = [(cause, seconds) for cause, seconds in each.estimate.causes.items() if seconds > 0]
    parts = [
        {
            "label": f"{MEANT[cause]}: {duration(seconds)}",
            "color": _COLORS[cause],
            "width": round(100 * seconds / max(scale, each.estimate.seconds), 2),
        }
        for cause, seconds in causes
    ]
    fits = "" if each.estimate.peak <= plan.memory else ", does not fit"
    figures = f"{duration(each.estimate.seconds)}, {size_of(each.estimate.peak)}{fits}"
    return {"name": name(each.layout), "figures": figures, "parts": parts, "python": plan.python(each)}


def _label(each: Candidate) -> str:
    return f"{name(each.layout)}: {duration(each.estimate.seconds)}, {size_of(each.estimate.peak)}"
