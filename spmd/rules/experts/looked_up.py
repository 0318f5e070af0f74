"""Weights by the number of their expert, on ranks that each have the weights of some: the others are zeros.

So the result is a partial sum, which any op that is linear in the weights passes on: tokens come to the weights, and
sums go back. All ranks see all numbers, so that one that no expert has raises on each.
"""

from __future__ import annotations

from typing import Any

import torch

from ..base import OpCall, Parts, Run
from ..lookup import shifted

aten = torch.ops.aten


def taken(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The weights by number, those of other ranks' experts as zeros; for ``index`` and ``index_select``."""
    index, own = _numbers(args), _with_zeros(run, args[0])
    here = _from_own(run, call, index, parts)
    return run(call.target, (own, [here]) if isinstance(args[1], (list, tuple)) else (own, 0, here))


def added(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The own weights with values added by number; for ``index_put`` and ``index_add``. Others are cut off."""
    (part, *_), here, own = parts, _from_own(run, call, _numbers(args), parts), _with_zeros(run, args[0])
    assert part is not None
    given = (own, [here], *args[2:]) if isinstance(args[1], (list, tuple)) else (own, 0, here, *args[3:])
    return run(aten.slice.Tensor, (run(call.target, given, run.kwargs), 0, 0, part.shape[0]))


def _numbers(args: tuple[Any, ...]) -> Any:
    return args[1][0] if isinstance(args[1], (list, tuple)) else args[2]


def _with_zeros(run: Run, weights: Any) -> Any:
    """Own weights, and zeros as those of one more expert."""
    padding = [0, 0] * (len(run.shape(weights)) - 1) + [0, 1]
    return run(aten.constant_pad_nd.default, (weights, padding))


def _from_own(run: Run, call: OpCall, index: Any, parts: Parts) -> Any:
    """The numbers counted from the own first expert; those of others are that of the zeros."""
    (part, *_), count = parts, call.arg("self").shape[0]
    assert part is not None
    options = {"dtype": torch.int64, "device": index.meta["val"].device, "pin_memory": False}
    every = run(aten.arange.start_step, (0, count), options)
    by_list = isinstance(call.args[1], (list, tuple))  # whose negative numbers count from the last expert
    numbers = run(aten.index.Tensor, (every, [index])) if by_list else run(aten.index_select.default, (every, 0, index))
    return shifted(run, numbers, part.start[0], part.shape[0], outside=part.shape[0])[0]
