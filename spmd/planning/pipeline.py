"""The time of a pipeline: stages of unequal work in the order of their schedule, of which each waits for messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from ..stages.schedules import Schedule, orders, role_of


@dataclass(frozen=True)
class Stage:
    """Seconds of one micro-batch; ``weights``: of ``backward``, gradients of weights. ``kept``: bytes until these."""

    forward: float
    backward: float
    weights: float = 0.0
    kept: float = 0.0


@dataclass(frozen=True)
class Run:
    """Seconds until the last rank is done, and the most bytes that each rank keeps for backward."""

    seconds: float
    kept: tuple[float, ...]


def simulate(schedule: Schedule, ranks: int, count: int, stages: Sequence[Stage], message: float) -> Run:
    """``count`` micro-batches, whose messages arrive ``message`` seconds after they are sent.

    After a few micro-batches all take equally long, so that few are simulated.
    """
    few, more = 2 * ranks, 3 * ranks
    if count <= more:
        return _simulate(schedule, ranks, count, stages, message)
    short, longer = (_simulate(schedule, ranks, each, stages, message) for each in (few, more))
    each = (longer.seconds - short.seconds) / (more - few)
    return Run(longer.seconds + (count - more) * each, longer.kept)


@cache
def in_flight(schedule: Schedule, ranks: int, count: int) -> tuple[int, ...]:
    """The most micro-batches that each rank keeps at once, with one stage each."""
    return tuple(
        round(each) for each in simulate(schedule, ranks, count, [Stage(1.0, 1.0, 0.0, 1.0)] * ranks, 0.0).kept
    )


def _simulate(schedule: Schedule, ranks: int, count: int, stages: Sequence[Stage], message: float) -> Run:
    clocks, held, most, done = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks, list[float]()
    seconds = {name: [_seconds(each, name, schedule) for each in stages] for name in ("forward", "backward", "weights")}
    for rank, part, stage, awaited, keeps in _in_order(schedule, ranks, count, len(stages)):
        starts = clocks[rank]
        if awaited >= 0 and done[awaited] + message > starts:
            starts = done[awaited] + message
        clocks[rank] = ends = starts + seconds[part][stage]
        done.append(ends)
        if keeps:
            held[rank] += keeps * stages[stage].kept
            if held[rank] > most[rank]:
                most[rank] = held[rank]
    return Run(max(clocks), tuple(most))


@lru_cache(maxsize=64)
def _in_order(schedule: Schedule, ranks: int, count: int, stages: int) -> list[tuple[int, str, int, int, int]]:
    """The parts of a pipeline, each behind the one that it awaits.

    Of each: its rank, its name, its stage, the position of what it awaits or -1, and whether it begins to keep values,
    1, or is the last to read them, -1.
    """
    found = orders(schedule, ranks, stages // ranks, count, role_of)
    parts = {role_of(name, k): (name, k) for name in ("forward", "backward", "weights") for k in range(stages)}
    ends = "weights" if schedule == "zb-h1" else "backward"
    positions: dict[tuple[str, int, int], int] = {}  # by part, stage and micro-batch
    reached, listed = [0] * ranks, list[tuple[int, str, int, int, int]]()
    while any(at < len(order) for at, order in zip(reached, found, strict=True)):
        for rank, order in enumerate(found):
            for role, k in order[reached[rank] :]:
                part, stage = parts[role]
                awaited = _awaited(part, stage, k, stages)
                if awaited is not None and awaited not in positions:
                    break
                positions[part, stage, k] = len(listed)
                at = positions[awaited] if awaited is not None else -1
                listed.append((rank, part, stage, at, (part == "forward") - (part == ends)))
                reached[rank] += 1
    return listed


def _awaited(part: str, stage: int, k: int, stages: int) -> tuple[str, int, int] | None:
    """The part that another rank must have sent before this one runs; None if there is none."""
    if part == "forward":
        return ("forward", stage - 1, k) if stage else None
    return ("backward", stage + 1, k) if part == "backward" and stage + 1 < stages else None


def _seconds(stage: Stage, part: str, schedule: Schedule) -> float:
    if part == "backward" and schedule == "zb-h1":
        return stage.backward - stage.weights
    return {"forward": stage.forward, "backward": stage.backward, "weights": stage.weights}[part]
