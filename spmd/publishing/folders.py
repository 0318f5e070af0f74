"""The folder in memory that a model is published to, and the process that owns it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passes import SpmdError

from ..checkpoints.folders import write_whole

MEMORY = Path("/dev/shm")
OWNER, NEWEST = "owner", "newest.json"
_OURS = re.compile(r"owner|newest\.json(\.partial)?|layout-[0-9a-f]+\.json(\.partial)?|[0-9a-f]{16}-\d+-\d+")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_SECONDS = 1.0  # for which a reader that looks whether the owner lives may hold the lock, and more


def folder_of(to: Any) -> Path:
    """The folder that a user gave. Raises ``TypeError`` or ``ValueError`` for one that is not in this host's memory."""
    if not isinstance(to, (str, os.PathLike)):
        raise TypeError(f"expected to= to be a name or a path, got {to!r}")
    text = os.fspath(to)
    if "://" in text:
        raise ValueError(
            f"expected to= to be a name, or a path to a folder in memory of this host, got {text!r}: weights are "
            "published on one host"
        )
    folder = Path(os.path.normpath(MEMORY / text))
    if not text or folder.parent == folder or folder == MEMORY or MEMORY.is_relative_to(folder):
        raise ValueError(f"expected to= to be a name such as 'policy', or a path in memory, got {text!r}")
    kind = _file_system(folder)
    if kind not in _IN_MEMORY:
        raise ValueError(
            f"expected to= to be in memory, but {folder} is on {kind}: pass a name such as 'policy', for a folder in "
            f"{MEMORY}, or a path on a tmpfs. To a disk, spmd.save and spmd.export write"
        )
    return folder


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, or would be."""
    held = next(each for each in (folder, *folder.parents) if each.exists()).resolve()
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:  # another system than Linux
        return "a system without /proc"
    kinds = {Path(where.replace("\\040", " ")): kind for _, where, kind, *_ in mounts}
    return next((kinds[each] for each in (held, *held.parents) if each in kinds), "an unknown file system")


@dataclass
class Owner:
    """This process as the owner of a folder. ``run``: its token; ``version``: the last one of earlier owners."""

    folder: Path
    file: int
    run: str
    version: int

    @classmethod
    def claim(cls, folder: Path) -> Owner:
        """Take a folder, and remove what an owner has left that has ended.

        Raises ``SpmdError`` where the owner lives, or the folder holds something else.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.geteuid():
                raise SpmdError(f"expected a folder of this user, but {folder} is another one's: pass another name")
            strange = sorted(each.name for each in folder.iterdir() if not _OURS.fullmatch(each.name))
            if strange:
                raise SpmdError(
                    f"expected a folder for published weights, but {folder} holds {', '.join(strange[:3])}, which "
                    "spmd.publish did not write: pass another"
                )
            file = _locked(folder / OWNER)
        except OSError as error:
            raise SpmdError(f"expected a folder that can be written to, but {folder} is none: {error}") from error
        try:
            newest = read_newest(folder)
        except SpmdError:  # damaged
            newest = None
        owner = cls(folder, file, secrets.token_hex(8), newest.version if newest is not None else 0)
        owner._remove(keeps=OWNER)
        os.truncate(file, 0)
        os.pwrite(file, f"{os.getpid()} {owner.run}".encode(), 0)
        return owner

    def release(self) -> None:
        """Remove everything, and the folder: no version comes any more. Readers keep what they have mapped."""
        self._remove(keeps=None)
        with suppress(OSError):
            self.folder.rmdir()
        os.close(self.file)

    def publish(self, newest: Newest) -> None:
        """Make a version the newest one, in one move."""
        try:
            write_whole(self.folder / NEWEST, json.dumps(vars(newest)).encode())
        except FileNotFoundError as error:
            raise SpmdError(
                f"{self.folder} is gone: somebody has removed it, though this run publishes there. Call withdraw() of "
                "the last handle on all ranks to begin anew"
            ) from error
        for each in self.folder.glob("layout-*.json"):
            if each.name != layout_name(newest.layout):
                each.unlink(missing_ok=True)

    def forget(self) -> None:
        """Leave the folder to the process that this one was forked from."""
        os.close(self.file)

    def _remove(self, keeps: str | None) -> None:
        (self.folder / NEWEST).unlink(missing_ok=True)  # first: what it names is there
        for each in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            if each.name != keeps and _OURS.fullmatch(each.name):
                each.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """The file of an owner, locked. Raises ``SpmdError`` where another process holds it."""
    deadline = time.monotonic() + _SECONDS
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_ino == os.stat(path).st_ino:
                return file
        except FileNotFoundError:  # its owner has just removed it
            pass
        except BlockingIOError:
            if time.monotonic() > deadline:
                process, *_ = os.pread(file, 64, 0).decode(errors="replace").split() or ["another"]
                os.close(file)
                raise SpmdError(
                    f"expected a folder of this run alone, but process {process} publishes to {path.parent}: pass "
                    "another name, or end that process"
                ) from None
            time.sleep(0.01)
        os.close(file)


def check_seen(folder: Path, run: str) -> None:
    """Raise ``SpmdError`` unless this rank sees the folder that the first rank has claimed."""
    try:
        seen = (folder / OWNER).read_text().split()[1:]
    except OSError:
        seen = []
    if seen != [run]:
        raise SpmdError(
            f"expected all ranks to see {folder} of the first rank, but some do not: they are on another host, or in a "
            "container with memory of its own. Weights are published on one host"
        )


def is_owned(folder: Path) -> bool:
    """Whether a process that lives publishes to a folder."""
    try:
        file = os.open(folder / OWNER, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


@dataclass(frozen=True)
class Newest:
    """The newest version of an owner: ``run`` is its own, ``layout`` a token, ``segments`` file names by rank."""

    run: str
    version: int
    layout: str
    segments: tuple[str, ...]


def read_newest(folder: Path) -> Newest | None:
    """The newest version in a folder; None where there is none. Raises ``SpmdError`` for another file."""
    try:
        content = json.loads((folder / NEWEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damaged(folder / NEWEST) from error
    try:
        run, version, layout, segments = (content[key] for key in ("run", "version", "layout", "segments"))
        names = [each for each in segments if _OURS.fullmatch(each)]
        if type(version) is not int or type(run) is not str or not re.fullmatch("[0-9a-f]{16}", layout):
            raise ValueError(content)
        if len(names) != len(segments):
            raise ValueError(content)
        return Newest(run, version, layout, tuple(names))
    except (LookupError, TypeError, ValueError) as error:
        raise _damaged(folder / NEWEST) from error


def layout_name(token: str) -> str:
    """The file of a layout."""
    return f"layout-{token}.json"


def _damaged(path: Path) -> SpmdError:
    return SpmdError(f"expected weights that spmd.publish wrote, but {path} is another file, or damaged")
