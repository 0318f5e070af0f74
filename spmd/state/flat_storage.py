"""Flat storages: keep live state in the flat inputs of a program.

``OneStorage`` decides which state shares a storage; this file moves the live tensors there. Each stays the object that
it is (a Parameter, the local tensor of a DTensor, a tensor of optimizer state); only its data moves (``.data``). It has
a storage of its own size, a view into the flat one, so ``torch.save``, ``deepcopy`` and DTensors work as before. If the
user gives a tensor other data between calls (``p.data = ...``, ``load_state_dict``), its address shows it, and the new
data counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from passes import Input

from .._torch import storage_use_count
from ..call.initial_state import is_zeros_on_demand
from .background_reads import READS
from .bound_programs import release_all

_PLAIN = {torch.Tensor, nn.Parameter, nn.Buffer}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
address_of = torch.Tensor.data_ptr

# All flat tensors by their first address; each is alive as long as a part of it is.
_flat_tensors: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def flat_tensor_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The flat tensor that ``tensors`` make up already, one after the other and all of it; else None."""
    flat = _flat_tensors.get(address_of(tensors[0]))
    if flat is None or any(tensor.dtype is not flat.dtype or not tensor.is_contiguous() for tensor in tensors):
        return None
    ends = [address_of(flat), *accumulate((tensor.nbytes for tensor in tensors), initial=0)]
    starts = [ends[0] + offset for offset in ends[1:]]
    return flat if [*map(address_of, tensors), ends[0] + flat.nbytes] == starts else None


def new_flat_tensor(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new flat tensor with the values of ``tensors``; pinned if they are."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return flat.pin_memory() if all(tensor.is_pinned() for tensor in tensors) else flat


def parts_of(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a flat tensor, one for each of ``like``, in its shape."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def containing_flat(tensor: torch.Tensor) -> int | None:
    """The first address of the flat tensor that ``tensor`` is a view into, if it is one."""
    start = address_of(tensor)
    return next((base for base, whole in _flat_tensors.items() if base <= start < base + whole.nbytes), None)


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether the data of ``tensor`` can move to other memory without anybody noticing."""
    if type(tensor) not in _PLAIN or tensor.dtype not in _DTYPES or tensor.is_inference() or tensor.is_conj():
        return False
    shared = tensor.is_neg() or (tensor.device.type == "cpu" and tensor.is_shared())
    # Memory that torch did not allocate belongs to somebody, such as a numpy array; or it is a part of a flat tensor.
    ours = is_zeros_on_demand(tensor) or containing_flat(tensor) is not None
    shared = shared or not (tensor.untyped_storage().resizable() or ours)
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and not shared and storage_use_count(tensor) == 1


@dataclass
class _Flat:
    """One flat input: which of the local state tensors of a call are its parts, and the addresses they must have."""

    name: str
    positions: list[int]
    tensor: torch.Tensor | None = None
    addresses: list[int] | None = None


class FlatInputs:
    """The flat inputs of one program, and the live tensors that are views into them."""

    def __init__(self, inputs: Sequence[Input], names: Sequence[str]) -> None:
        """``names``: of the local state tensors that calls hand in, in order."""
        at = {name: k for k, name in enumerate(names)}
        self._flats = [_Flat(i.name, [at[part.input.name] for part in i.parts]) for i in inputs if i.parts]
        self._copied_in: list[tuple[torch.Tensor, torch.Tensor]] = []  # (part of a flat tensor, live tensor)

    @property
    def names(self) -> list[str]:
        """The names of the inputs."""
        return [flat.name for flat in self._flats]

    def release(self) -> None:
        """Hold on to no state."""
        for flat in self._flats:
            flat.tensor = flat.addresses = None

    def enter(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The flat inputs for a call on these local state tensors, which are views into them from now on.

        A tensor whose memory somebody else can see is copied in, and copied out again by ``leave``.
        """
        self._copied_in = []
        found = []
        for flat in self._flats:
            members = [tensors[k] for k in flat.positions]
            held = flat.tensor
            if held is None or list(map(address_of, members)) != flat.addresses:
                with torch.no_grad():
                    held = self._renew(flat, members)
            found.append(held)
        return found

    def leave(self) -> None:
        """After a call, copy back what was copied in."""
        with torch.no_grad():
            for part, tensor in self._copied_in:
                tensor.copy_(part)
        self._copied_in = []

    def _renew(self, flat: _Flat, members: list[torch.Tensor]) -> torch.Tensor:
        READS.wait_for_all()
        release_all()
        existing = flat_tensor_of(members)
        if existing is not None:
            flat.tensor = existing  # another program has made it
        elif flat.tensor is None:
            flat.tensor = new_flat_tensor(members)  # the first call; ``storage_facts`` found them movable
            _move_into(flat.tensor, members)
        elif _may_return(flat, members):
            flat.tensor.copy_(new_flat_tensor(members))
            _move_into(flat.tensor, members)
        else:
            copy = new_flat_tensor(members)
            self._copied_in += zip(parts_of(copy, members), members, strict=True)
            return copy
        flat.addresses = list(map(address_of, members))
        _flat_tensors[address_of(flat.tensor)] = flat.tensor
        return flat.tensor


def _move_into(flat: torch.Tensor, members: Sequence[torch.Tensor]) -> None:
    """Make the members views into ``flat``, which has their values; by way of DLPack each has a storage of its own."""
    for tensor, part in zip(members, parts_of(flat, members), strict=True):
        tensor.data = from_dlpack(part)


def _may_return(flat: _Flat, members: list[torch.Tensor]) -> bool:
    """Whether nobody else sees the memory of the members that have left, or the parts of ``flat`` that they left."""
    assert flat.tensor is not None and flat.addresses is not None
    left = [tensor for tensor, was in zip(members, flat.addresses, strict=True) if address_of(tensor) != was]
    return all(map(is_movable, left)) and storage_use_count(flat.tensor) == 1 + len(members) - len(left)
