"""Train one model in micro-batches, or in a pipeline of two stages, and compare it with the plain step: in one process.

With the mask of the batch and without it: then positions, types and masks are rows that the model makes itself. No key
or value is kept for later tokens, as whoever trains decoders has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

import spmd
from tests.harness.oracle import all_unequal, compiled_run, plain_run

from .examine import Training, distance

Parts = Literal["micro_batches=2", "two stages"]
MODES: dict[Parts, dict[str, Any]] = {
    "micro_batches=2": {"micro_batches": 2},
    "two stages": {"axes": {"stages": "pp"}, "micro_batches": 2},
}


@dataclass(frozen=True)
class InParts(Training):
    """Training on the rows of two ranks in one process. ``masked``: whether the batch has its mask."""

    momentum: float = 0.0  # one program
    masked: bool = False

    def build(self) -> tuple[Any, ...]:
        """The model, which keeps no keys and values, and its optimizer."""
        model, optimizer = super().build()
        _keep_nothing(model)
        return model, optimizer

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """The rows of both ranks."""
        own = [super(InParts, self).part(rank, step) for rank in range(2)]
        (batch,) = self.whole(own)
        return ({name: rows for name, rows in batch.items() if self.masked or name != "attention_mask"},)


def _keep_nothing(model: nn.Module) -> None:
    for each in model.modules():
        config: Any = getattr(each, "config", None)
        if config is not None:
            config.use_cache = False


def in_parts(case: InParts, parts: Parts) -> str:
    """``yes, to 1e-16``, without a figure for stages; or what is wrong, in a line."""
    mode = spmd.DataParallel(**MODES[parts])
    try:
        return _in_micro_batches(case, mode) if parts == "micro_batches=2" else _in_stages(case, mode)
    except Exception as error:  # a line of the table, whatever it is
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _in_micro_batches(case: InParts, mode: spmd.DataParallel) -> str:
    expected = plain_run(case, 1, 2)
    _, got = compiled_run(0, case, 2, parallel_mode=mode)
    wrong = all_unequal(expected, got, 0, 1, case.rtol, case.atol)
    return wrong[0] if wrong else f"yes, to {max(map(distance, expected, got)):.0e}"


def _in_stages(case: InParts, mode: spmd.DataParallel) -> str:
    compiled = spmd.compile(case.step, parallel_mode=mode)
    verdict = spmd.verify(compiled, *case.build(), *case.part(0, 0), world=2, mesh={"pp": 2}, steps=1)
    return "yes" if verdict else " ".join(str(verdict).split())
