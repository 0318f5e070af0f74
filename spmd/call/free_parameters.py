"""Parameters that no module holds, such as a temperature that is learned: state as those of modules are.

In come an optimizer and tensors of its groups that the step's code reaches by name. Out comes a module that has them,
the same one for as long as the optimizer has them, by which the rest of the compiler finds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import is_

import torch
from torch import nn
from torch.optim import Optimizer

from .._torch import own_parameters


class FreeParameters(nn.Module):
    """Parameters by name, which need not be of torch's class ``Parameter``."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        own_parameters(self).update(parameters)

    def __len__(self) -> int:
        return len(own_parameters(self))


def adopt(optimizer: Optimizer, by_name: Mapping[str, torch.Tensor]) -> str:
    """Let ``free_parameters`` of an optimizer have these tensors; returns the name of what holds them all, or ""."""
    holders = {name.rpartition(".")[0] for name in by_name}
    shared = holders.pop() if len(holders) == 1 else ""
    parameters = {name.removeprefix(f"{shared}.").replace(".", "_"): each for name, each in by_name.items()}
    known = _adopted.get(optimizer)
    if known is None or not all(map(is_, known.parameters(), parameters.values())) or len(parameters) != len(known):
        _adopted[optimizer] = FreeParameters(parameters)
    return shared


def free_parameters(optimizer: Optimizer, _: str) -> FreeParameters:
    """The module that has an optimizer's parameters that no other module has. Raises ``LookupError`` if it has none."""
    return _adopted[optimizer]


_adopted: weakref.WeakKeyDictionary[Optimizer, FreeParameters] = weakref.WeakKeyDictionary()
