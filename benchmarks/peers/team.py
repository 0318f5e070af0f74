"""A team: the processes of one system, forked from a process that has imported everything."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

from .rank import RankSpec, serve

TIMEOUT = 1800.0  # seconds for one order; a deep model takes minutes to compile on a busy machine


class SystemFailedError(Exception):
    """A system that cannot go on, and why, in a sentence."""


class Team:
    """One process for each rank. All execute an order at the same time."""

    def __init__(self, specs: list[RankSpec]) -> None:
        context = multiprocessing.get_context("fork")
        self._orders: list[connection.Connection] = []
        self._processes = []
        for spec in specs:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(spec, theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)

    def order(self, name: str, *arguments: Any) -> list[Any]:
        """Give an order; returns the answers, by rank. If one fails, ends the team and raises ``SystemFailedError``."""
        try:
            for orders in self._orders:
                orders.send((name, arguments))
            return self._answers()
        except (SystemFailedError, OSError, EOFError) as failed:
            self.end()
            raise SystemFailedError(str(failed) or "a rank ended without an answer") from failed

    def _answers(self) -> list[Any]:
        """Receive answers as they come, since ranks that wait for one that failed never answer."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._orders):
            ready = connection.wait([orders for i, orders in enumerate(self._orders) if i not in answers], TIMEOUT)
            if not ready:
                raise SystemFailedError(f"no answer for {TIMEOUT:.0f} seconds")
            for rank, orders in enumerate(self._orders):
                if orders in ready:
                    state, answers[rank] = orders.recv()
                    if state == "failed":
                        raise SystemFailedError(f"rank {rank}: {answers[rank]}")
        return [answers[rank] for rank in sorted(answers)]

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@contextmanager
def teams(specs: dict[str, list[RankSpec]]) -> Iterator[dict[str, Team]]:
    """Start a team for each name. All processes end with the context."""
    started: dict[str, Team] = {}
    try:
        for name, each in specs.items():
            started[name] = Team(each)
        yield started
    finally:
        for team in started.values():
            team.end()
