"""Replace parameters: put new ones in the place of a model's, wherever modules and optimizers hold the old ones.

Splitting a parameter means a new object: torch cannot turn a Parameter into a DTensor in place. The module's entry, the
optimizers' groups and state keys are rebound, and hooks, attributes and gradients move along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .._torch import move_hooks, own_parameters, renew_notes
from ..call.state import SUCCESSOR, Arguments, is_replaced, newest, parameters_of, submodules_of
from .eager_calls import refuse_eager_calls


def replace_parameter(old: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The Parameter with these values that takes the place of ``old``, with its hooks and attributes."""
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        if name != SUCCESSOR:
            new.__dict__.setdefault(name, value)
    move_hooks(old, new)
    vars(old)[SUCCESSOR] = new
    return new


def forget_successor(parameter: torch.Tensor) -> None:
    """Undo ``replace_parameter`` for the old one."""
    vars(parameter).pop(SUCCESSOR, None)


def rebind(arguments: Arguments, references: Iterable[Any], renewed: Mapping[int, torch.Tensor]) -> None:
    """Put new parameters, given by the id of the old one, where modules and optimizers of a call hold the old ones.

    And in the lists, dicts and attributes that the step reads, given as ``references``.
    """
    if not renewed:
        return
    for parameter in parameters_of(arguments.modules):
        new = renewed.get(id(parameter.tensor))
        if new is not None:
            for holder, key in parameter.holders:
                holder[key] = new
    added = set(map(id, renewed.values()))
    for _, module in submodules_of(arguments.modules):
        if not added.isdisjoint(map(id, own_parameters(module).values())):
            renew_notes(module)
            refuse_eager_calls(module)
    for optimizer in arguments.optimizers.values():
        _rebind_optimizer(optimizer, renewed)
    for reference in references:
        new = renewed.get(id(reference.get()))
        if new is not None:
            reference.put(new)


def rebind_replaced_parameters(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Rebind optimizers to the parameters that replaced theirs when another step split the model."""
    for optimizer in optimizers:
        old = [p for group in optimizer.param_groups for p in group["params"]]
        renewed = {id(p): newest(p) for p in old if is_replaced(p)}
        if renewed:
            _rebind_optimizer(optimizer, renewed)


def _rebind_optimizer(optimizer: torch.optim.Optimizer, renewed: Mapping[int, torch.Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [renewed.get(id(p), p) for p in group["params"]]  # in place: LBFGS keeps the list, too
    entries = [(renewed.get(id(p), p), values) for p, values in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(entries)
