"""Initialize state that is on the meta device: module by module, each rank keeping its parts of it.

A module's own tensors are made whole, initialized by its own code, cut, and let go before the next module's. All ranks
do so with the same random numbers, so values do not depend on how many ranks there are. Modules come in the reverse of
their order of registration: what a module holds comes before it. Only what is on the meta device is touched.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from passes import CaptureError, Role, SpmdError
from passes.ir.program import Placements, is_sharded

from .._torch import own_buffers, own_parameters, version_of
from ..call.call import Call
from ..call.refusals import refuse
from ..call.state import Slot, submodules_of
from ..placements import local_shape
from .distribute import Prepared, as_dtensor, part_of
from .replace_parameters import forget_successor, rebind, replace_parameter

_STATE = (Role.PARAMETER, Role.BUFFER)


@dataclass
class _Owner:
    """A module with the slots of those of its own tensors that are on the meta device."""

    module: nn.Module
    members: list[tuple[Slot, Placements]] = field(default_factory=list)

    @property
    def split_bytes(self) -> int:
        """The bytes of its tensors that ranks split."""
        return sum(_aligned(slot.get().nbytes) for slot, placement in self.members if is_sharded(placement))


def check_initializable(call: Call) -> None:
    """Raise ``CaptureError``, with all names, for state on the meta device that nothing can initialize."""
    on_meta = [slot for slot in call.slots if slot.get().is_meta]
    if not on_meta:
        return
    owners = _by_holder(call)
    lost = [
        slot.input.name
        for slot in on_meta
        if slot.input.role in _STATE and not _initializer(owners[id(slot.holder)], call)
    ]
    if lost:
        refuse(
            CaptureError,
            f"{', '.join(lost)} {'are' if len(lost) > 1 else 'is'} on the meta device, and nothing initializes "
            f"{'them' if len(lost) > 1 else 'it'}: the modules have no reset_parameters(). Give the mode a function "
            "that initializes one module, DataParallel(param_init_fn=...), or materialize the model first, with "
            'model.to_empty(device="cpu") and a checkpoint',
        )
    stray = [slot.input.name for slot in on_meta if slot.input.role not in _STATE and not call.initial.holds(slot)]
    if stray:
        raise CaptureError(
            f"{', '.join(stray)} {'are' if len(stray) > 1 else 'is'} on the meta device, and has no values: make the "
            "optimizer, or the gradients, after spmd.materialize(model)"
        )


def seed_to_initialize(call: Call) -> list[int]:
    """A number drawn from torch's default generator, if there is state to initialize."""
    if not any(slot.get().is_meta for slot in call.slots):
        return []
    return [int(torch.randint(2**62, ()))]


def initialize(prepared: Prepared, seed: int = 0) -> None:
    """Give all state on the meta device its values, on all ranks from the same ``seed``.

    Raises ``SpmdError``, with all names, for tensors that a module's own code leaves as they are. Everything is on meta
    again then, and if that code raises.
    """
    call, left = prepared.call, list[str]()
    owners = _owners(prepared)
    scratch = torch.empty(
        max((owner.split_bytes for owner in owners), default=0), dtype=torch.uint8, device=call.device
    )
    with torch.no_grad(), _random_numbers(seed, call.device):
        metas = [(slot, slot.get()) for owner in owners for slot, _ in owner.members]
        try:
            for owner in reversed(owners):
                left += _initialize(owner, prepared, scratch)
            _check_all_written(left)
        except BaseException:
            _put_back(metas, call)
            raise
    for slot, placement in zip(prepared.slots, prepared.placements, strict=True):
        if slot.get().is_meta and slot.input.role is Role.OPTIMIZER_STATE:  # made for this call, so zeros
            slot.put(_placed(slot.get(), prepared.local(slot, placement), placement, call))


def make_empty(prepared: Prepared) -> None:
    """Give all parameters and buffers on the meta device memory for this rank's part, whose values come later."""
    call, renewed = prepared.call, dict[int, torch.Tensor]()
    for slot, placement in zip(prepared.slots, prepared.placements, strict=True):
        meta = slot.get()
        if not meta.is_meta or id(meta) in renewed:
            continue
        local = torch.empty(local_shape(meta.shape, placement, call.mesh), dtype=meta.dtype, device=call.device)
        placed = _placed(meta, prepared.in_memory(slot, local), placement, call)
        if slot.input.role is Role.PARAMETER:
            renewed[id(meta)] = replace_parameter(meta, placed)
            prepared.replaced.append(weakref.ref(meta))
        else:
            slot.put(placed)
    rebind(call.given, call.references, renewed)


def _check_all_written(left: Sequence[str]) -> None:
    if left:
        raise SpmdError(
            f"nothing was initialized, since {', '.join(left)} would stay on the meta device: the code that "
            f"initializes the module does not write {'them' if len(left) > 1 else 'it'}. Give the mode a function that "
            "does, DataParallel(param_init_fn=...)"
        )


def _put_back(metas: Sequence[tuple[Slot, torch.Tensor]], call: Call) -> None:
    """Let modules and optimizers hold again what they held on the meta device."""
    renewed = {id(slot.get()): meta for slot, meta in metas if slot.input.role is Role.PARAMETER}
    for slot, meta in metas:
        if slot.input.role is Role.BUFFER:
            slot.holder[slot.key] = meta
    for meta in renewed.values():
        forget_successor(meta)
    rebind(call.given, call.references, renewed)


def _owners(prepared: Prepared) -> list[_Owner]:
    """The modules that own tensors on the meta device, in order; a tied tensor belongs to the first that holds it."""
    modules = _by_holder(prepared.call)
    owners = {module: _Owner(module) for module in modules.values()}
    for slot, placement in zip(prepared.slots, prepared.placements, strict=True):
        if slot.input.role in _STATE and slot.get().is_meta:
            owners[modules[id(slot.holder)]].members.append((slot, placement))
    return [owner for owner in owners.values() if owner.members]


def _by_holder(call: Call) -> dict[int, nn.Module]:
    """Each module, in order, by the ids of the dicts of its own parameters and buffers."""
    return {id(holder): module for _, module in submodules_of(call.given.modules) for holder in _held_by(module)}


def _held_by(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return own_parameters(module), own_buffers(module)


def _initializer(module: nn.Module, call: Call) -> Callable[[nn.Module], Any] | None:
    """The initializer of a module: the mode's function, or the module's ``reset_parameters``."""
    if call.mode.param_init_fn is not None:
        return call.mode.param_init_fn
    return methodcaller("reset_parameters") if callable(getattr(module, "reset_parameters", None)) else None


def _initialize(owner: _Owner, prepared: Prepared, scratch: torch.Tensor) -> list[str]:
    """Initialize one module; returns the names of what its code left alone.

    What is split is made in ``scratch``, memory for all modules: an allocator that gives and takes back each whole
    tensor between parts that stay is left with holes.
    """
    call = prepared.call
    module, initializer = owner.module, _initializer(owner.module, call)
    assert initializer is not None, "checked before anything was traced"
    metas = [slot.get() for slot, _ in owner.members]
    for (slot, placement), meta in zip(owner.members, metas, strict=True):
        if is_sharded(placement):
            whole, scratch = _carved(scratch, meta)
        else:
            whole = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=call.device)
        if whole.is_floating_point():
            whole.fill_(torch.nan)  # what nobody writes is not taken for a value
        is_parameter = slot.input.role is Role.PARAMETER
        slot.holder[slot.key] = nn.Parameter(whole, meta.requires_grad) if is_parameter else whole
    empty = [slot.get() for slot, _ in owner.members]
    versions = list(map(version_of, empty))
    try:
        with _others_kept(module, empty), _children_aside(module):
            initializer(module)
        values = [slot.get() for slot, _ in owner.members]
    finally:
        for (slot, _), meta in zip(owner.members, metas, strict=True):
            slot.holder[slot.key] = meta
    left, renewed = [], dict[int, torch.Tensor]()
    for (slot, placement), meta, made, version, now in zip(owner.members, metas, empty, versions, values, strict=True):
        if now.is_meta or (now is made and version_of(made) == version and not _written_by_data(made)):
            left.append(slot.input.name)
            continue
        local = part_of(now.detach(), placement, call.mesh) if is_sharded(placement) else now.detach().to(call.device)
        placed = _placed(meta, prepared.in_memory(slot, local), placement, call)
        if slot.input.role is Role.PARAMETER:
            renewed[id(meta)] = replace_parameter(meta, placed)
            prepared.replaced.append(weakref.ref(meta))
        else:
            slot.holder[slot.key] = placed
    rebind(call.given, call.references, renewed)
    return left


def _carved(scratch: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor like ``like`` in the first bytes of ``scratch``, and the rest of it."""
    flat = scratch[: like.nbytes].view(like.dtype)
    return flat.as_strided(like.shape, like.stride()), scratch[_aligned(like.nbytes) :]


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _written_by_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor was written through its ``.data``, of which it has no count."""
    return tensor.is_floating_point() and not bool(tensor.isnan().all())


def _placed(meta: torch.Tensor, local: torch.Tensor, placement: Placements, call: Call) -> torch.Tensor:
    """The tensor that takes the place of ``meta``: a DTensor if it is split."""
    if not is_sharded(placement):
        return local
    return as_dtensor(local, placement, call.device_mesh, meta.shape, meta.stride())


@contextmanager
def _others_kept(module: nn.Module, new: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give the module's tensors that have values already these again at the end."""
    ids = set(map(id, new))
    held = [tensor for holder in _held_by(module) for tensor in holder.values() if tensor is not None]
    kept = [(tensor, tensor.detach().clone()) for tensor in held if id(tensor) not in ids and not tensor.is_meta]
    try:
        yield
    finally:
        for tensor, values in kept:
            tensor.copy_(values)


@contextmanager
def _children_aside(module: nn.Module) -> Iterator[None]:
    """Let what ``module`` holds have no values meanwhile: its own code may initialize its children once more."""
    aside: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    inside = [each for each in module.modules() if each is not module]
    own = {id(tensor) for holder in _held_by(module) for tensor in holder.values()}
    for holder in (holder for each in inside for holder in _held_by(each)):
        for key, tensor in holder.items():
            if tensor is not None and not tensor.is_meta and id(tensor) not in own:
                aside.append((holder, key, tensor))
    for holder, key, tensor in aside:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        holder[key] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    try:
        yield
    finally:
        for holder, key, tensor in aside:
            holder[key] = tensor


@contextmanager
def _random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's and Python's default generators from ``seed``; restore them at the end."""
    before = random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
