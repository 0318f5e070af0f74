"""Storage facts: which live state shares a flat tensor already, and which must not move, as all ranks know it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from passes import Input, Program

from .._torch import local_tensor
from ..call.state import Slot
from ..ranks.consensus import AllGatherText
from .bound_programs import release_all
from .flat_storage import address_of, containing_flat, flat_tensor_of, is_movable


def with_storage_facts(program: Program, slots: Sequence[Slot], all_gather_text: AllGatherText) -> Program:
    """``program`` with ``stored`` and ``fixed`` filled in, the same on all ranks (``Fact.STORAGE``).

    State is fixed if anybody else can see its memory: other processes, or other tensors, such as a ``detach()`` that
    the user holds. A parameter that is split now for the first time gets memory of its own anyway.
    """
    stored, fixed = storage_facts(program.inputs, slots, all_gather_text)
    return program.with_facts(stored=stored, fixed=fixed)


def storage_facts(
    inputs: Sequence[Input], slots: Sequence[Slot], all_gather_text: AllGatherText
) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    """Find ``Program.stored`` and ``Program.fixed`` for a program with these inputs. All ranks call it together."""
    placements = {declared.name: declared.placement for declared in inputs}
    live = {slot.input.name: slot.get() for slot in slots}
    split = {name for name, tensor in live.items() if _is_new(tensor, placements.get(name, ()))}
    release_all()  # views that other programs hold on to from call to call
    stored, fixed = _storage_of({name: local_tensor(tensor) for name, tensor in live.items() if name not in split})
    everyone = [json.loads(text) for text in all_gather_text(json.dumps([stored, sorted(fixed)]))]
    common = [group for group in stored if all(list(group) in groups for groups, _ in everyone)]
    # A group that is stored together on some ranks only can neither be taken as it is nor moved.
    partial = {name for groups, _ in everyone for group in groups if tuple(group) not in common for name in group}
    return tuple(common), frozenset(partial.union(*(names for _, names in everyone)))


def _is_new(tensor: torch.Tensor, placement: Iterable[Any]) -> bool:
    """Whether a tensor gets memory of its own when state is committed."""
    return tensor.is_meta or (any(entry.is_shard() for entry in placement) and not isinstance(tensor, DTensor))


def _storage_of(tensors: dict[str, torch.Tensor]) -> tuple[list[tuple[str, ...]], set[str]]:
    """The groups of names that make up a flat tensor each, in order; and the names that must not be moved."""
    members: dict[int, list[str]] = defaultdict(list)
    fixed = set[str]()
    for name, tensor in tensors.items():
        flat = containing_flat(tensor)
        if flat is not None:
            members[flat].append(name)
        elif not is_movable(tensor):
            fixed.add(name)
    groups = [sorted(names, key=lambda name: address_of(tensors[name])) for names in members.values()]
    stored = [tuple(names) for names in groups if flat_tensor_of([tensors[name] for name in names]) is not None]
    return stored, fixed.union(*(names for names in groups if tuple(names) not in stored))
