"""Schedules in files: the action text of torch's ``torch.distributed.pipelining``, a line of commas for each rank.

An action is a stage, what it computes, and a micro-batch: ``2F0`` is forward of stage 2 on the first micro-batch, ``B``
backward, ``I`` and ``W`` its gradients of inputs and of weights apart. Between commas there may be nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from os import PathLike
from pathlib import Path

from passes.ir.bundle import Bundle

from .schedules import Order, role_of

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_LETTERS = {"forward": "F", "backward": "B", "weights": "W"}


@dataclass(frozen=True)
class Actions:
    """For each rank what it computes, in order: parts, stages and micro-batches."""

    of_ranks: tuple[tuple[tuple[str, int, int], ...], ...]

    @classmethod
    def read(cls, path: str | PathLike[str], micro_batches: int) -> Actions:
        """The actions of a file for so many micro-batches. Raises ``ValueError`` unless it computes all, once."""
        rows = [line.split(",") for line in Path(path).read_text().splitlines() if line.strip()]
        found = [[_parsed(each.strip(), path) for each in row if each.strip()] for row in rows]
        splits = any(part in "IW" for row in found for _, part, _ in row)
        parts = {"F": ["forward"], "B": ["backward", "weights"][: 1 + splits], "I": ["backward"], "W": ["weights"]}
        ranks = [tuple((each, s, k) for s, part, k in row for each in parts[part]) for row in found]
        made = cls(tuple(ranks))
        computed = Counter((*each, rank) for rank, row in enumerate(ranks) for each in row)
        stages = range(made.virtual * len(ranks))
        names = ["forward", "backward", *["weights"] * splits]
        complete = Counter((*each, each[1] % len(ranks)) for each in product(names, stages, range(micro_batches)))
        if wrong := sorted((computed - complete) | (complete - computed)):
            raise ValueError(
                f"expected {path} to run stage s on rank s % {len(ranks)}, each part of it once for each of "
                f"{micro_batches} micro-batches, but {wrong[0][0]} of stage {wrong[0][1]} on micro-batch "
                f"{wrong[0][2]}, of rank {wrong[0][3]}, is missing, too much, or on another rank"
            )
        return made

    @property
    def virtual(self) -> int:
        """The number of stages of a rank."""
        stages = 1 + max((stage for row in self.of_ranks for _, stage, _ in row), default=0)
        return -(-stages // max(1, len(self.of_ranks)))

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return 1 + max((k for row in self.of_ranks for *_, k in row), default=-1)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart."""
        return any(part == "weights" for row in self.of_ranks for part, _, _ in row)

    def orders(self) -> list[Order]:
        """For each rank its programs, by role, with their micro-batches."""
        return [[(f"{part}.{stage}", k) for part, stage, k in row] for row in self.of_ranks]


def schedule_text(bundle: Bundle) -> str:
    """The schedule of a pipeline in the text of such a file; what runs once is no part of it."""
    (orders,) = bundle.calls.values()
    return "".join(f"{','.join(_actions(order))}\n" for order in orders)


def _actions(order: Sequence[str]) -> Iterator[str]:
    runs = Counter[str]()
    for role in order:
        part, _, stage = role.partition(".")
        if stage.isdigit() and part in _LETTERS:
            letter = "I" if role_of("weights", int(stage)) in order and part == "backward" else _LETTERS[part]
            yield f"{stage}{letter}{runs[role]}"
            runs[role] += 1


def _parsed(text: str, path: str | PathLike[str]) -> tuple[int, str, int]:
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ValueError(f"expected actions such as 0F3, 1B0, 1I0 and 1W0 in {path}, got {text!r}")
    return int(found[1]), found[2], int(found[3])
