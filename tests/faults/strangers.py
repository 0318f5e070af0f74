"""Strangers: another process connects to the sockets that ranks listen at, and sends garbage, or nothing."""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_LISTENER = re.compile(r" 00010000 \d+ \d+ +(\d+) @(spmd-\S+)")  # its inode and name, in /proc/net/unix


class Strangers:
    """Connects at random moments while the ``with`` block runs, to any of the processes ``pids()``.

    ``count`` has how often, for the sockets that local ranks connect through and for gloo's.
    """

    def __init__(self, pids: Callable[[], Sequence[int]], seed: int) -> None:
        self.count: Counter[str] = Counter()
        self._pids, self._random = pids, random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._held: list[tuple[float, socket.socket]] = []
        self._known: set[str] = set()

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        next_gloo = 0.0
        while not self._over.wait(0.01):
            for inode, name in _LISTENER.findall(Path("/proc/net/unix").read_text()):
                if inode not in self._known and inode in self._inodes():
                    self._known.add(inode)
                    self._connect("local", socket.AF_UNIX, socket.SOCK_SEQPACKET, f"\0{name}")
            if time.monotonic() > next_gloo:
                next_gloo = time.monotonic() + self._random.uniform(0.1, 2.0)
                self._connect_to_gloo()
            for until, held in list(self._held):
                if time.monotonic() > until:
                    held.close()
                    self._held.remove((until, held))

    def _connect_to_gloo(self) -> None:
        own = self._inodes()
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ports = [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in own]  # listening
        if ports:
            self._connect("gloo", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", self._random.choice(ports)))

    def _connect(self, kind: str, family: int, how: int, address: str | tuple[str, int]) -> None:
        made = socket.socket(family, how)
        with suppress(OSError):
            made.settimeout(1.0)
            made.connect(address)
            if self._random.random() < 0.7:
                made.send(self._random.randbytes(self._random.choice([1, 8, 100, 5_000])))
            self.count[kind] += 1
        self._held.append((time.monotonic() + self._random.uniform(0.0, 8.0), made))

    def _inodes(self) -> set[str]:
        """The sockets of the ranks, by number."""
        found = set()
        for pid in self._pids():
            with suppress(OSError):  # it was killed meanwhile
                for file in os.listdir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        found.add(os.readlink(f"/proc/{pid}/fd/{file}").removeprefix("socket:[").removesuffix("]"))
        return found
