"""``known.txt``: rows that are known to differ, until what makes them differ is mended."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .dimensions import Row

FILE = Path(__file__).with_name("known.txt")


@dataclass(frozen=True)
class Known:
    """A line: the day, the values that a row needs to differ so, and a part of each line that is found then."""

    day: str
    values: Row
    sentence: str

    @classmethod
    def of(cls, line: str) -> Known:
        """``2026-11-30 | mesh=3, cache=warm | a part of the sentence``."""
        day, values, sentence = (each.strip() for each in line.split("|", 2))
        return cls(day, values_of(values), sentence)


def values_of(text: str) -> Row:
    """``mesh=3, clears=each second, clipped``: a value may have a comma."""
    return dict(re.findall(r"(\w+)=(.*?)(?=,\s*\w+=|$)", text.strip()))


def known(path: Path = FILE) -> list[Known]:
    """The lines of the file that are no comments."""
    return [Known.of(line) for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


def is_known(row: Row, found: list[str], listed: Iterable[Known]) -> bool:
    """Whether each line that was found in a row is one that is listed."""
    own = [each for each in listed if each.values.items() <= row.items()]
    return all(any(each.sentence in line for each in own) for line in found)
