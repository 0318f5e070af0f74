"""``spmd.state_dict``: the state of a model and its optimizers as plain whole tensors, as on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import tree_map
from ..deferral.pending import finish_pending
from ..state import master_copies


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
    named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in states[0]}
    exact = {name: master_copies.exact(p) for name, p in named.items()}
    states[0] |= {name: parts.clone() for name, parts in exact.items() if parts is not None}
    if full:
        states = [tree_map(_whole, state) for state in states]
    return states[0] if not optimizers else tuple(states)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    found = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    return found.detach().cpu().clone()
