"""Stale references: find who still refers to parameters that a step has replaced by their parts.

Splitting a model puts new Parameters in the place of the user's. Modules and optimizers of the call are rebound, and
here all other optimizers of torch. A list of parameters or an average that was built before the first call, and that
the step does not take, goes on with the old ones, which nothing updates any more: of those there is a warning.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..interpreter.source_lines import warn_user
from .replace_parameters import rebind_replaced_parameters

Replaced = Mapping[str, "weakref.ref[torch.Tensor]"]  # by the name of the parameter


def end_stale_references(replaced: Replaced) -> None:
    """Rebind optimizers that the step does not take, and warn, once for all, of lists and dicts of old parameters.

    Nothing else is looked at: a local variable, or a graph of autograd, is used up soon.
    """
    if all(reference() is None for reference in replaced.values()):
        return
    gc.unfreeze()  # the collector finds who refers to them, but not in what the user has frozen
    gc.collect()  # what traced the step refers to them in cycles
    old = [tensor for reference in replaced.values() if (tensor := reference()) is not None]
    rebind_replaced_parameters(_optimizers_of(old))
    del old  # it would be found below
    alive = {name: tensor for name, reference in replaced.items() if (tensor := reference()) is not None}
    holders = _containers_of(alive)
    if not holders:
        return
    held = [name for name, tensor in alive.items() if any(_holds(holder, tensor) for holder in holders)]
    shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
    warn_user(
        f"the first call has split the model: its parameters are DTensors now, but {_described(holders)} that the step "
        f"does not take still refer{'s' * (len(holders) == 1)} to those from before ({shown}). Nothing updates those. "
        "Build what refers to parameters (a list, a moving average) after the first call, or pass it to the step"
    )


def _optimizers_of(parameters: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """The optimizers of torch that have some of these parameters."""
    lists = [each for each in _referrers(parameters) if isinstance(each, list)]
    groups = [each for each in _referrers(lists) if isinstance(each, dict) and "params" in each]
    holders = _referrers([each for each in _referrers(groups) if isinstance(each, list)])
    holders += _referrers([each for each in holders if isinstance(each, dict) and "param_groups" in each])
    return [each for each in holders if issubclass(type(each), torch.optim.Optimizer)]


def _referrers(values: list[Any]) -> list[Any]:
    return gc.get_referrers(*values) if values else []


def _containers_of(known: Mapping[str, torch.Tensor]) -> list[Any]:
    """The lists and dicts that refer to one of these tensors, but for ``known`` itself and the variables of modules."""
    found = gc.get_referrers(*known.values()) if known else []
    lists = [holder for holder in found if isinstance(holder, list)]
    dicts = [holder for holder in found if isinstance(holder, dict) and holder is not known]
    return [*lists, *(holder for holder in dicts if "__builtins__" not in holder)]


def _holds(holder: Any, tensor: torch.Tensor) -> bool:
    values = [*holder.keys(), *holder.values()] if isinstance(holder, dict) else holder
    return any(each is tensor for each in values)


def _described(holders: Sequence[Any]) -> str:
    kinds = [f"a {type(holder).__name__} of {len(holder)}" for holder in holders[:3]]
    return " and ".join(dict.fromkeys(kinds)) + (" and others" if len(holders) > 3 else "")
