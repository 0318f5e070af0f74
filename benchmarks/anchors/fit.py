"""Fit the constants of plans on published rows, and say how well those of other models, and of other sources, do.

One constant after the other is moved up or down as long as the loss falls: the mean, over groups, of the mean error and
a part of its 90th percentile. Nothing is fitted for a row or a model. Of the many rows of one host every fifth is used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from textwrap import fill
from typing import Any

from spmd.planning.fitted import CONSTANTS
from spmd.planning.machine import Constants, Machine, Software

from .errors import Errors, by_group, quantile
from .fitted import SOFTWARE
from .rows import Row, UnknownError

_BY_GENERATION = ("matmul", "attention")
_GIVEN = ("reserved", "throttle")
_OF_SOFTWARE = {
    "deepspeed": ("unfused", "launch", "per_step"),
    "foundry": ("per_step", "launch", "attention"),
    "nanotron": ("unfused", "per_step", "exposed"),
    "megatron": ("exposed", "hides", "attention"),
    "experts": ("launch",),
    "graphed experts": ("launch", "attention"),
    "eager": ("unfused",),
}
# What a constant may be at most: fractions are below 1, the parts of a launch below what is published of it, and what
# links and memory reach not above what was measured: all-reduces of 1 GiB of vTrain's hosts got 229 of 300 GB/s.
_MOST = {
    "memory": 0.92,
    "nvlink": 0.78,
    "network": 0.95,
    "kernel": 5e-6,
    "latency": 4e-5,
    "hop": 6e-6,
    "contention": 0.3,
    "inner": 256,
    "spread": 0.5,
    "launch": 1.5e-4,
}
_MOST |= {"per_step": 0.2, "far_hop": 5e-5, "knee": 20.0, "jitter": 0.02}
_LARGEST_FACTOR = 2.5  # of one attention kernel over another
_WEIGHTS = {"vtrain-multi": 2.0, "llm-foundry": 2.0, "nanotron": 1.5, "fms-fsdp": 0.3, "nemo-automodel": 0.3}
_CAP, _TAIL, _EVERY = 0.5, 0.3, 5  # an error counts up to this; the part of the 90th percentile; rows of one host

# Where fits on half of the models start, which must not know the other half.
_START = Constants(
    matmul=dict.fromkeys("AHBV", 0.7),
    attention=dict.fromkeys("AHBV", 0.4),
    memory=0.85,
    nvlink=0.75,
    network=0.75,
    message=0.4,
    inner=64,
    tile=0.5,
    float8=0.8,
    float4=0.6,
    kernel=3e-6,
    latency=1.5e-5,
    hop=2e-6,
    far_hop=1e-5,
    spread=0.05,
    contention=0.1,
    knee=4.0,
    jitter=0.005,
    throttle=0.5,
)
_START_OF_SOFTWARE = {"unfused": 0.5, "launch": 4e-5, "per_step": 5e-3, "exposed": 0.7, "hides": 0.7, "attention": 1.0}

Names = tuple[str, ...]
Values = dict[Names, float]


def used(rows: Sequence[Row]) -> list[Row]:
    """The rows that constants are fitted on."""
    return [r for r in rows if r.cells["group"] != "vtrain-single" or int(r.id) % _EVERY == 0]


def halves(rows: Sequence[Row]) -> list[list[Row]]:
    """Two halves of the models of each group, in turn by name; groups of one model are left out."""
    models: dict[str, list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.cells["model"]):
        if row.cells["model"] not in models[row.cells["group"]]:
            models[row.cells["group"]].append(row.cells["model"])
    known = [row for row in rows if len(models[row.cells["group"]]) > 1]
    place = {row.id: models[row.cells["group"]].index(row.cells["model"]) % 2 for row in known}
    return [[row for row in known if place[row.id] == half] for half in (0, 1)]


def sources(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each source."""
    return [[row for row in rows if row.cells["source"] == each] for each in sorted({r.cells["source"] for r in rows})]


def held_out(rows: Sequence[Row], rounds: int, parts: Sequence[Sequence[Row]]) -> list[Errors]:
    """The errors of each group where constants were fitted on all rows but those of its part.

    Fits start from constants that know none of the rows; of software that none of them ran, these stay.
    """
    seconds: dict[str, float] = {}
    start = _values(_START, SOFTWARE)
    start |= {names: _START_OF_SOFTWARE[names[1]] for names in start if names[0] in _OF_SOFTWARE}
    for judged in parts:
        ids = {row.id for row in judged}
        found = fit(used([row for row in rows if row.id not in ids]), rounds, start)
        seconds |= estimated(judged, *found)
    return by_group([row for row in rows if row.id in seconds], seconds, {})


def fit(rows: Sequence[Row], rounds: int = 10, start: Values | None = None) -> tuple[Constants, dict[str, Software]]:
    """The constants with the least loss that is found from ``start`` on, by default from the committed ones."""
    values = dict(start or _values(CONSTANTS, SOFTWARE))
    moving = {names: [row for row in rows if _concerns(names, row)] for names in values}
    errors = _errors(rows, values)
    steps, least = dict.fromkeys(values, 0.2), _loss(rows, errors)
    for _ in range(rounds):
        for names in values:
            for factor in (1 + steps[names], 1 / (1 + steps[names])):
                moved = values | {names: min(values[names] * factor, _most(names))}
                if moved == values:
                    continue
                found = errors | _errors(moving[names], moved)
                if (loss := _loss(rows, found)) < least - 1e-5:
                    values, errors, least, steps[names] = moved, found, loss, steps[names] * 1.3
                    break
            else:
                steps[names] *= 0.5
    return _built({names: float(f"{value:.3g}") for names, value in values.items()})


def _concerns(names: Names, row: Row) -> bool:
    """Whether a constant is of the software or the generation of GPUs of a row, or of all rows."""
    if names[0] in _OF_SOFTWARE:
        return row.framework == names[0]
    return len(names) == 1 or row.cells["gpu"].removeprefix("G")[0] == names[1]


def estimated(rows: Sequence[Row], constants: Constants, software: Mapping[str, Software]) -> dict[str, float]:
    """Seconds of the rows that have an estimate."""
    machines: dict[Any, Machine] = {}
    found = {}
    for row in rows:
        try:
            machine = machines.setdefault(row.kind, row.machine(constants, software))
            found[row.id] = row.estimate(machine).seconds
        except UnknownError:
            continue
    return found


def write(constants: Constants, software: Mapping[str, Software], rows: Sequence[Row], folder: Path) -> None:
    """Write both modules of constants, and the ids of the rows that they come from."""
    head = '"""Constants that `python -m benchmarks.anchors FILE.csv --fit` has written; format them with ruff."""\n\n'
    made = f"from .machine import Constants\n\nCONSTANTS = {constants!r}\n"
    (folder / "spmd" / "planning" / "fitted.py").write_text(head + made)
    listed = "".join(f"    {name!r}: Software({_changed(each)}),\n" for name, each in software.items())
    made = f"from spmd.planning.machine import Software\n\nSOFTWARE = {{\n{listed}}}\n"
    (folder / "benchmarks" / "anchors" / "fitted.py").write_text(head + made)
    ids: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        ids[row.cells["group"]].append(row.id)
    lines = [fill(f"{group}: {' '.join(each)}", 120, subsequent_indent="    ") for group, each in ids.items()]
    (folder / "benchmarks" / "anchors" / "fitted_on.txt").write_text("\n".join(lines) + "\n")


def _changed(software: Software) -> str:
    """Its fields that are not as by default."""
    pairs = ((each.name, getattr(software, each.name), each.default) for each in fields(Software))
    return ", ".join(f"{name}={value!r}" for name, value, default in pairs if value != default)


def _errors(rows: Sequence[Row], values: Values) -> dict[str, float]:
    """How far off each estimate is, as a logarithm up to a cap."""
    seconds = estimated(rows, *_built(values))
    return {r.id: min(abs(math.log(seconds[r.id] / r.seconds)), _CAP) for r in rows if r.id in seconds}


def _loss(rows: Sequence[Row], errors: Mapping[str, float]) -> float:
    groups = defaultdict[tuple[str, str], list[float]](list)
    for row in rows:
        if row.id in errors:
            groups[row.cells["group"], row.cells["class"]].append(errors[row.id])
    weights = {g: _WEIGHTS.get(g[0], 1.0) * (1.0 if g[1] == "bf16-dense" else 0.6) for g in groups}
    losses = {g: sum(each) / len(each) + _TAIL * quantile(sorted(each), 0.9) for g, each in groups.items()}
    return sum(weights[g] * losses[g] for g in groups) / sum(weights.values())


def _values(constants: Constants, software: Mapping[str, Software]) -> Values:
    """The numbers that are fitted, by the names of their fields."""
    plain = [f.name for f in fields(Constants) if f.name not in (*_BY_GENERATION, *_GIVEN)]
    found: Values = {(name,): getattr(constants, name) for name in plain}
    found |= {(n, letter): getattr(constants, n)[letter] for n in _BY_GENERATION for letter in "AHB"}
    return found | {
        (framework, name): getattr(software[framework], name)
        for framework, names in _OF_SOFTWARE.items()
        for name in names
    }


def _most(names: Names) -> float:
    if names[0] in _BY_GENERATION or names[-1] != "attention":
        return _MOST.get(names[-1], 0.98)
    return _LARGEST_FACTOR


def _built(values: Values) -> tuple[Constants, dict[str, Software]]:
    by_generation = {
        name: {**getattr(CONSTANTS, name), **{k[1]: v for k, v in values.items() if k[0] == name}}
        for name in _BY_GENERATION
    }
    constants = replace(CONSTANTS, **{k[0]: v for k, v in values.items() if len(k) == 1}, **by_generation)
    software = {
        name: replace(each, **{k[1]: v for k, v in values.items() if k[0] == name and len(k) == 2})
        for name, each in SOFTWARE.items()
    }
    return constants, software
