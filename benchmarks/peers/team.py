"""The processes of one system, forked from a process that has imported everything already."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

from .rank import Seat, serve

PATIENCE = 1800.0  # seconds for one order; a compile of a deep model on a busy machine takes minutes


class SystemFailedError(Exception):
    """Why a system cannot go on, in a sentence."""


class Team:
    """One process for each seat. What is ordered, all of them do at the same time."""

    def __init__(self, seats: list[Seat]) -> None:
        context = multiprocessing.get_context("fork")
        self._orders: list[connection.Connection] = []
        self._processes = []
        for seat in seats:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(seat, theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)

    def order(self, name: str, *arguments: Any) -> list[Any]:
        """What each rank answers, in order. Raises ``SystemFailedError``, and ends the team, where one fails."""
        try:
            for orders in self._orders:
                orders.send((name, arguments))
            return self._answers()
        except (SystemFailedError, OSError, EOFError) as failed:
            self.end()
            raise SystemFailedError(str(failed) or "a rank ended without a word") from failed

    def _answers(self) -> list[Any]:
        """As they come, since those who wait for one that failed would never answer."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._orders):
            ready = connection.wait([orders for i, orders in enumerate(self._orders) if i not in answers], PATIENCE)
            if not ready:
                raise SystemFailedError(f"no answer for {PATIENCE:.0f} seconds")
            for rank, orders in enumerate(self._orders):
                if orders in ready:
                    word, answers[rank] = orders.recv()
                    if word == "failed":
                        raise SystemFailedError(f"rank {rank}: {answers[rank]}")
        return [answers[rank] for rank in sorted(answers)]

    def end(self) -> None:
        """Leave nothing running."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@contextmanager
def teams(seats: dict[str, list[Seat]]) -> Iterator[dict[str, Team]]:
    """A team for each name; none of its processes outlives the context."""
    started: dict[str, Team] = {}
    try:
        for name, each in seats.items():
            started[name] = Team(each)
        yield started
    finally:
        for team in started.values():
            team.end()
