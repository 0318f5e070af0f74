"""Flat storages of live state: what a program's flat inputs are, and that the live tensors lie in them.

``OneStorage`` decides which state lies together; here it is brought there. A live tensor stays the object that it is,
a Parameter, the local tensor of a DTensor, a tensor of optimizer state: only its data moves (``.data``). It sees a
storage of its own, of its own size, at its place in the flat one; so ``torch.save``, ``deepcopy`` and DTensors find
what they would find otherwise. What users do between calls (``p.data = ...``, ``load_state_dict``) is seen by where the
tensors lie, and counts.
"""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from passes import Input, Program
from passes.runtime.arena import place
from passes.runtime.segments import allocate_segment

from .._torch import local_tensor, owners
from ..call.state import Slot
from ..ranks.consensus import AllGatherText
from .codegen import release_all

_PLAIN = {torch.Tensor, nn.Parameter, nn.Buffer}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
_pointer = torch.Tensor.data_ptr

# The flat tensors there are, by their first address; alive as long as a part of them is.
_known: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


# Before the passes: what may move


def with_storage_facts(program: Program, slots: Sequence[Slot], all_gather_text: AllGatherText) -> Program:
    """``program`` with ``stored`` and ``fixed`` filled in, the same on all ranks (``Fact.STORAGE``).

    State is fixed if anybody else can see its memory: other processes, or other tensors, such as a ``detach()`` that
    the user holds. A parameter that is split now for the first time gets memory of its own anyway.
    """
    placed = {declared.name: declared.placement for declared in program.inputs}
    live = {slot.input.name: slot.get() for slot in slots}
    fresh = {name for name, tensor in live.items() if _is_fresh(tensor, placed.get(name, ()))}
    release_all()  # views that other programs hold on to from call to call
    stored, fixed = _survey({name: local_tensor(tensor) for name, tensor in live.items() if name not in fresh})
    everyone = [json.loads(text) for text in all_gather_text(json.dumps([stored, sorted(fixed)]))]
    common = [group for group in stored if all(list(group) in told for told, _ in everyone)]
    apart = {name for told, _ in everyone for group in told if tuple(group) not in common for name in group}
    return replace(program, stored=tuple(common), fixed=frozenset(apart.union(*(held for _, held in everyone))))


def _is_fresh(tensor: torch.Tensor, placement: Iterable[Any]) -> bool:
    return any(entry.is_shard() for entry in placement) and not isinstance(tensor, DTensor)


def _survey(tensors: dict[str, torch.Tensor]) -> tuple[list[tuple[str, ...]], set[str]]:
    """The groups of names that make up a flat storage each, in order; and what must not be moved."""
    lying: dict[int, list[str]] = defaultdict(list)
    fixed = set[str]()
    for name, tensor in tensors.items():
        flat = _flat_of(tensor)
        if flat is not None:
            lying[flat].append(name)
        elif not _is_movable(tensor):
            fixed.add(name)
    groups = [sorted(names, key=lambda name: _pointer(tensors[name])) for names in lying.values()]
    stored = [tuple(names) for names in groups if as_it_lies([tensors[name] for name in names]) is not None]
    return stored, fixed.union(*(names for names in groups if tuple(names) not in stored))


def _flat_of(tensor: torch.Tensor) -> int | None:
    """The first address of the flat tensor that ``tensor`` lies in, if it does."""
    start = _pointer(tensor)
    return next((base for base, whole in _known.items() if base <= start < base + whole.nbytes), None)


def _is_movable(tensor: torch.Tensor) -> bool:
    """Whether nobody would notice if the data of ``tensor`` lay elsewhere."""
    if type(tensor) not in _PLAIN or tensor.dtype not in _DTYPES or tensor.is_inference() or tensor.is_conj():
        return False
    shared = tensor.is_neg() or (tensor.device.type == "cpu" and tensor.is_shared())
    # Memory that torch did not allocate is somebody's, such as an array's; or a part of one of ours.
    shared = shared or not (tensor.untyped_storage().resizable() or _flat_of(tensor) is not None)
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and not shared and owners(tensor) == 1


# At each call: where it lies


def as_it_lies(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The flat tensor that ``tensors`` make up already, one after the other and all of it; else None."""
    flat = _known.get(_pointer(tensors[0]))
    if flat is None or any(tensor.dtype is not flat.dtype or not tensor.is_contiguous() for tensor in tensors):
        return None
    ends = [_pointer(flat), *accumulate((tensor.nbytes for tensor in tensors), initial=0)]
    starts = [ends[0] + offset for offset in ends[1:]]
    return flat if [*map(_pointer, tensors), ends[0] + flat.nbytes] == starts else None


def copied(tensors: Sequence[torch.Tensor], shared: bool) -> torch.Tensor:
    """A new flat tensor with the values of ``tensors``. ``shared``: where other ranks of the host can read it."""
    rows = [tensor.detach().reshape(-1) for tensor in tensors]
    if not shared:
        return torch.cat(rows)
    size = sum(row.nbytes for row in rows)
    flat = place(allocate_segment(size), 0, [size // rows[0].itemsize], [1], rows[0].dtype)
    return torch.cat(rows, out=flat)


def parts_of(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a flat tensor, one for each of ``like``, in its shape."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


@dataclass
class _Flat:
    """One flat input: where its parts are among the local state tensors of a call, and where these have to lie."""

    name: str
    positions: list[int]
    shared: bool
    tensor: torch.Tensor | None = None
    lies: list[int] | None = None


class Flats:
    """The flat inputs of one program, and the live tensors that lie in them."""

    def __init__(self, inputs: Sequence[Input], names: Sequence[str]) -> None:
        """``names``: of the local state tensors that calls hand in, in order."""
        at = {name: k for k, name in enumerate(names)}
        self._flats = [_Flat(i.name, [at[part.input.name] for part in i.parts], i.shared) for i in inputs if i.parts]
        self._guests: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def names(self) -> list[str]:
        """The names of the inputs."""
        return [flat.name for flat in self._flats]

    def release(self) -> None:
        """Hold on to no state."""
        for flat in self._flats:
            flat.tensor = flat.lies = None

    def enter(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The flat inputs for a call on these local state tensors, which lie in them from now on.

        What somebody else looks at, too, is copied in, and out again by ``leave``.
        """
        self._guests = []
        found = []
        for flat in self._flats:
            members = [tensors[k] for k in flat.positions]
            held = flat.tensor
            if held is None or list(map(_pointer, members)) != flat.lies:
                with torch.no_grad():
                    held = self._renewed(flat, members)
            found.append(held)
        return found

    def leave(self) -> None:
        """After a call: bring what was only copied in to where it lies."""
        with torch.no_grad():
            for part, tensor in self._guests:
                tensor.copy_(part)
        self._guests = []

    def _renewed(self, flat: _Flat, members: list[torch.Tensor]) -> torch.Tensor:
        release_all()
        there = as_it_lies(members)
        if there is not None:
            flat.tensor = there  # as another program has left it
        elif flat.tensor is None:
            flat.tensor = copied(members, flat.shared)  # the first call: what may move was asked before the passes
            _put(members, flat.tensor)
        elif _may_return(flat, members):
            flat.tensor.copy_(copied(members, shared=False))
            _put(members, flat.tensor)
        else:
            visited = copied(members, flat.shared)
            self._guests += zip(parts_of(visited, members), members, strict=True)
            return visited
        flat.lies = list(map(_pointer, members))
        _known[_pointer(flat.tensor)] = flat.tensor
        return flat.tensor


def _put(members: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Let the members lie in ``flat``, which has their values. By way of DLPack a part gets a storage of its own."""
    for tensor, part in zip(members, parts_of(flat, members), strict=True):
        tensor.data = from_dlpack(part)


def _may_return(flat: _Flat, members: Sequence[torch.Tensor]) -> bool:
    """Whether nobody else looks at the members that have left, nor at the places that they left."""
    assert flat.tensor is not None and flat.lies is not None
    left = [tensor for tensor, place in zip(members, flat.lies, strict=True) if _pointer(tensor) != place]
    return all(map(_is_movable, left)) and owners(flat.tensor) == 1 + len(members) - len(left)
