"""Two plans beside each other: what of the question, the fastest layout, its time and its memory is other, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MEANT = {
    "compute": "compute",
    "tensor": "collectives along tensor, sequence and experts",
    "gathers": "gathers and reductions of units",
    "pipeline": "idle stages",
    "messages": "messages between stages",
    "reduction": "reduction of replicated gradients",
    "update": "the update",
    "waiting": "waits for the slowest host",
}
_ASKED = {"gpu": "GPU", "gpus": "GPUs", "per_host": "GPUs in a host", "rows": "rows", "tokens_per_row": "tokens a row"}
_NOISE = 0.002  # of the step: causes that differ by less explain nothing


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Sentences on two plans, each as ``Plans.to_dict`` gives it. Raises ``ValueError`` for what is none."""
    try:
        return list(_changes(before, after))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"expected one plan as spmd plan --json prints it, but it has no {error}") from error


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key, meaning in _ASKED.items():
        if before[key] != after[key]:
            yield f"{meaning}: {after[key]} instead of {before[key]}"
    if before["memory"] != after["memory"]:
        yield f"memory of a GPU: {size_of(after['memory'])} instead of {size_of(before['memory'])}"
    if not before["layouts"] or not after["layouts"]:
        for what, plan in (("before", before), ("now", after)):
            yield f"{what}: {plan['layouts'][0]['name'] if plan['layouts'] else plan['missing']}"
        return
    old, new = before["layouts"][0], after["layouts"][0]
    if old["name"] == new["name"] and old["seconds"] == new["seconds"] and old["bytes_by_role"] == new["bytes_by_role"]:
        yield f"the fastest layout, its time and its memory are the same: {new['name']}"
        return
    rate = new["tokens_per_second"] / old["tokens_per_second"]
    difference = longer(old["seconds_by_cause"], new["seconds_by_cause"])
    yield f"{new['name']} takes {duration(new['seconds'])}, {difference}; {rate:.0%} of the tokens a second"
    if old["name"] != new["name"]:
        yield f"before, the fastest was {old['name']}; {_now(old, new, after)}"
    roles = sorted(new["bytes_by_role"], key=lambda role: -abs(new["bytes_by_role"][role] - old["bytes_by_role"][role]))
    more = [(role, new["bytes_by_role"][role] - old["bytes_by_role"][role]) for role in roles[:2]]
    parts = [f"{size_of(abs(n))} {'more' if n > 0 else 'less'} for {role}" for role, n in more if n]
    listed = f": {', '.join(parts)}" if parts else ""
    yield f"memory: {size_of(new['peak_bytes'])} instead of {size_of(old['peak_bytes'])}{listed}"


def _now(old: Mapping[str, Any], new: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A sentence on what became of the layout that was the fastest."""
    same = next((each for each in after["layouts"] if each["name"] == old["name"]), None)
    if same is None:
        return "it is not among those listed now"
    return f"it takes {longer(new['seconds_by_cause'], same['seconds_by_cause'])} now"


def longer(first: Mapping[str, float], other: Mapping[str, float]) -> str:
    """A sentence on the time of a step beside the first one's, by seconds of causes, with the largest of these."""
    more = {k: other[k] - first[k] for k in first}
    took = sum(more.values())
    causes = sorted((k for k, t in more.items() if abs(t) > _NOISE * sum(first.values())), key=lambda k: -abs(more[k]))
    parts = [f"{duration(abs(more[k]))} {'more' if more[k] > 0 else 'less'} for {MEANT[k]}" for k in causes[:2]]
    listed = ", ".join(parts)
    if not listed and abs(took) <= _NOISE * sum(first.values()):
        return "as long"
    return f"{duration(abs(took))} {'longer' if took >= 0 else 'less'}" + (f": {listed}" if listed else "")


def duration(seconds: float) -> str:
    """A time for people."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.1f} ms"


def size_of(size: float) -> str:
    """Bytes for people."""
    unit, name = next((each for each in ((1e9, "GB"), (1e6, "MB")) if abs(size) >= each[0]), (1e3, "KB"))
    return f"{size / unit:.1f} {name}"
