"""A control group for memory, as a container has: the kernel's own count of what its processes allocate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MOUNTED = Path("/sys/fs/cgroup")
_PEAKS = ("memory.peak", "memory.max_usage_in_bytes")  # of the second version, and of the first


class ControlGroup:
    """A group of processes. What a process has allocated before it enters is not counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def enter(self) -> None:
        """Put this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        """The most bytes that its processes had allocated at a time."""
        found = next(self.folder / name for name in _PEAKS if (self.folder / name).exists())
        return int(found.read_text())


@contextmanager
def control_group() -> Iterator[ControlGroup | None]:
    """A new group inside of this process's; None where none can be made that counts memory."""
    group = None
    for folder in _of_this_process():
        made = folder / f"spmd-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:  # none of that version, or not ours to divide
            continue
        if any((made / name).exists() for name in _PEAKS):
            group = ControlGroup(made)
            break
        made.rmdir()
    try:
        yield group
    finally:
        if group is not None:
            group.folder.rmdir()


def _of_this_process() -> Iterator[Path]:
    """Where this process's group may be, and the root, which is what a container sees of it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _MOUNTED / controllers
            yield root / path.lstrip("/")
            yield root
