"""Faults at chosen nodes of a program: a rank raises, is killed, stops for a while, or is slow.

``FaultPoints`` is a pass that calls ``reach`` before every node, with all ranks' programs the same; ``arm`` chooses the
rank's own fault.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import passes
from passes import Pass, Program
from passes.ir.edit import insert_before


class Injected(Exception):
    """What a fault raises."""


@dataclass
class Fault:
    """``action`` at the node that stands at the fraction ``at`` of the program, once; ``when`` it happened."""

    action: Callable[[], None]
    at: float
    when: float | None = None


_armed: Fault | None = None


def arm(fault: Fault | None) -> None:
    """Let ``fault`` happen in the next call that reaches it; None: no fault."""
    global _armed
    _armed = fault


def reach(k: int, nodes: int) -> None:
    """Called before node ``k`` of so many."""
    if _armed is not None and _armed.when is None and k == min(int(_armed.at * nodes), nodes - 1):
        _armed.when = time.time()
        _armed.action()


@dataclass(frozen=True)
class FaultPoints(Pass):
    """Call ``reach`` before every node."""

    keeps_order: ClassVar[bool] = True

    def rewrite(self, program: Program) -> int:
        """Insert the calls."""
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        for k, node in enumerate(nodes):
            insert_before(node, reach, k, len(nodes), like=None)
        return len(nodes)


def pipeline() -> tuple[Pass, ...]:
    """The default passes, and a fault point before every node of the final program."""
    return (*passes.default(), FaultPoints())


def raises() -> None:
    """Raise an error, as a bug would."""
    raise Injected("injected here")


def interrupts() -> None:
    """Interrupt this rank, as Ctrl-C does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)


def runs_out_of_memory() -> None:
    """Raise what an allocation raises that fails."""
    raise MemoryError


def kills() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def stops(seconds: float = 3.0) -> None:
    """Stop this process, as a debugger or a frozen machine would, and let it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def is_slow(seconds: float = 1.5) -> None:
    """Take longer than others."""
    time.sleep(seconds)
