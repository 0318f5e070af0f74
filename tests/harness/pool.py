"""A pool of gloo ranks for the whole test session.

A job is a top-level function ``job(rank, world, *args)`` of a test module; ``Ranks.run`` calls it on every rank and
returns what each rank returned. Processes are forked from one server that imports torch and has compiled before
(``warm.py``); each job gets a process group of its own, so that one pool serves every world size. An error on a rank
comes back as ``RankError`` with that rank's traceback; a rank that hangs is named, with its stack. A process that
failed is replaced, so that it cannot harm the next job. Workers may live on hosts of a network, in turn; a job's ranks
are those of the first host, then those of the next, as a launcher numbers them.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .worker import Done, Failed, Outcome, Task, packed, serve, unpacked

if TYPE_CHECKING:
    from benchmarks.peers.network import Network

PRELOADED = ["tests.harness.worker", "tests.harness.warm"]  # by the server that forks processes


class RankError(AssertionError):
    """A rank failed; the message has the traceback of the first one."""


@dataclass
class Worker:
    """One process and the pipe to it; ``stacks`` has what it prints to stderr, and its stack on request."""

    process: BaseProcess
    pipe: Connection
    stacks: Path


@dataclass
class Ranks:
    """The pool. Workers start when a job first needs them, on the hosts of ``network`` if there are any."""

    network: Network | None = None
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ranks-")))
    workers: list[Worker] = field(default_factory=list)
    jobs: int = 0

    def run(
        self,
        world: int,
        job: Callable[..., Any],
        *args: Any,
        timeout: float = 240.0,
        grace: float = 10.0,
        process_group: bool = True,
    ) -> list[Any]:
        """Run ``job(rank, world, *args)`` on ``world`` ranks and return every rank's result, in order.

        ``process_group=False`` leaves it to the job to make one. Raises ``RankError`` if a rank raised, died or had
        not answered after ``timeout`` seconds; ``grace`` is what the ranks get to follow once one has failed, and to
        report a collective that gave up at ``timeout``.
        """
        while len(self.workers) < world:
            self.workers.append(self._start(len(self.workers)))
        self.jobs += 1
        store = self.folder / f"store-{self.jobs}" if process_group else None
        numbers = self._workers_of(world)
        for rank, number in enumerate(numbers):
            task = Task(rank, world, store, timeout, packed((job, args)))
            self.workers[number].pipe.send_bytes(packed((sys.path, task)))
        outcomes = self._collect(numbers, timeout, grace)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        if failures:
            raise RankError(_summary(outcomes, min(failures, key=lambda failure: failure.when)))
        return [unpacked(outcome.value) for outcome in outcomes if isinstance(outcome, Done)]

    def renew(self) -> None:
        """Replace every worker by a new process."""
        for rank in range(len(self.workers)):
            self._replace(rank)

    def close(self) -> None:
        """End every worker and remove what they wrote."""
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(5)
            worker.process.kill()
        self.workers.clear()
        shutil.rmtree(self.folder)

    def _workers_of(self, world: int) -> list[int]:
        """The number of each rank's worker: with two hosts, the even ones are on the first."""
        hosts = max(1, len(self.network.hosts)) if self.network else 1
        return sorted(range(world), key=lambda number: number % hosts)

    def _start(self, number: int) -> Worker:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ours, theirs = context.Pipe()
        stacks = self.folder / f"stacks-{number}"
        given = (theirs, stacks, self.network, number)
        process = context.Process(target=serve, args=given, name=f"worker {number}", daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, stacks)

    def _collect(self, numbers: list[int], timeout: float, grace: float) -> list[Outcome]:
        """The outcome of each of these workers."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout + grace
        while len(outcomes) < len(numbers):
            pipes = {self.workers[number].pipe: number for number in numbers if number not in outcomes}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes |= {number: self._give_up(number, timeout) for number in pipes.values()}
            for pipe in ready:
                number = pipes[pipe]  # type: ignore[index]
                outcomes[number] = self._receive(number)
                if isinstance(outcomes[number], Failed):
                    deadline = min(deadline, time.monotonic() + grace)
        return [outcomes[number] for number in numbers]

    def _receive(self, number: int) -> Outcome:
        worker = self.workers[number]
        try:
            outcome = unpacked(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(30)
            text = f"the process died with exit code {worker.process.exitcode}\n{worker.stacks.read_text()}".strip()
            outcome = Failed(text, 0.0)  # the others may have reported the loss of its connection before
        assert isinstance(outcome, (Done, Failed))
        if isinstance(outcome, Failed) or outcome.is_worn:
            self._replace(number)  # a transport that gave up in the middle may have left anything behind
        return outcome

    def _give_up(self, number: int, timeout: float) -> Failed:
        """Kill a rank that hangs, after it has written its stack."""
        worker = self.workers[number]
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # its signal handler writes the stack
        stack = worker.stacks.read_text()
        self._replace(number)
        return Failed(f"no answer within {timeout:g} s (nor soon after another rank failed); it was in\n{stack}")

    def _replace(self, number: int) -> None:
        self.workers[number].process.kill()
        self.workers[number].process.join()
        self.workers[number].pipe.close()
        self.workers[number] = self._start(number)


def _summary(outcomes: list[Outcome], first: Failed) -> str:
    """The first failure and ranks that hang in full, and one line for each of the others."""
    lines = []
    for rank, outcome in enumerate(outcomes):
        if outcome is first:
            lines.insert(0, f"rank {rank} of {len(outcomes)} failed first: {outcome.text}")
        elif isinstance(outcome, Failed):
            hangs = outcome.when == float("inf")
            lines.append(f"rank {rank}: {outcome.text if hangs else outcome.text.strip().splitlines()[-1]}")
    return "\n".join(lines)
