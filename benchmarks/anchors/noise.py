"""How far measured rows scatter: the order that a regression on the rows of each sweep themselves gives them.

Its 18 numbers are free for each sweep and know what was measured, as no estimate does: where even they get the order of
layouts wrong, no function of layouts that is as smooth gets it right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import log

import torch

from .rows import Row

_LEAST = 25  # rows: of fewer, 18 numbers explain nearly all


def regressed(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds of the rows of large sweeps, by the regression of their logarithms on those of the layout's numbers."""
    sweeps: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        sweeps[row.cells["sweep"]].append(row)
    found: dict[str, float] = {}
    for name, members in sweeps.items():
        if name and len(members) >= _LEAST:
            known = torch.tensor([_terms(each) for each in members], dtype=torch.float64)
            seconds = torch.tensor([[log(each.seconds)] for each in members], dtype=torch.float64)
            fitted = known @ torch.linalg.lstsq(known, seconds, driver="gelsd").solution
            found |= {each.id: float(t) for each, t in zip(members, fitted.exp()[:, 0], strict=True)}
    return found


def _terms(row: Row) -> list[float]:
    """Ranks along tensor, stages, rows and idle stages of a layout, their squares and products; 1 for some of them."""
    layout = row.layout()
    idle = log(1 + (layout.stages - 1) / layout.micro_batches)
    tensor, stages, rows = log(layout.tensor), log(layout.stages), log(layout.rows)
    single = [float(layout.tensor == each) for each in (1, 2, 4, 16)]
    products = [tensor * stages, tensor * rows, stages * rows, idle * tensor, idle * stages]
    return [1.0, idle, tensor, stages, rows, *(x * x for x in (idle, tensor, stages, rows)), *products, *single]
