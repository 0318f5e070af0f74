"""Two reports of real runs beside each other: what of a step's time, collectives, memory and passes changed, and why.

Both are given as ``Report.to_dict`` makes them, or as a dump has them in ``report.json``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

Given = Mapping[str, Any]

_NOISE = 0.02  # of a step: differences below it explain nothing
_LISTED = 3  # ops, reasons, passes


def changes(before: Given, after: Given) -> list[str]:
    """Sentences on what is other in ``after``; one that says so where nothing is.

    Raises ``ValueError`` for what is no report.
    """
    try:
        found = [each for part in (_mesh, _times, _collectives, _memory, _passes) for each in part(before, after)]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"expected two reports of this version: {error!r}") from error
    return found or ["nothing that a report has is other, but for the seconds of compiling"]


def _mesh(before: Given, after: Given) -> Iterator[str]:
    if before["mesh"] != after["mesh"]:
        yield f"the mesh is {after['mesh']} instead of {before['mesh']}"


def _times(before: Given, after: Given) -> Iterator[str]:
    """The seconds of a step and their parts: as measured in both, or else as estimated."""
    key = "measured" if before.get("measured") and after.get("measured") else "estimated"
    old, new = before.get(key), after.get(key)
    if not old or not new:
        return
    if key == "estimated" and (before.get("measured") or after.get("measured")):
        yield "only one of them was measured: let both run with step.profile() for what follows as measured"
    least = _NOISE * old["seconds"]
    waits = "communication" if key == "measured" else "exposed"
    parts = {"compute": "compute", waits: "communication that is waited for"}
    more = {meaning: new[part] - old[part] for part, meaning in parts.items()}
    listed = [f"{_difference(t, _ms)} of {meaning}" for meaning, t in more.items() if abs(t) > least]
    if abs(new["seconds"] - old["seconds"]) > least or listed:
        why = f": {', '.join(listed)}" if listed else ""
        yield f"a step takes {_ms(new['seconds'])} instead of {_ms(old['seconds'])}, as {key}{why}"
    if key == "measured":
        yield from _ops(old["ops"], new["ops"], least)


def _ops(before: list[Given], after: list[Given], least: float) -> Iterator[str]:
    """The ops whose time differs most: because they are more, or because each takes longer."""
    old, new = ({each["op"]: (each["count"], each["measured"]) for each in ops} for ops in (before, after))
    more = {op: new.get(op, (0, 0.0))[1] - old.get(op, (0, 0.0))[1] for op in {**old, **new}}
    for op in sorted((op for op, t in more.items() if abs(t) > least), key=lambda op: -abs(more[op]))[:_LISTED]:
        (count, took), (counted, takes) = old.get(op, (0, 0.0)), new.get(op, (0, 0.0))
        times = f"it runs {counted} times instead of {count}"
        if count == counted and took:
            times = f"it runs as often, and each takes {takes / took:.0%} of before"
        yield f"{op} takes {_difference(more[op], _ms)}: {times}"


def _collectives(before: Given, after: Given) -> Iterator[str]:
    """Traffic along each axis that changed, with the reasons that are new and those that are gone."""
    old, new = _sums(before["traffic"]), _sums(after["traffic"])
    for what in [*old, *(each for each in new if each not in old)]:
        (count, size, why), (counted, sized, reasons) = old.get(what, (0, 0, [])), new.get(what, (0, 0, []))
        if (count, size) == (counted, sized):
            continue
        come, gone = ([each for each in a if each not in b] for a, b in ((reasons, why), (why, reasons)))
        listed = [f"; {title}: {', '.join(each[:_LISTED])}" for title, each in (("new", come), ("gone", gone)) if each]
        yield f"{what}: {counted} of {_size(sized)} in all instead of {count} of {_size(size)}{''.join(listed)}"


def _sums(traffic: list[Given]) -> dict[str, tuple[int, int, list[str]]]:
    found: dict[str, list[Given]] = defaultdict(list)
    for row in traffic:
        found[f"{row['kind']} along {row['axis']}"].append(row)
    return {
        what: (sum(r["count"] for r in rows), sum(r["bytes"] for r in rows), [r["why"] for r in rows])
        for what, rows in found.items()
    }


def _memory(before: Given, after: Given) -> Iterator[str]:
    for device, new in after["memory"].items():
        old = before["memory"].get(device, {"peak": 0, "roles": {}})
        if old["peak"] != new["peak"]:
            roles = {**old["roles"], **new["roles"]}
            more = {role: new["roles"].get(role, 0) - old["roles"].get(role, 0) for role in roles}
            most = sorted((role for role in more if more[role]), key=lambda role: -abs(more[role]))[:_LISTED]
            listed = ", ".join(f"{_difference(more[role], _size)} for {role}" for role in most)
            yield f"the peak on {device} is {_size(new['peak'])} instead of {_size(old['peak'])}: {listed or 'unused'}"


def _passes(before: Given, after: Given) -> Iterator[str]:
    """Passes that one of them has alone, or that did something else."""
    old, new = _done(before), _done(after)
    other = [each for each in {**old, **new} if old.get(each) != new.get(each)]
    for each in other[:_LISTED]:
        yield f"{each}: {new.get(each, 'not run')} instead of {old.get(each, 'not run')}"
    if len(other) > _LISTED:
        yield f"{len(other) - _LISTED} more passes did something else"


def _done(report: Given) -> dict[str, str]:
    """The outcome of each pass by name, in turn where it runs more than once."""
    found: dict[str, list[str]] = defaultdict(list)
    for each in report["passes"]:
        found[each["stage"].partition("_")[2]].append(each["did"])
    return {name: ", then ".join(did) for name, did in found.items()}


def _difference(amount: float, written: Any) -> str:
    return f"{written(abs(amount))} {'more' if amount > 0 else 'less'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _size(size: float) -> str:
    unit, name = next((each for each in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if size >= each[0]), (1, "bytes"))
    return f"{size / unit:.4g} {name}"
