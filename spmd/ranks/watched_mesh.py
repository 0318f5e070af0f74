"""A mesh that notes whether anything asks where on it this rank is: what was made without that is the same on all."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from passes import Axis, Mesh


class WatchedMesh:
    """``mesh`` is as the given one; ``was_asked``: whether a coordinate of one of its axes was read."""

    def __init__(self, mesh: Mesh) -> None:
        self._reads: list[str] = []
        self.mesh = Mesh(*(tuple(map(self._watched, axes)) for axes in (mesh.axes, mesh.subgroups)))

    @property
    def was_asked(self) -> bool:
        """Whether what was made with the mesh may be this rank's alone."""
        return bool(self._reads)

    def _watched(self, axis: Axis) -> Axis:
        return _WatchedAxis(**{each.name: getattr(axis, each.name) for each in fields(Axis)}, reads=self._reads)


@dataclass(frozen=True, eq=False, repr=False)
class _WatchedAxis(Axis):
    """Copies, comparisons and prints read the coordinate, too."""

    reads: list[str] = field(default_factory=list)

    def __getattribute__(self, name: str) -> Any:
        if name == "coordinate":
            super().__getattribute__("reads").append(super().__getattribute__("name"))
        return super().__getattribute__(name)
