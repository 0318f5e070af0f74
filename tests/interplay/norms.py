"""Norms of gradients: those that ``step.watch`` gives, and those that a hook of the plain step finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import spmd

from .training import Training

Norms = dict[str, Tensor]  # by the name of a gradient


class NormsOfCalls:
    """The norms of each call of a step, where the row looks at them: of gradients as the optimizer gets them."""

    def __init__(self, values: Mapping[str, str], step: Any) -> None:
        self._looks = values["watch"] == "norms"
        is_compiled = isinstance(step, spmd.CompiledStep)
        self._watch = step.watch("*.grad") if self._looks and is_compiled else None

    @contextmanager
    def of_call(self, training: Training) -> Iterator[Norms]:
        """Fill the norms that it yields, for the call that the context holds; a call without gradients has none."""
        found = Norms()
        if self._watch is not None:
            before = self._watch.call
            yield found
            values = self._watch.values if self._watch.call != before else {}
            found.update({name: torch.tensor(each["norm"], dtype=torch.float64) for name, each in values.items()})
        elif self._looks:
            names = {parameter: f"model.{name}.grad" for name, parameter in training.model.named_parameters()}
            hook = register_optimizer_step_pre_hook(lambda optimizer, *_: found.update(_seen_by(optimizer, names)))
            yield found
            hook.remove()
            left = {name: p.grad.norm() for p, name in names.items() if p.grad is not None}
            found.update({name: norm for name, norm in left.items() if name not in found})
        else:
            yield found


def _seen_by(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Norms:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {names[p]: p.grad.norm() for p in held if p in names and p.grad is not None}
