"""``Watch``: which values are looked at in which calls, and what the last of these calls gave."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..interpreter.source_lines import warn_user
from .statistics import STATISTICS

Values = dict[str, dict[str, float]]  # by name, then by statistic
ALL = "all"


@dataclass(frozen=True)
class Spec:
    """Some ``statistics`` of the values whose names fit ``pattern``, of each or of all ``as_one``.

    ``if_any``: whether a step may have no such values.
    """

    pattern: str
    statistics: tuple[str, ...]
    as_one: bool
    if_any: bool = False

    def __str__(self) -> str:
        return f"{' and '.join(self.statistics)} of {self.pattern}{' as one' * self.as_one}"


Row = tuple[tuple[str, ...], str]  # a statistic of values in a row: their names, and its own
Watched = tuple[Spec, tuple[str, ...], str]  # the same, with what asks for it


@dataclass(eq=False)
class Watch:
    """Statistics of some values of a step, in every ``every``-th call from the first on; ``step.watch`` makes it.

    ``values`` are those of the last such call that had some, the one of number ``call``, by name and statistic; to look
    at them waits for the call. ``to`` gets them when the next call begins, or when they are looked at, on the first
    rank alone; if it raises, that is warned of, and it gets no more.
    """

    spec: Spec
    every: int
    to: Any = None
    call: int = 0
    is_over: bool = False
    _found: Mapping[Row, Tensor] = field(default_factory=dict)
    _values: Values = field(default_factory=dict)
    _hands_on: bool = False

    @property
    def values(self) -> Values:
        """The statistics by name and statistic; empty before the first call that has some."""
        self.deliver()
        return self._values

    def is_due(self, call: int) -> bool:
        """Whether the call of this number, from 1, is one in which values are looked at."""
        return not self.is_over and (call - 1) % self.every == 0

    def stop(self) -> None:
        """Look at nothing any more; ``values`` stay. Later calls run the programs that do not."""
        self.deliver()
        self.is_over = True

    def take(self, call: int, found: Mapping[Row, Tensor], is_first: bool) -> None:
        """Take what a call gave; nothing waits for it yet. What the one before gave was handed on when it began."""
        self.call, self._found, self._hands_on = call, found, is_first

    def deliver(self) -> None:
        """Wait for what the last call gave, and hand it on."""
        if not self._found:
            return
        values: Values = {}
        for (names, statistic), row in self._found.items():
            for name, value in zip(names, row.tolist(), strict=True):
                values.setdefault(name, {})[statistic] = value
        self._values, self._found = values, {}
        if self.to is None or not self._hands_on:
            return
        try:
            _write(self.to, self.call, values)
        except Exception as error:  # in a call that other ranks have begun
            self.to = None
            raised = f"{type(error).__name__}: {error}"
            text = f"watch({self.spec.pattern!r}) hands on no more values, since to= raised {raised}"
            try:
                warn_user(text)
            except Warning:  # where warnings are errors: this rank alone would miss the call
                print(text, file=sys.stderr)


class Watches:
    """All that is looked at in the calls of one step."""

    def __init__(self) -> None:
        self._all: list[Watch] = []

    def add(self, watch: Watch) -> Watch:
        """Look at it from the next call on."""
        self._all.append(watch)
        return watch

    def specs(self) -> tuple[Spec, ...]:
        """All that some call looks at."""
        return tuple(dict.fromkeys(watch.spec for watch in self._all if not watch.is_over))

    def due(self, call: int) -> tuple[Spec, ...]:
        """Hand on what the call before gave; returns what the call of this number is to look at."""
        for watch in self._all:
            watch.deliver()
        self._all = [watch for watch in self._all if not watch.is_over]
        return tuple(dict.fromkeys(watch.spec for watch in self._all if watch.is_due(call)))

    def take(self, call: int, found: Mapping[Watched, Tensor], is_first: bool) -> None:
        """Take what a call gave. ``is_first``: whether this is the first rank, which hands it on."""
        for watch in self._all if found else ():
            own = {(names, statistic): row for (spec, names, statistic), row in found.items() if spec == watch.spec}
            if own and watch.is_due(call):
                watch.take(call, own, is_first)


def watch_of(pattern: Any, statistics: Sequence[Any], every: Any, as_one: Any, to: Any) -> Watch:
    """Check the arguments of ``step.watch``. Raises ``TypeError`` or ``ValueError`` for what cannot be watched."""
    if not isinstance(pattern, str) or not pattern:
        raise TypeError(f'expected the names to watch as text, such as "*.grad", got {pattern!r}')
    unknown = [each for each in statistics if not isinstance(each, str) or each not in STATISTICS]
    if unknown or not statistics:
        raise ValueError(f"expected statistics among {', '.join(STATISTICS)}, got {', '.join(map(repr, statistics))}")
    if type(every) is not int or every < 1:
        raise ValueError(f"expected every to be a number of calls from 1 on, got {every!r}")
    if type(as_one) is not bool:
        raise TypeError(f"expected as_one to be a bool, got {as_one!r}")
    if to is not None and not callable(to) and not hasattr(to, "add_scalar") and not isinstance(to, (str, Path)):
        raise TypeError(
            f"expected to to be a function of a call's number and values, a SummaryWriter, or the path of a file of "
            f"JSON lines, got {type(to).__name__}"
        )
    return Watch(Spec(pattern, tuple(dict.fromkeys(statistics)), as_one), every, to)


def _write(to: Any, call: int, values: Values) -> None:
    if isinstance(to, (str, Path)):
        with Path(to).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"call": call, "values": values}) + "\n")
    elif hasattr(to, "add_scalar"):
        for name, of in values.items():
            for statistic, value in of.items():
                to.add_scalar(f"{name}/{statistic}", value, call)
    else:
        handed: Callable[[int, Values], object] = to
        handed(call, values)
