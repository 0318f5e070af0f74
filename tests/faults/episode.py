"""One episode of the soak: calls with random faults, from saved state until a rank is killed or the calls are done.

Runs on every rank as a job of the pool. What the rank went through is in a file, since a pool returns nothing where a
rank was killed: a ``Log`` per rank.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import spmd
from spmd.ranks import local_ranks
from tests.harness.cases import MLP

from . import faults
from .faults import Fault, Injected, arm

CASE = MLP(sizes=(15, 7), rows=6, optimizer="SGD momentum")
PATIENCE = 60.0  # seconds to wait for a kill at most
FAULTS: dict[str, Callable[[], None]] = {
    "raise": faults.raises,
    "SIGINT": faults.interrupts,
    "no memory": faults.runs_out_of_memory,
    "SIGSTOP": faults.stops,
    "slow": faults.is_slow,
    "full disk": faults.raises,  # and the call that compiles next dumps to a full disk
    "SIGINT while connecting": faults.raises,  # and the rank is interrupted while the ranks connect and compile
    "kill": faults.kills,
    "kill while connecting": faults.raises,  # and the rank is killed while the ranks connect and compile
}
KINDS = tuple(FAULTS)
KILLS = {"kill", "kill while connecting"}
ENDS_CALL = {kind for kind in KINDS if kind not in ("SIGSTOP", "slow")}


@dataclass(frozen=True)
class Event:
    """A fault of a ``kind`` in one ``call``, on the rank ``victim``, at a fraction ``at`` of the program."""

    call: int
    kind: str
    victim: int
    at: float


@dataclass(frozen=True)
class Episode:
    """The calls ``first`` to ``until``, with their ``events``; the last one may kill its rank."""

    style: str
    transport: str
    first: int
    until: int
    events: tuple[Event, ...]


@dataclass
class Log:
    """What one rank went through: ``messages`` it raised, ``problems``, seconds from each fault until all raised."""

    calls: int = 0
    messages: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: list[tuple[str, float]] = field(default_factory=list)
    disk_warnings: int = 0
    files: int = 0


class Run:
    """One rank's part in an episode. ``folder`` is for saved state, logs and dumps, of all ranks and episodes."""

    def __init__(self, rank: int, world: int, episode: Episode, folder: Path) -> None:
        self.rank, self.world, self.episode, self.folder, self.log = rank, world, episode, folder, Log()
        self._is_in_call = False
        torch.manual_seed(0)
        self.objects = CASE.build()
        if (folder / "state.pt").exists():
            for each, state in zip(self.objects, torch.load(folder / "state.pt"), strict=True):
                each.load_state_dict(state)
        mode = spmd.DataParallel(episode.style)
        self.step = spmd.compile(parallel_mode=mode, passes=faults.pipeline())(CASE.step)

    def run(self) -> None:
        """Make all calls of the episode."""
        events = {event.call: event for event in self.episode.events}
        for k in range(self.episode.first, self.episode.until):
            if k in events:
                self._meet(events[k])
            else:
                self._call(k)
                os.environ.pop("SPMD_DUMP", None)
            self.log.calls += 1
            if events.get(k + 1):
                self._save(to_file=events[k + 1].kind in KILLS)

    def _call(self, k: int) -> None:
        self.step(*self.objects, *CASE.part(self.rank, k))

    def _meet(self, event: Event) -> None:
        """Make the call of an event."""
        before = self._local_state()
        fault = Fault(FAULTS[event.kind], event.at)
        if event.kind == "full disk" and self.rank == 0:
            self._fill_disk()
        if event.kind == "kill":
            fault.action = self._kill
        raised = self._failing(event, fault if self.rank == event.victim else None, before)
        if event.kind == "kill":
            self._end(event.kind, raised)
        elif event.kind in ENDS_CALL:
            self._recover(event.kind, fault, raised)
        if event.kind == "kill while connecting":
            self._kill_while_connecting(event)
        if event.kind == "SIGINT while connecting":
            self._interrupt_while_connecting(event)
        self._assert_equal()

    def _failing(self, event: Event, fault: Fault | None, before: list[torch.Tensor]) -> float:
        """Make a call that may fail, and another one if it ends; returns when it has raised."""
        arm(fault)
        try:
            self._call(event.call)
            if event.kind in ENDS_CALL:
                before = self._local_state()
                self._call(event.call)  # this rank ended the call before, and learns of it now
                self.log.problems.append(f"{event}: no call failed")
        except (spmd.SpmdError, Injected, KeyboardInterrupt, MemoryError) as error:
            raised = time.time()
            self._check_claim(event, error, before)
            return raised
        finally:
            arm(None)
        return time.time()

    def _check_claim(self, event: Event, error: BaseException, before: list[torch.Tensor]) -> None:
        """The message names rank and axis, and what it claims about the state of this rank holds."""
        message = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        self.log.messages.append(message)
        is_own = "its state is" in message
        names_all = re.search(r"along dp, rank \d+ (raised|has ended)|state of the ranks differs", message)
        if not (is_own or (names_all and ("State is" in message or "recover()" in message))):
            self.log.problems.append(f"{event}: {message}")
        claimed = re.search("its state is " if is_own else f"on rank {self.rank} ", message)
        if claimed is not None and message[claimed.end() :].startswith("as before the call"):
            after = self._local_state()
            if len(after) != len(before) or not all(map(torch.equal, before, after)):
                self.log.problems.append(f"{event}: state is not as before the call, as claimed: {message}")

    def _local_state(self) -> list[torch.Tensor]:
        model, optimizer = self.objects
        tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return [t.detach().clone() for t in local]

    def _recover(self, kind: str, fault: Fault, raised: float) -> None:
        times: list[Any] = [None] * self.world
        dist.all_gather_object(times, (fault.when, raised))
        happened = [when for when, _ in times if when is not None]
        if happened:
            self.log.seconds.append((kind, max(when for _, when in times) - max(happened)))
        try:
            self.step.recover()
        except spmd.SpmdError:
            for each, state in zip(self.objects, self.saved, strict=True):
                each.load_state_dict(tree_map(_clone, state))

    def _save(self, to_file: bool) -> None:
        self.saved = tree_map(_clone, [each.state_dict() for each in self.objects])
        if to_file:
            whole = tree_map(_whole, self.saved)
            if self.rank == 0:
                torch.save(whole, self.folder / "state-new.pt")
                os.replace(self.folder / "state-new.pt", self.folder / "state.pt")

    def _assert_equal(self) -> None:
        """All ranks hold the same replicas, or parts after as many updates."""
        texts: list[Any] = [None] * self.world
        whole = [_whole(p).detach().numpy().tobytes() for p in self.objects[0].parameters()]
        dist.all_gather_object(texts, whole)
        if any(text != texts[0] for text in texts):
            self.log.problems.append("replicas differ")

    def _kill(self) -> None:
        (self.folder / "killed").write_text(repr(time.time()))
        faults.kills()

    def _kill_while_connecting(self, event: Event) -> None:
        """The victim is killed at any moment of a call that connects and compiles, or of one after that."""
        if self.rank == event.victim:
            timer = threading.Timer(event.at * 2.0, self._kill)
            timer.daemon = True
            timer.start()
        until = time.time() + PATIENCE
        try:
            while time.time() < until:
                before = self._local_state()
                self._call(event.call)
        except spmd.SpmdError as error:
            raised = time.time()
            self._check_claim(event, error, before)
            self._end(event.kind, raised)
        else:
            self.log.problems.append(f"{event}: nobody was killed")

    def _interrupt_while_connecting(self, event: Event) -> None:
        """The victim is interrupted at any moment of a call that connects and compiles, or not at all."""
        fault = Fault(faults.interrupts, 0.0)
        timer = threading.Timer(event.at * 1.5, self._interrupt, [fault])
        if self.rank == event.victim:
            signal.signal(signal.SIGINT, self._interrupted)
            timer.start()
        before, raised = self._local_state(), 0.0
        try:
            self._is_in_call = True
            self._call(event.call)
        except (spmd.SpmdError, KeyboardInterrupt) as error:
            self._is_in_call, raised = False, time.time()
            self._check_claim(event, error, before)
        finally:
            self._is_in_call = False
            timer.cancel()
        failed = [False] * self.world
        dist.all_gather_object(failed, raised > 0)
        if any(failed):
            raised = raised or self._failing(event, None, before)
            self._recover(event.kind, fault, raised)

    def _interrupt(self, fault: Fault) -> None:
        fault.when = time.time()
        os.kill(os.getpid(), signal.SIGINT)

    def _interrupted(self, *_: Any) -> None:
        if self._is_in_call:
            raise KeyboardInterrupt

    def _end(self, kind: str, raised: float) -> None:
        """The episode ends on this rank: it has raised since another was killed."""
        self.log.calls += 1
        self.log.seconds.append((kind, raised - float((self.folder / "killed").read_text())))
        raise _Ended

    def _fill_disk(self) -> None:
        """Let the dump of the next program meet a full disk."""
        root = self.folder / f"disk-{time.time()}"
        program = root / "step" / f"program-{self.step._dispatch.programs.compiled}"
        program.mkdir(parents=True)
        (program / "report.json").symlink_to("/dev/full")
        os.environ["SPMD_DUMP"] = str(root)


class _Ended(Exception):
    """A rank was killed."""


def run_episode(rank: int, world: int, episode: Episode, folder: Path) -> None:
    """The job."""
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if episode.transport == "messages":
            patched.setattr(local_ranks, "_host", lambda: f"host {rank}")
        run = Run(rank, world, episode, folder)
        try:
            run.run()
        except _Ended:
            pass
        finally:
            os.environ.pop("SPMD_DUMP", None)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the pool has it
            run.log.disk_warnings = sum("is not complete: [Errno 28]" in str(each.message) for each in warned)
            gc.collect()
            run.log.files = len(os.listdir("/proc/self/fd"))
            (folder / f"log-{episode.first}-{rank}.json").write_text(json.dumps(asdict(run.log)))


def plan(seed: int, world: int, style: str, transport: str, calls: int, kinds: Sequence[str]) -> list[Episode]:
    """``calls`` in episodes, with faults of these kinds in turn, at equal distances and in any order."""
    chosen, episodes, first = random.Random(seed), list[Episode](), 0
    events: list[Event] = []
    distance = calls // (len(kinds) + 1)
    for k, kind in enumerate(kinds):
        call = (k + 1) * distance
        events.append(Event(call, kind, chosen.randrange(world), chosen.random()))
        if kind in KILLS:
            episodes.append(Episode(style, transport, first, call + 1, tuple(events)))
            events, first = [], call + 1
    return [*episodes, Episode(style, transport, first, calls, tuple(events))]


def read_log(folder: Path, episode: Episode, rank: int) -> Log | None:
    """The log of a rank; None if it was killed."""
    path = folder / f"log-{episode.first}-{rank}.json"
    return Log(**json.loads(path.read_text())) if path.exists() else None


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
