"""The inputs of a step, and how the ranks hold them: read from the text of a partitioned program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_INPUT = re.compile(
    r"^    \w+: \"[^\"]*\",  # (?P<role>[\w -]+?) (?P<name>\S+): (?P<dtype>\w+)\[(?P<shape>[\d, ]*)\] as "
    r"(?P<placement>\w+\(.*?\)(?:, \w+\(.*?\))*)"
)
_SHARD = re.compile(r"(?:Shard|_StridedShard|Interleaved|Mirrored)\(dim=(-?\d+)")


@dataclass(frozen=True)
class Held:
    """A parameter, a buffer, or another input: its global shape, and the dim that is split along each axis, or -1."""

    role: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: tuple[str, ...]
    split: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements of the whole tensor."""
        found = 1
        for size in self.shape:
            found *= size
        return found


def inputs_of(text: str) -> Iterator[Held]:
    """The tensors among the inputs of a printed program that has been partitioned."""
    for line in text.partition("def program(")[2].partition("\n):")[0].splitlines():
        if found := _INPUT.match(line):
            shape = tuple(int(size) for size in found["shape"].split(", ") if size)
            placement = tuple(re.findall(r"\w+\([^)]*\)", found["placement"]))
            split = tuple(int(dim[1]) if (dim := _SHARD.match(each)) else -1 for each in placement)
            yield Held(found["role"], found["name"], found["dtype"], shape, placement, split)


def axes_of(mesh: str) -> list[tuple[str, int]]:
    """The names and sizes of a mesh as reports print it: ``dp=2 x tp=4``."""
    return [(name, int(size)) for name, size in re.findall(r"(\S+)=(\d+)", mesh)]
