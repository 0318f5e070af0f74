"""``spmd.state_dict``: the state of a model and its optimizers as plain whole tensors, as on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from passes.ir.program import is_sharded

from .._torch import tree_map
from ..deferral.pending import finish_pending
from .prepare import part_like


def state_dict(model: nn.Module, *optimizers: Optimizer, full: bool = True) -> Any:
    """The state dict of ``model``, and behind it those of ``optimizers``; all ranks call it together.

    Each tensor is whole, plain and on the CPU, on every rank and under torch's own names and numbers: one rank may
    ``torch.save`` them, and a model on one device loads them. ``full=False`` gives this rank's parts, as DTensors that
    only their ranks together can save (``torch.distributed.checkpoint``); for large models there is ``spmd.save``.

    Returns a dict, or with optimizers a tuple of dicts. Raises ``TypeError`` for other objects.
    """
    if not isinstance(model, nn.Module) or not all(isinstance(each, Optimizer) for each in optimizers):
        raise TypeError(f"expected a torch.nn.Module and optimizers, got {(model, *optimizers)!r}")
    finish_pending()
    states = [model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]
    if full:
        exact = _exact_parts(model, optimizers)
        states[0] |= {
            name: exact[id(p)]
            for name, p in model.named_parameters(remove_duplicate=False)
            if id(p) in exact and name in states[0]
        }
        states = [tree_map(_whole, state) for state in states]
    return states[0] if not optimizers else tuple(states)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    found = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    return found.detach().cpu().clone()


def _exact_parts(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[int, DTensor]:
    """Parts of whole parameters, by their ids, that ranks update in parts: those of the others may be rounded."""
    return {
        id(parameter): part_like(parameter.detach(), each)
        for parameter in model.parameters()
        for optimizer in optimizers
        for each in optimizer.state.get(parameter, {}).values()
        if not isinstance(parameter, DTensor) and isinstance(each, DTensor)
        if each.shape == parameter.shape and is_sharded(tuple(each.placements))
    }
