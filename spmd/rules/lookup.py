"""Ops that look rows or classes up by index, on ranks that have a part of the rows each.

A rank finds what it has, and zeros for the rest: the ranks' results are a sum. Indices count over the whole, so they
are shifted to where the part starts, and those that fall outside are put where they do no harm. Every rank runs the
same ops; where some rank's part may be empty, all of them look into a part with one row more.
"""

from __future__ import annotations

from typing import Any

import torch

from .base import LocalPart, OpCall, Parts, Run

aten = torch.ops.aten
_IGNORED = -100


def shifted(run: Run, indices: Any, start: int, length: int, outside: int) -> tuple[Any, Any]:
    """(indices into the part, ``outside`` where the part does not have them; where that is)."""
    moved = run(aten.sub.Tensor, (indices, start))
    missing = run(aten.bitwise_or.Tensor, (run(aten.lt.Scalar, (moved, 0)), run(aten.ge.Scalar, (moved, length))))
    return run(aten.masked_fill.Scalar, (moved, missing, outside)), missing


def embedding(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Rows of the table; zeros for indices of other ranks."""
    weight, indices = args[:2]
    part = parts[0]
    assert part is not None
    if part.smallest[0] == 0:
        weight = run(aten.constant_pad_nd.default, (weight, [0, 0, 0, 1]))
    here, missing = shifted(run, indices, part.start[0], part.shape[0], outside=0)
    found = run(aten.embedding.default, (weight, here))
    return run(aten.masked_fill.Scalar, (found, run(aten.unsqueeze.default, (missing, -1)), 0))


def embedding_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradient of this rank's rows; what belongs to others goes into one row more, which is cut off."""
    (part,) = results
    assert part is not None
    grad, indices, _, padding, by_frequency = args
    start, rows = part.start[0], part.shape[0]
    here, _ = shifted(run, indices, start, rows, outside=rows)
    padding = padding - start if start <= padding < start + rows else -1
    summed = run(aten.embedding_dense_backward.default, (grad, here, rows + 1, padding, by_frequency))
    return run(aten.slice.Tensor, (summed, 0, 0, rows))


def nll_loss(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The loss of rows whose class this rank has, and zero for others."""
    log_probabilities, target, weight, reduction, ignore = args
    here = _classes(run, target, parts[0], ignore)
    return run(call.target, (log_probabilities, here, weight, reduction, _IGNORED))


def nll_loss_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradient of this rank's classes."""
    grad, log_probabilities, target, weight, reduction, ignore, total = args
    here = _classes(run, target, parts[1], ignore)
    return run(call.target, (grad, log_probabilities, here, weight, reduction, _IGNORED, total))


def _classes(run: Run, target: Any, part: LocalPart | None, ignore: int) -> Any:
    """Classes of this rank's part, and ``_IGNORED`` for all that count elsewhere or nowhere."""
    assert part is not None
    here, _ = shifted(run, target, part.start[1], part.shape[1], outside=_IGNORED)
    return run(aten.masked_fill.Scalar, (here, run(aten.eq.Scalar, (target, ignore)), _IGNORED))
