"""Guards on models, optimizers and scalers that a step uses without taking them as arguments: by path and identity."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.amp import GradScaler

from ..call.grad_scaler import Settings
from ..call.paths import Found, Path
from ..call.state import NO_INSTANCES, Arguments


@dataclass
class FoundOwners:
    """The owners found when a program was compiled; keeps none of them alive."""

    paths: list[Path]
    expected: list[weakref.ref[Any]]
    classes: list[type]
    settings: list[Settings | None]  # of scalers
    _holders: list[weakref.ref[Any]] = field(default_factory=list)  # of the objects on the paths

    @classmethod
    def of(cls, arguments: Arguments) -> FoundOwners:
        """Record the owners that ``arguments`` have now."""
        values = [each.value for each in arguments.found]
        settings = list(map(_settings_of, values))
        paths = [each.path for each in arguments.found]
        return cls(paths, list(map(weakref.ref, values)), list(map(type, values)), settings)

    def watch(self, arguments: Arguments, gone: Callable[[Any], None]) -> None:
        """Call ``gone`` when one of them is gone, or an object that a path leads through."""
        self.expected = [weakref.ref(each.value, gone) for each in arguments.found]
        self._holders = [weakref.ref(holder, gone) for holder in holders_of(arguments)]

    def complete(self, given: Arguments) -> Arguments | None:
        """The arguments of a call with what was found; None if something else stands at the end of a path now."""
        found = []
        for path, expected, cls, settings in zip(self.paths, self.expected, self.classes, self.settings, strict=True):
            value = path.get(given.leaves)
            if value is None or value is not expected() or type(value) is not cls:
                return None
            if settings is not None and _settings_of(value) != settings:
                return None
            found.append(Found(path, value))
        return given.with_found(found)

    def difference(self, arguments: Arguments) -> str:
        """The first of them that is not what it was, or nothing; ``arguments`` were searched anew."""
        for path, expected, settings in zip(self.paths, self.expected, self.settings, strict=True):
            value = path.get(arguments.leaves)
            if value is None or value is not expected():
                return f"{path.name} is another object" if value is not None else f"{path.name} is gone"
            if settings != _settings_of(value):
                return f"{path.name}: {settings} -> {_settings_of(value)}"
        now, before = [each.name for each in arguments.found], [path.name for path in self.paths]
        return "" if now == before else f"what the step uses besides its arguments: {before} -> {now}"


def _settings_of(value: Any) -> Settings | None:
    return Settings.of(value) if isinstance(value, GradScaler) else None


def holders_of(arguments: Arguments) -> list[Any]:
    """The objects that paths lead through and that hold what was found: no containers, functions or classes."""
    passed = [value for each in arguments.found for value in [*each.path.walk(arguments.leaves)][:-1]]
    holders = {id(value): value for value in passed if _can_be_gone(value)}
    return list(holders.values())


def _can_be_gone(value: Any) -> bool:
    """Whether a value is an object of the user's that can be referred to weakly."""
    return type(value).__weakrefoffset__ != 0 and not isinstance(value, (type, *NO_INSTANCES))
