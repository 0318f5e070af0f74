"""The train step that all systems run, in three spellings: where a script clears its gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

TrainStep = Callable[[Tensor, Tensor], Tensor]


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The step of ``examples/train_gpt.py``, which is a script with imports of its own: no gradient outlives it."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clears_first(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The step that leaves its gradients behind."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    return loss


def accumulates(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, update: bool) -> Tensor:
    """The step whose gradients are kept until a call updates the parameters."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
    return loss


@dataclass(frozen=True)
class Spelling:
    """A way to write the step; ``calls``: for one update."""

    step: Callable[..., Tensor]
    calls: int = 1

    def bind(self, step: Callable[..., Any], model: nn.Module, optimizer: Optimizer) -> BoundStep:
        """``step``, this one or what a system made of it, for one model."""
        flags = [()] if self.calls == 1 else [(number == self.calls,) for number in range(1, self.calls + 1)]
        return BoundStep(step, model, optimizer, itertools.cycle(flags))


@dataclass(frozen=True)
class BoundStep:
    """A step of one model; ``flags``: what each call is given beside its batch."""

    step: Callable[..., Any]
    model: nn.Module
    optimizer: Optimizer
    flags: Iterator[tuple[bool, ...]]

    def __call__(self, x: Tensor, y: Tensor) -> Any:
        """One call: its loss."""
        return self.step(self.model, self.optimizer, x, y, *next(self.flags))


LAST = Spelling(train_step)
CLEARS = {"last": LAST, "first": Spelling(clears_first), "kept": Spelling(accumulates, calls=2)}
