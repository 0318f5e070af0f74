"""Random numbers of the plain step by position, as compiled steps draw them after ``spmd.seed(s, invariant=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import spmd
from passes.runtime.random import draw
from spmd._torch import TorchFunctionMode
from spmd.call.rng import next_call

SEED = 7


class DrawsByPosition(TorchFunctionMode):
    """Each ``torch.rand_like`` in a call draws as the next random op of a compiled step on one rank.

    Calls that draw are counted, as compiled steps count them.
    """

    def __init__(self) -> None:
        super().__init__()
        begin_draws()
        self._seed, self._number = 0, 0

    def counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, each of whose calls begins another sequence of draws."""

        def call(*given: Any) -> Any:
            self._seed, self._number = 0, 0
            return step(*given)

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.rand_like:
            return func(*args, **(kwargs or {}))
        (like,) = args
        self._seed = self._seed or next_call()
        region = [(0, size, size) for size in like.shape]
        self._number += 1
        return draw(torch.ops.aten.rand_like.default, self._seed, self._number - 1, region, like)


def begin_draws(calls: int = 0) -> None:
    """Let the compiled steps of this process draw what they draw after a number of calls."""
    spmd.set_rng_state({"seed": SEED, "calls": calls, "invariant": True})
