"""Targets of a load: the live tensor that each stored tensor is read into, made where there is none yet.

A model's tensors are all there. State of an optimizer may not be: then it is made, placed as its parameter where it has
the parameter's shape. State of other objects is read into new tensors, which the object loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..call.nested_state import leaves_of
from ..placements import local_shape
from ..ranks.world import describe as describe_mesh
from ..state.distribute import as_dtensor
from .objects import Objects
from .trees import is_expanded, map_leaves


@dataclass
class Targets:
    """``trees``: what each object is to load, with ``tensors``, by name, where stored ones belong."""

    trees: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: Objects, stored: dict[str, Any]) -> Targets:
        """The targets of ``stored``, the trees of values of a checkpoint. Nothing is changed."""
        found = cls()
        for name, each in objects.given.items():
            if isinstance(each, nn.Module):
                found._add_model(name, objects, stored[name])
            elif isinstance(each, Optimizer):
                found._add(name, stored[name], _Optimizer(each, name, objects).tensor)
            else:
                live = dict(_tensors(objects.trees[name], name))
                found._add(name, stored[name], lambda path, like, live=live: _like(live.get(path), like))
        return found

    def _add(self, name: str, stored: Any, make: Any) -> None:
        def take(path: str, leaf: Any) -> Any:
            if not (isinstance(leaf, torch.Tensor) and leaf.is_meta):
                return leaf
            self.tensors[path] = make(path, leaf)
            return self.tensors[path]

        self.trees[name] = map_leaves(stored, take, name)

    def _add_model(self, name: str, objects: Objects, stored: dict[str, Any]) -> None:
        """Add the targets of a model: stored values under its own names, its own values where none is stored."""
        tree = dict(objects.trees[name])
        for key, live in tree.items():
            path, leaf = f"{name}.{key}", stored.get(key, live)
            if isinstance(live, torch.Tensor) and isinstance(leaf, torch.Tensor) and leaf.is_meta:
                if path not in objects.ties:
                    self.tensors[path] = live.detach()
            elif key in stored:
                tree[key] = leaf
        self.trees[name] = tree


class _Optimizer:
    """Finds or makes the state tensors of one optimizer."""

    def __init__(self, optimizer: Optimizer, path: str, objects: Objects) -> None:
        groups = zip(optimizer.param_groups, objects.groups[path], strict=True)
        self._parameters = {
            f"{path}.state.{name}": parameter
            for group, names in groups
            for parameter, name in zip(group["params"], names, strict=True)
        }
        self._state, self._path = optimizer.state, f"{path}.state"

    def tensor(self, path: str, like: torch.Tensor) -> torch.Tensor:
        """The tensor for one that has the shape and dtype of ``like``."""
        owner = self._owner(path)
        parameter = self._parameters.get(owner)
        entries = self._state if parameter is None else self._state.get(parameter, {})
        texts = {key: value for key, value in entries.items() if isinstance(key, str)}
        live = {".".join(map(str, keys)): leaf for keys, leaf in leaves_of(texts)}.get(path[len(owner) + 1 :])
        if isinstance(live, torch.Tensor) and live.shape == like.shape:
            return _like(live, like)
        if parameter is None:
            return torch.empty_like(like, device="cpu")
        return _like(parameter if parameter.shape == like.shape else None, like, parameter.device, is_live=False)

    def _owner(self, path: str) -> str:
        """The parameter whose state a path leads into; the state itself for what is under a text."""
        owner = path
        while owner and owner not in self._parameters:
            owner = owner.rpartition(".")[0]
        return owner or self._path


def _like(other: Any, like: torch.Tensor, device: torch.device | str = "cpu", *, is_live: bool = True) -> torch.Tensor:
    """``other`` itself if it ``is_live`` and fits, else an empty tensor that is placed in the same way."""
    if not isinstance(other, torch.Tensor) or other.shape != like.shape:
        return torch.empty_like(like, device=device)
    if is_live and other.dtype == like.dtype and not is_expanded(other):
        return other.detach()
    if not isinstance(other, DTensor):
        return torch.empty_like(like, device=other.device)
    mesh, placements = other.device_mesh, tuple(other.placements)
    shape = local_shape(other.shape, placements, describe_mesh(mesh))
    local = torch.empty(shape, dtype=like.dtype, device=other.to_local().device)
    return as_dtensor(local, placements, mesh, other.shape, other.stride())


def _tensors(tree: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    map_leaves(tree, lambda path, leaf: found.append((path, leaf)) if isinstance(leaf, torch.Tensor) else None, name)
    return found
