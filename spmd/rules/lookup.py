"""Lookups of rows or classes by index, on ranks that each have a part of the rows.

A rank looks up the rows it has, and takes zeros for the others, so the results are a partial sum. Indices are global:
they are shifted by the start of the part, and those outside of it are redirected or masked. Every rank runs the same
ops; where some rank's part may be empty, all ranks pad their part by one row.
"""

from __future__ import annotations

from typing import Any

import torch

from .base import LocalPart, OpCall, Parts, Run

aten = torch.ops.aten
_IGNORED = -100


def shifted(run: Run, indices: Any, start: int, length: int, outside: int) -> tuple[Any, Any]:
    """(indices into the part, with ``outside`` for those beyond it; a mask of the latter)."""
    moved = run(aten.sub.Tensor, (indices, start))
    missing = run(aten.bitwise_or.Tensor, (run(aten.lt.Scalar, (moved, 0)), run(aten.ge.Scalar, (moved, length))))
    return run(aten.masked_fill.Scalar, (moved, missing, outside)), missing


def embedding(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Rows of this rank's part of the table; zeros for other indices."""
    weight, indices = args[:2]
    part = parts[0]
    assert part is not None
    if part.smallest[0] == 0:
        weight = run(aten.constant_pad_nd.default, (weight, [0, 0, 0, 1]))
    here, missing = shifted(run, indices, part.start[0], part.shape[0], outside=0)
    found = run(aten.embedding.default, (weight, here))
    return run(aten.masked_fill.Scalar, (found, run(aten.unsqueeze.default, (missing, -1)), 0))


def embedding_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradient of this rank's rows; an extra row collects the rest and is cut off."""
    (part,) = results
    assert part is not None
    grad, indices, _, padding, by_frequency = args
    start, rows = part.start[0], part.shape[0]
    here, _ = shifted(run, indices, start, rows, outside=rows)
    padding = padding - start if start <= padding < start + rows else -1
    summed = run(aten.embedding_dense_backward.default, (grad, here, rows + 1, padding, by_frequency))
    return run(aten.slice.Tensor, (summed, 0, 0, rows))


def nll_loss(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The loss of rows whose class this rank has, and zero for other rows."""
    log_probabilities, target, weight, reduction, ignore = args
    here = _classes(run, target, parts[0], ignore)
    return run(call.target, (log_probabilities, here, weight, reduction, _IGNORED))


def nll_loss_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradient of this rank's classes."""
    grad, log_probabilities, target, weight, reduction, ignore, total = args
    here = _classes(run, target, parts[1], ignore)
    return run(call.target, (grad, log_probabilities, here, weight, reduction, _IGNORED, total))


def _classes(run: Run, target: Any, part: LocalPart | None, ignore: int) -> Any:
    """Class indices into this rank's part, with ``_IGNORED`` for classes of other ranks and ignored labels."""
    assert part is not None
    here, _ = shifted(run, target, part.start[1], part.shape[1], outside=_IGNORED)
    return run(aten.masked_fill.Scalar, (here, run(aten.eq.Scalar, (target, ignore)), _IGNORED))
