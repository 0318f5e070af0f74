"""Advice to shrink the peak of memory: for each kind of value that lives then, the option that makes it smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .state import Held

_WORTH = 0.05  # of the peak: less is not named

_SHARD_STATE = {
    "parameters": 'DataParallel("fully_shard") leaves each rank a part of every parameter',
    "gradients": 'DataParallel("fully_shard") leaves each rank a part of every gradient',
    "optimizer state": 'DataParallel("replicate", shard_optimizer=True), or "fully_shard", splits it over the ranks',
}
_OTHERWISE = {
    "parameters": "they are split already: more ranks split them further, spmd.OffloadPolicy keeps them in host memory",
    "gradients": "they are split already, and live until the update, which comes last: more ranks split them further",
    "optimizer state": "it is split already: spmd.OffloadPolicy keeps it in host memory, or choose a leaner optimizer",
    "gathered": "parameters made whole for a unit: smaller units (units=), limit_gathers=, prefetch=(0, 0), and "
    "reshard_after_forward=True keep fewer of them at once",
    "activations": "torch.utils.checkpoint around each block computes them again in backward instead of keeping them; "
    "they also shrink with the rows of a rank's batch",
    "other": "the batch, buffers, constants, and what the update computes: fewer rows per rank, or a leaner optimizer",
    "unused": "reserved for another moment of the step, when more of the arena is in use: it goes with what lives then",
    "offloaded": "in host memory already",
}


@dataclass(frozen=True)
class Advice:
    """``bytes`` of what lives at the peak hold ``role``; ``text``: the advice; ``saves``: the most that it may save."""

    role: str
    bytes: int
    text: str
    saves: int = 0


def advice(memory: Mapping[str, Any], inputs: Sequence[Held], axes: Sequence[tuple[str, int]]) -> list[Advice]:
    """For one device's planned memory, largest first."""
    roles = {**memory["roles"], "unused": memory["unused"]}
    worth = [(role, count) for role, count in roles.items() if count > _WORTH * memory["peak"]]
    ranks = max((size for _, size in axes), default=1)
    whole = {role: _share_held_whole(inputs, role) for role in ("parameter", "optimizer state")}
    found = []
    for role, count in sorted(worth, key=lambda each: -each[1]):
        share = whole["optimizer state" if role == "optimizer state" else "parameter"]
        if role in _SHARD_STATE and share > 0.5 and ranks > 1:
            found.append(Advice(role, count, _SHARD_STATE[role], int(count * share * (1 - 1 / ranks))))
        else:
            found.append(Advice(role, count, _OTHERWISE.get(role, "")))
    return found


def _share_held_whole(inputs: Sequence[Held], role: str) -> float:
    """The part of the elements of a kind of state that every rank holds."""
    state = [each for each in inputs if each.role == role]
    whole = sum(each.elements for each in state if all(dim < 0 for dim in each.split))
    return whole / (sum(each.elements for each in state) or 1)
