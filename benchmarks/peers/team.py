"""A team: the processes of one system, forked from this one, which execute orders.

Each answers an order with ``("done", result)`` or ``("failed", message)``. Nothing here imports spmd: what a process
imports is up to its spec.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any, Protocol

TIMEOUT = 1800.0  # seconds for one order; a deep model takes minutes to compile on a busy machine
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


class Spec(Protocol):
    """Describes one process of a team."""

    def start(self) -> object:
        """In that process: an object whose methods are the orders."""
        ...


def serve(spec: Spec, orders: connection.Connection) -> None:
    """Execute orders until the connection is closed; the body of a process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends its ranks
    logging.disable(logging.WARNING)  # those of torch.compile would interrupt the table
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends them in any case
    rank = spec.start()
    while True:
        name, arguments = orders.recv()
        try:
            orders.send(("done", getattr(rank, name)(*arguments)))
        except Exception as raised:
            orders.send(("failed", _first_line(raised)))


def _first_line(raised: Exception) -> str:
    lines = str(raised).strip().splitlines()
    return f"{type(raised).__name__}: {lines[0] if lines else 'no message'}"


def bind_core(rank: int) -> None:
    """Bind this process to one core of those it has, as if each rank had a machine."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


class SystemFailedError(Exception):
    """A system that cannot go on, and why, in a sentence."""


class Team:
    """One process for each rank. All execute an order at the same time."""

    def __init__(self, specs: Sequence[Spec]) -> None:
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
def teams(specs: Mapping[str, Sequence[Spec]]) -> Iterator[dict[str, Team]]:
    """Start a team for each name. All processes end with the context."""
    started: dict[str, Team] = {}
    try:
        for name, each in specs.items():
            started[name] = Team(each)
        yield started
    finally:
        for team in started.values():
            team.end()
