"""``Progress``: one line on the first rank that says what compiles, why, and how long each stage takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .interpreter.environment import is_set


@dataclass
class Progress:
    """The stages of one compilation, with their ``seconds``.

    On a terminal the line grows with each stage; a log gets one plain line at the end. Nothing is written if ``shown``
    is False, or with ``SPMD_QUIET=1`` in the environment.
    """

    title: str
    shown: bool
    seconds: dict[str, float] = field(default_factory=dict)
    _running: str = ""
    _live: Live | None = None

    @contextmanager
    def show(self) -> Iterator[None]:
        """Show the line for the length of the context, and leave it there."""
        console = Console(stderr=True, soft_wrap=True)
        if not self.shown or is_set("SPMD_QUIET"):
            yield
        elif console.is_terminal:
            # No thread of its own, and no streams of the user's replaced, while a step is traced.
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            with self._live:
                yield
            self._live = None
        else:
            try:
                yield
            finally:
                console.print(self._line())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; of one that fails, the line shows no time."""
        self._running, start = name, time.perf_counter()
        self._refresh()
        yield
        self._running, self.seconds[name] = "", time.perf_counter() - start
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._line(), refresh=True)

    def _line(self) -> Text:
        stages = [f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items()]
        return Text(f"compiling {self.title} ... {', '.join([*stages, *filter(None, [self._running])])}")
