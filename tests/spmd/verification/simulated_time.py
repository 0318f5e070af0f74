"""Threads with random delays in simulated time: the thread whose delay ends first goes on, and no other.

So a seed decides the interleaving, and a run can be repeated. All threads hold one lock while they run.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable, Sequence

from passes import SpmdError

Work = Callable[[], None]


class StoppedError(SpmdError):
    """Another thread has failed, or all wait for each other."""


class Moment:
    """Something that happens once, as an event that was recorded does."""

    def __init__(self) -> None:
        self.is_over = False
        self.waiting: list[threading.Condition] = []


class SimulatedTime:
    """The turn of one thread after the other."""

    def __init__(self, seed: int) -> None:
        self._random, self._lock, self._me = random.Random(seed), threading.Lock(), threading.local()
        self._now, self._pushed = 0.0, 0
        self._delayed: list[tuple[float, int, threading.Condition]] = []
        self._all: list[threading.Condition] = []
        self._turn: threading.Condition | None = None
        self._error: BaseException | None = None

    def run(self, works: Sequence[Work]) -> None:
        """Run each in a thread of its own, to the end. Raises what the first raises that fails."""
        self._all = [threading.Condition(self._lock) for _ in works]
        threads = [threading.Thread(target=self._run, args=pair) for pair in zip(works, self._all, strict=True)]
        for thread in threads:
            thread.start()
        with self._lock:
            for each in self._all:
                self._delay(each)
            self._pass_on()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, work: Work, me: threading.Condition) -> None:
        self._me.condition = me
        with self._lock:
            try:
                self._await_turn()
                work()
            except BaseException as error:
                self._stop(error)
            self._all.remove(me)
            self._pass_on()

    def sleep(self) -> None:
        """Let others go on for a random time."""
        self._delay(self._me.condition)
        self._pass_on()
        self._await_turn()

    def wait(self, moment: Moment) -> None:
        """Block until something has happened."""
        while not moment.is_over:
            moment.waiting.append(self._me.condition)
            self._pass_on()
            self._await_turn()

    def happen(self, moment: Moment) -> None:
        """Let it happen: who waits for it goes on some time later."""
        moment.is_over = True
        for each in moment.waiting:
            self._delay(each)
        moment.waiting.clear()

    def _delay(self, thread: threading.Condition) -> None:
        self._pushed += 1
        late = self._random.random() ** 6  # most delays are short and a few long, so that a thread falls far behind
        heapq.heappush(self._delayed, (self._now + late, self._pushed, thread))

    def _pass_on(self) -> None:
        """Give the turn to the thread whose delay ends first."""
        if self._delayed:
            self._now, _, self._turn = heapq.heappop(self._delayed)
            self._turn.notify()
        elif self._all:
            self._stop(StoppedError("all streams wait: no event that one of them waits for can happen any more"))

    def _await_turn(self) -> None:
        me = self._me.condition
        while self._turn is not me:
            if self._error is not None:
                raise StoppedError("another thread has failed")
            me.wait()
        if self._error is not None:
            raise StoppedError("another thread has failed")

    def _stop(self, error: BaseException) -> None:
        self._error = self._error or error
        for each in self._all:
            each.notify()
