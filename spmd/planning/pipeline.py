"""The time of a pipeline: stages of unequal work in the order of their schedule, of which each waits for messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ..stages.schedules import Order, Schedule, orders, role_of


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
    found = orders(schedule, ranks, len(stages) // ranks, count, role_of)
    parts = {role_of(name, k): (name, k) for name in ("forward", "backward", "weights") for k in range(len(stages))}
    done: dict[tuple[str, int, int], float] = {}  # by part, stage and micro-batch
    clocks, reached = [0.0] * ranks, [0] * ranks
    while any(at < len(order) for at, order in zip(reached, found, strict=True)):
        for rank, order in enumerate(found):
            for role, k in order[reached[rank] :]:
                part, stage = parts[role]
                awaited = _awaited(part, stage, k, len(stages))
                if awaited is not None and awaited not in done:
                    break
                arrived = done[awaited] + message if awaited is not None else 0.0
                clocks[rank] = max(clocks[rank], arrived) + _seconds(stages[stage], part, schedule)
                done[part, stage, k] = clocks[rank]
                reached[rank] += 1
    return Run(max(clocks), tuple(_most(order, parts, stages, schedule) for order in found))


def _awaited(part: str, stage: int, k: int, stages: int) -> tuple[str, int, int] | None:
    """What another rank must have sent."""
    if part == "forward":
        return ("forward", stage - 1, k) if stage else None
    return ("backward", stage + 1, k) if part == "backward" and stage + 1 < stages else None


def _seconds(stage: Stage, part: str, schedule: Schedule) -> float:
    if part == "backward" and schedule == "zb-h1":
        return stage.backward - stage.weights
    return {"forward": stage.forward, "backward": stage.backward, "weights": stage.weights}[part]


def _most(order: Order, parts: dict[str, tuple[str, int]], stages: Sequence[Stage], schedule: Schedule) -> float:
    """The most bytes at once: from forward of a micro-batch until its last gradients."""
    ends, held, most = "weights" if schedule == "zb-h1" else "backward", 0.0, 0.0
    for role, _ in order:
        part, stage = parts[role]
        held += stages[stage].kept * ((part == "forward") - (part == ends))
        most = max(most, held)
    return most
