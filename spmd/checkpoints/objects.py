"""The objects of one save or load: the tree of state that each has by name, and what it makes of a loaded one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .optimizers import by_name, names_in


@dataclass
class Objects:
    """Objects by the names that the user gave them, and their state.

    ``trees``: the live state of each. ``ties``: from each name of a tied tensor but the first, to the first.
    ``groups``: of each optimizer, the names of the parameters of each group.
    """

    given: Mapping[str, Any]
    trees: dict[str, Any] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    groups: dict[str, list[list[str]]] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Objects:
        """Read the state of all objects; tensors in it are the live ones. Nothing is changed."""
        found = cls(given)
        for name, module in found.modules.items():
            found.trees[name] = dict(module.state_dict())
            found._find_ties(name, module)
        names = {id(parameter): name for name, parameter in found.parameters.items()}
        for name, each in given.items():
            if isinstance(each, Optimizer):
                found.groups[name] = names_in(each, name, names)
                found.trees[name] = by_name(each.state_dict(), found.groups[name])
            elif name not in found.trees:
                found.trees[name] = each.state_dict() if has_state(each) else each
        return found

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The models among them."""
        return {name: each for name, each in self.given.items() if isinstance(each, nn.Module)}

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers among them."""
        return {name: each for name, each in self.given.items() if isinstance(each, Optimizer)}

    def _find_ties(self, prefix: str, module: nn.Module) -> None:
        """Note the parameters, and what has several names; by identity, since empty parts have no address."""
        first = {id(parameter): name for name, parameter in self.parameters.items()}
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in tensors:
            if isinstance(self.trees[prefix].get(name), torch.Tensor):
                path = f"{prefix}.{name}"
                known = first.setdefault(id(tensor), path)
                if known != path:
                    self.ties[path] = known
                elif isinstance(tensor, nn.Parameter):
                    self.parameters[path] = tensor


def has_state(each: Any) -> bool:
    """Whether an object has its state by ``state_dict``, and loads it."""
    return callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))
