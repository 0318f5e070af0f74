"""The mesh of a row: its axes with their roles, and which rows of the batch each rank has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MESHES: dict[str, tuple[dict[str, int], dict[str, Any] | None]] = {
    "1": ({"dp": 1}, None),
    "2": ({"dp": 2}, None),
    "3": ({"dp": 3}, None),
    "2x2": ({"replicate": 2, "shard": 2}, None),
    "tensor": ({"dp": 2, "tp": 2}, {"batch": "dp", "tensor": "tp"}),
    "sequence": ({"cp": 2}, {"sequence": "cp"}),
    "sequence x batch": ({"dp": 2, "cp": 2}, {"batch": "dp", "sequence": "cp"}),
    "experts": ({"dp": 2}, {"batch": "dp", "experts": "dp"}),
    "stages": ({"pp": 2}, {"stages": "pp"}),
    "stages x batch": ({"pp": 2, "dp": 2}, {"stages": "pp", "batch": "dp"}),
}


def world(values: Mapping[str, str]) -> int:
    """How many ranks a row has."""
    return math.prod(MESHES[values["mesh"]][0].values())


def parts_of(values: Mapping[str, str]) -> list[int]:
    """Which rows of the batch each rank has."""
    return [_part_of(MESHES[values["mesh"]][0], rank) for rank in range(world(values))]


def _part_of(axes: Mapping[str, int], rank: int) -> int:
    """Its place along the axes that split the batch."""
    place, found = rank, 0
    coordinates = {}
    for name, size in reversed(axes.items()):
        place, coordinates[name] = divmod(place, size)
    for name, size in axes.items():
        if name in ("dp", "replicate", "shard"):
            found = found * size + coordinates[name]
    return found
