"""Text to train on, as bytes: the source of Python's standard library, or any file or folder.

In: a path and a number of bytes. Out: a ``Corpus`` of training and held-out text, the same on every rank and in every
run. Nothing here knows about training; a byte is a token.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

BLOCK = 1 << 16  # bytes; the text is divided into training and held-out text in pieces of this size
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Training text and held-out text."""

    train: bytes
    held_out: bytes


def load(path: Path | None = None, limit: int | None = None) -> Corpus:
    """Read the first ``limit`` bytes under ``path`` (the standard library if None) and hold a tenth of them out.

    Raises ``FileNotFoundError`` if there is no such path and ``ValueError`` if there is too little text in it.
    """
    folder = path or Path(sysconfig.get_path("stdlib"))
    if not folder.exists():
        raise FileNotFoundError(f"there is no text at {folder}: give --text a file or a folder that exists")
    files = [folder] if folder.is_file() else files_under(folder, suffix=".py" if path is None else "")
    return divide(read(files, limit), folder)


def files_under(folder: Path, suffix: str = "") -> list[Path]:
    """All files below ``folder`` whose names end in ``suffix``, sorted."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith(".")]
        found += [Path(parent, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def read(files: list[Path], limit: int | None = None) -> bytes:
    """The files' bytes one after the other, cut off after ``limit``."""
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if limit is not None and len(text) >= limit:
            return bytes(text[:limit])
    return bytes(text)


def divide(text: bytes, origin: Path) -> Corpus:
    """Hold out every tenth block, so that both parts hold a bit of everything (a short text has shorter blocks)."""
    block = min(BLOCK, len(text) // 10)
    if block == 0:
        raise ValueError(f"the {len(text)} bytes of text in {origin} are too few to learn from")
    blocks = [text[start : start + block] for start in range(0, len(text), block)]
    held_out = blocks[9::10]
    del blocks[9::10]
    return Corpus(b"".join(blocks), b"".join(held_out))


def table_bits(corpus: Corpus) -> float:
    """The naive baseline: bits per held-out byte under the byte frequencies of the training text."""
    seen, asked = Counter(corpus.train), Counter(corpus.held_out)
    total = len(corpus.train) + 256  # every byte counts as seen once more, so that none is impossible
    bits = sum(count * -math.log2((seen[byte] + 1) / total) for byte, count in asked.items())
    return bits / len(corpus.held_out)
