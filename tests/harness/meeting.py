"""What processes meet by: a file that one makes and another waits for, and a port. No sleep is long enough under load.

A test that sleeps until another process has "surely" done its part fails on a machine that is busy for longer.
"""

from __future__ import annotations

import os
import random
import socket
import time
from contextlib import suppress
from pathlib import Path

_ports = iter(random.Random(os.getpid()).sample(range(10_000, 32_768), 1000))


def wait_for(path: Path, seconds: float = 100.0) -> None:
    """Wait until the file is there."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} is not there after {seconds:g} s")
        time.sleep(0.01)


def free_port() -> int:
    """A free port that Linux gives nobody who asks for any: those it gives so are 32768 and more."""
    for port in _ports:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("localhost", port))
            return port
    raise OSError("no port is free")
