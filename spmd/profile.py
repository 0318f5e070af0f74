"""Measure the nodes of the programs that the next calls of a step run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .lowering.lower import Executable, Timed
from .running.compiled import Compiled


class Profile:
    """``steps`` calls are left to measure, of all programs or of the one of this ``identity``.

    The report of each program that ran gets the medians of its calls.
    """

    def __init__(self, steps: int = 0, identity: int | None = None) -> None:
        if type(steps) is not int or steps < 0:
            raise ValueError(f"expected the number of steps to measure, got {steps!r}")
        self._left, self._identity = steps, identity
        self._compiled: Compiled | None = None  # the program last run
        self._timed: Executable | None = None  # which runs it
        self._calls: dict[int, list[dict[str, float]]] = {}  # by the identity of the program

    @property
    def is_over(self) -> bool:
        """Whether no call is left to measure."""
        return not self._left

    def begin(self, compiled: Compiled) -> Callable[[Sequence[Any]], list[Any]] | None:
        """A function that runs the program and measures it; None if no call is left."""
        if not self._left or self._identity not in (None, compiled.identity):
            return None
        if self._timed is None or self._compiled is not compiled:
            self._close()
            self._compiled = compiled
            self._timed = compiled.executable.timed(compiled.program, compiled.device_mesh.device_type)
        return self._timed

    def end(self, compiled: Compiled) -> None:
        """The call that began has gone well."""
        if self._timed is None or self._compiled is not compiled:
            return
        assert isinstance(self._timed.function, Timed)
        calls = self._calls.setdefault(compiled.identity, [])
        calls.append(self._timed.function.seconds())
        compiled.report = compiled.report.with_measured(compiled.program, calls)
        self._left -= 1
        if not self._left:
            self._close()

    def _close(self) -> None:
        if self._timed is not None:
            self._timed.close_code()
        self._timed = self._compiled = None
