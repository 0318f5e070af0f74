"""The folder of the cache: an entry is a folder of files, with a manifest that has the hash of each.

It is private to its user: what is read decides what a step computes, and has libraries of kernels, which run. Entries
are written beside their place and renamed, so that there are whole ones only; the least recently used go first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .not_cached import NotCachedError

MANIFEST = "spmd-entry.json"  # what else lies in the folder has none, and is not ours to remove
_TEMPORARY = ".writing-"
_OLD = 3600  # seconds after which what a process was writing is taken for left behind


class RefusedFolderError(ValueError):
    """The folder of a cache is not private to its user."""


@dataclass(frozen=True)
class Folder:
    """The folder at ``path``, of at most ``limit`` bytes."""

    path: Path
    limit: int = 5_000_000_000

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Make the folder if it is not there. Raises ``RefusedFolderError`` if somebody else can write there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        check_private(path)
        return cls(path)

    def entries(self, key: str = "") -> list[Path]:
        """The entries with a key, or all; those used last first. Anything else in the folder is none."""
        found = [(_used(path), path) for path in self.path.glob(f"{key}*") if not path.name.startswith(".")]
        return [path for used, path in sorted(found, reverse=True) if used]

    def read(self, entry: Path) -> dict[str, bytes]:
        """The files of an entry, by name. Raises ``NotCachedError`` if it is not as it was written."""
        check_private(entry)
        manifest = _read(entry / MANIFEST)
        digest, _, text = manifest.partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise NotCachedError(f"{entry / MANIFEST} is damaged")
        described = json.loads(text)
        if described["entry"] != entry.name:
            raise NotCachedError(f"{entry} is the entry {described['entry']} under another name")
        files = {name: _read(entry / name) for name in described["files"]}
        for name, content in files.items():
            if hashlib.sha256(content).hexdigest() != described["files"][name]:
                raise NotCachedError(f"{entry / name} is damaged")
        return files

    def touch(self, entry: Path) -> None:
        """Note that an entry was used."""
        with suppress(OSError):
            os.utime(entry / MANIFEST)

    def write(self, name: str, files: Mapping[str, bytes]) -> None:
        """Write an entry, unless there is one of this name. Raises ``OSError``; then nothing is left of it."""
        place = self.path / name
        temporary = self.path / f"{_TEMPORARY}{uuid.uuid4().hex}"
        digests = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        text = json.dumps({"entry": name, "files": digests}, indent=1).encode()
        manifest = hashlib.sha256(text).hexdigest().encode() + b"\n" + text
        try:
            temporary.mkdir(mode=0o700)
            for file, content in {**files, MANIFEST: manifest}.items():
                _write(temporary / file, content)
            os.rename(temporary, place)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if not place.is_dir():
                raise
        self.tidy()

    def tidy(self) -> None:
        """Remove what processes that ended had begun to write, and the entries used longest ago beyond the limit."""
        for path in self.path.glob(f"{_TEMPORARY}*"):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > _OLD:
                    shutil.rmtree(path, ignore_errors=True)
        total = 0
        for entry in self.entries():
            total += size_of(entry)
            if total > self.limit:
                remove(entry)


def check_private(path: Path) -> None:
    """Raise ``RefusedFolderError`` unless ``path`` is a folder of this user that nobody else can write to."""
    found = path.lstat()
    why = ""
    if not stat.S_ISDIR(found.st_mode):
        why = "is a link" if stat.S_ISLNK(found.st_mode) else "is no folder"
    elif found.st_uid != os.geteuid():
        why = f"belongs to the user {found.st_uid}, and not to {os.geteuid()}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"can be written to by others (its mode is {stat.S_IMODE(found.st_mode):o})"
    if why:
        raise RefusedFolderError(
            f"expected a folder for compiled steps that is private to you, but {path} {why}: name another one by "
            "SPMD_CACHE or cache=, or make that one private (chmod 700)"
        )


def remove(entry: Path) -> None:
    """Remove an entry: first under another name, so that nobody reads a part of it."""
    gone = entry.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    with suppress(OSError):
        os.rename(entry, gone)
        shutil.rmtree(gone, ignore_errors=True)


def size_of(entry: Path) -> int:
    """The bytes of an entry."""
    return sum(_sizes(entry))


def _sizes(entry: Path) -> Iterator[int]:
    with suppress(OSError):
        for path in entry.iterdir():
            yield path.lstat().st_size


def _used(entry: Path) -> float:
    try:
        return (entry / MANIFEST).lstat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> bytes:
    """The content of a file; links are not followed."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        raise NotCachedError(f"{path} cannot be read: {error}") from error


def _write(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as opened:
        opened.write(content)
