"""Train one model in micro-batches, or in a pipeline of two stages, and compare it with the plain step: in one process.

With the mask of the batch and without it: then positions, types and masks are rows that the model makes itself. No key
or value is kept for later tokens, as whoever trains decoders has it; and mixtures are trained without their loss for
balance, which is a product of sums over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

import spmd
from tests.harness.oracle import all_unequal, compiled_run, plain_run

from .examine import Training, distance

Parts = Literal["micro_batches=2", "micro_batches=2, no mask", "two stages", "two stages, no mask"]


@dataclass(frozen=True)
class InParts(Training):
    """Training on the rows of two ranks in one process."""

    momentum: float = 0.0  # one program
    parts: Parts = "micro_batches=2"

    def build(self) -> tuple[Any, ...]:
        """The model, which keeps no keys and values, and its optimizer."""
        model, optimizer = super().build()
        _simplify(model)
        return model, optimizer

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """The rows of both ranks."""
        own = [super(InParts, self).part(rank, step) for rank in range(2)]
        (batch,) = self.whole(own)
        left_out = {"attention_mask"} if self.parts.endswith("no mask") else set()
        return ({name: rows for name, rows in batch.items() if name not in left_out},)


def _simplify(model: nn.Module) -> None:
    for each in model.modules():
        config: Any = getattr(each, "config", None)
        if config is not None:
            config.use_cache = config.output_router_logits = False


def in_parts(case: InParts) -> str:
    """``yes, to 1e-16``, without a figure for stages; or what is wrong, in a line."""
    try:
        return _in_stages(case) if case.parts.startswith("two stages") else _in_micro_batches(case)
    except Exception as error:  # a line of the table, whatever it is
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _in_micro_batches(case: InParts) -> str:
    expected = plain_run(case, 1, 2)
    _, got = compiled_run(0, case, 2, parallel_mode=spmd.DataParallel(micro_batches=2))
    wrong = all_unequal(expected, got, 0, 1, case.rtol, case.atol)
    return wrong[0] if wrong else f"yes, to {max(map(distance, expected, got)):.0e}"


def _in_stages(case: InParts) -> str:
    compiled = spmd.compile(case.step, parallel_mode=spmd.DataParallel(axes={"stages": "pp"}, micro_batches=2))
    verdict = spmd.verify(compiled, *case.build(), *case.part(0, 0), world=2, mesh={"pp": 2}, steps=1)
    return "yes" if verdict else " ".join(str(verdict).split())
