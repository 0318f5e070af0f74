"""Attributes of modules and optimizers that a step changes while it is traced: found, and undone.

A trace runs the user's code once. What that did to attributes is undone at its end, also if it raised, and repeated by
each call of the program (``writes.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes import CaptureError

from ..._torch import BUFFERS, CHILDREN, HOOK_DICTS, MODULE_NOTES, PARAMETERS, RNN_NOTES, tree_flatten
from ...call.refusals import refuse
from ..reads import MISSING, Change, ContainerSnapshot, Reads, ReadSite, containers_in, content_of

# Attributes that are state, handled elsewhere, or torch's own notes.
_OF_MODULES = {PARAMETERS, BUFFERS, CHILDREN, *MODULE_NOTES, *HOOK_DICTS}
_OF_OPTIMIZERS = {"state", "param_groups", "defaults", "step"}


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The attributes of one module or optimizer before the step, with all containers in them."""

    name: str
    owner: Any
    before: dict[str, Any]
    containers: dict[str, list[ContainerSnapshot]]
    leaves: dict[str, list[Any]]  # of attributes that are containers

    @classmethod
    def of(cls, name: str, owner: Any) -> Snapshot:
        """The attributes now."""
        before = {key: value for key, value in vars(owner).items() if not _is_torchs(owner, key)}
        containers = {key: _snapshots(value) for key, value in before.items()}
        containers = {key: found for key, found in containers.items() if found}
        return cls(name, owner, before, containers, {key: tree_flatten(before[key])[0] for key in containers})

    def changes(self, reads: Reads) -> Iterator[Change]:
        """The attributes that are new, gone, or other than they were."""
        fields = vars(self.owner)
        for key in [*self.before, *(key for key in fields if key not in self.before)]:
            if _is_torchs(self.owner, key) or key in RNN_NOTES:
                continue
            before, after = self.before.get(key, MISSING), fields.get(key, MISSING)
            if after is not before or any(each.changed() for each in self.containers.get(key, ())):
                site = ReadSite("item", fields, key, f"{self.name}.{key}", owned=True)
                grew = any(each.grew() for each in self.containers.get(key, ()))
                held = self.leaves[key] if key in self.leaves else tree_flatten(before)[0]
                yield Change(site, before, after, reads.was_read(site, before), held, self.owner, grew)

    def written(self) -> Iterator[ContainerSnapshot]:
        """The containers that got entries, or other ones by key, at attributes that are what they were."""
        fields = vars(self.owner)
        for key, containers in self.containers.items():
            if fields.get(key) is self.before[key]:
                yield from (each for each in containers if each.changed() and (each.is_keyed() or each.grew()))

    def restore(self) -> None:
        """Put every attribute back."""
        fields = vars(self.owner)
        for key in [key for key in fields if key not in self.before and not _is_torchs(self.owner, key)]:
            del fields[key]
        fields.update(self.before)
        for containers in self.containers.values():
            for each in containers:
                if each.changed():
                    each.restore()


@contextmanager
def restored_attributes(owners: Iterable[tuple[str, Any]]) -> Iterator[list[Snapshot]]:
    """Take snapshots of named modules and optimizers, and restore them at the end of the context."""
    snapshots = [Snapshot.of(name, owner) for name, owner in owners]
    try:
        yield snapshots
    finally:
        for snapshot in snapshots:
            snapshot.restore()


@contextmanager
def contain_group_list_effects(path: str, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Raise ``CaptureError`` if the step adds or removes parameter groups; the list is restored in any case."""
    groups, before = optimizer.param_groups, list(optimizer.param_groups)
    try:
        yield
        if vars(optimizer).get("param_groups", groups) is not groups:
            refuse(CaptureError, f"the step replaces {path}.param_groups. Write into the groups, or do so outside")
        if len(groups) != len(before):
            refuse(CaptureError, f"the step changes the number of {path}.param_groups. Do so outside of the step")
    finally:
        groups[:] = before
        if vars(optimizer).get("param_groups", groups) is not groups:
            optimizer.param_groups = groups


def _snapshots(value: Any) -> list[ContainerSnapshot]:
    return [ContainerSnapshot("", each, content_of(each), owned=True) for each in containers_in(value)]


def _is_torchs(owner: Any, key: str) -> bool:
    """Whether an attribute is torch's own, or is handled elsewhere."""
    if isinstance(owner, torch.optim.Optimizer):
        return key in _OF_OPTIMIZERS or key.startswith("_")
    return key in _OF_MODULES and isinstance(owner, nn.Module)
