"""``spmd.unshard``: look at a sharded model, use it or edit it as the plain model that it was."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from passes import SpmdError

from ._torch import (
    BUFFERS,
    CHILDREN,
    HOOK_DICTS,
    PARAMETERS,
    get_proxy_mode,
    local_tensor,
    own_buffers,
    own_parameters,
    storage_id,
)
from .annotations import contract
from .deferral.pending import finish_pending
from .ranks.world import describe
from .state import master_copies
from .state.background_reads import READS
from .state.distribute import as_dtensor, part_of

_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the modules that are unsharded now


@dataclass
class _Entry:
    """One tensor of the model, everywhere that it is held, and the whole one in its place; None where there is none."""

    name: str
    live: torch.Tensor
    holders: list[tuple[dict[str, Any], str]]
    whole: torch.Tensor | None = None

    def put(self, tensor: torch.Tensor) -> None:
        """Let ``tensor`` stand wherever this one is held."""
        for holder, key in self.holders:
            holder[key] = tensor

    def take(self) -> str:
        """Take what stands there now for the whole one; returns what is wrong with it, if anything."""
        found = [holder.get(key) for holder, key in self.holders]
        if self.whole is None or all(each is self.whole for each in found):
            return ""
        now = found[0]
        fits = isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (self.live.shape, self.live.dtype)
        if not fits or any(each is not now for each in found):
            return f"{self.name} was replaced by something of another shape or dtype, or tied to something else"
        self.whole = now
        return ""


@dataclass(frozen=True)
class _Structure:
    """The structure of a module: its class, and copies of its dicts of tensors, children and hooks."""

    name: str
    module: nn.Module
    kind: type
    dicts: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, name: str, module: nn.Module) -> _Structure:
        """The structure now."""
        kept = {PARAMETERS, BUFFERS, CHILDREN, *HOOK_DICTS}
        return cls(name, module, type(module), {key: dict(vars(module)[key]) for key in kept & vars(module).keys()})

    def change(self) -> str:
        """The first change since then, empty for none; hooks may change."""
        if type(self.module) is not self.kind:
            return f"{self.name or 'the module'} became a {type(self.module).__name__}"
        for key in (PARAMETERS, BUFFERS, CHILDREN):
            before, now = self.dicts[key], vars(self.module)[key]
            for name in [*before, *now]:
                path = f"{self.name}.{name}".lstrip(".")
                if (now.get(name) is None) != (before.get(name) is None):
                    return f"{path} was {'removed' if now.get(name) is None else 'added'}"
                if key == CHILDREN and now.get(name) is not before.get(name):
                    return f"{path} was replaced"
        return ""

    def restore(self) -> None:
        """Let the module consist of that again."""
        self.module.__class__ = self.kind
        for key, before in self.dicts.items():
            now = vars(self.module)[key]
            now.clear()
            now.update(before)


@contextmanager
def unshard(
    module: nn.Module,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """Make ``module`` a plain model inside of the context, with whole parameters and buffers; all ranks enter it.

    Names, order, ties and ``requires_grad`` are those of the plain model, so that ``model(x)``, ``model.generate``, an
    export or an edit work as without ``spmd``. At the end every rank writes its edits to its own parts.

    - ``writeback``: False drops all edits.
    - ``rank0_only``: only the first rank of the mesh has whole tensors; its edits reach all ranks.
    - ``offload_to_cpu``: the whole tensors are on the CPU.
    - ``with_grads``: ``.grad`` is whole, too, and edits of it are written back.
    - ``recurse``: False takes the module's own tensors only; of an annotated module, those of its own unit.

    If the block raises on any rank, nothing is written back, and the other ranks raise ``SpmdError``. So do all if a
    parameter was replaced by one of another shape or dtype, or if parameters, buffers or children were added, removed
    or made anew, as ``weight_norm`` does: modules then consist of what they did. And, at once, this inside of a step
    that is being compiled, or for a module of which a part is unsharded already.
    """
    named = list(module.named_modules()) if recurse else list(_own_unit(module))
    modules = [each for _, each in named]
    _check(modules)
    finish_pending()
    READS.wait_for_all()
    entries, structures = _entries(named), [_Structure.of(*each) for each in named]
    groups = _groups(entries)
    has_whole = not rank0_only or not any(map(dist.get_rank, groups))
    _show(entries, has_whole, offload_to_cpu, with_grads)
    _whole.update(modules)
    done = False
    try:
        yield
        done = True
    finally:
        wrong = _restored(structures) or next(filter(None, [entry.take() for entry in entries]), "")
        for entry in entries:
            entry.put(entry.live)
        _whole.difference_update(modules)
        all_done = not writeback or _all_done(done and not wrong, groups, entries)
        if writeback and all_done:
            for entry in entries:
                _write_back(entry, groups if rank0_only else (), with_grads)
        if done and not all_done:
            raise SpmdError(f"nothing was written back: {wrong or 'the block failed on another rank'}")


def _own_unit(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """``module``, and if an annotation claims it the modules below that no annotation of their own claims."""
    yield path, module
    if path or contract.state(module) is not None:
        for name, child in module.named_children():
            if contract.state(child) is None:
                yield from _own_unit(child, f"{path}.{name}".lstrip("."))


def _restored(structures: Sequence[_Structure]) -> str:
    """Restore modules of which some consist of something else now; returns what was changed, if anything."""
    changed = next(filter(None, [structure.change() for structure in structures]), "")
    if not changed:
        return ""
    for structure in structures:
        structure.restore()
    return f"{changed}, but a model keeps its parts in there: change them outside, before the first call of a step"


def check_is_sharded(modules: Iterable[nn.Module]) -> None:
    """Raise ``SpmdError`` if one of these modules is unsharded now: a compiled step cannot train it then."""
    if _whole and any(each in _whole for module in modules for each in module.modules()):
        raise SpmdError("a compiled step was called inside of spmd.unshard: leave that block first")


def _check(modules: list[nn.Module]) -> None:
    if get_proxy_mode() is not None:
        raise SpmdError("spmd.unshard was called inside of a compiled step, where parameters are whole already")
    if any(each in _whole for each in modules):
        raise SpmdError("a part of this module is unsharded already: do not nest spmd.unshard")


def _entries(named: Iterable[tuple[str, nn.Module]]) -> list[_Entry]:
    """The tensors of these modules, tied ones once, in the order of the model."""
    found: dict[int, _Entry] = {}
    for path, each in named:
        for holder in (own_parameters(each), own_buffers(each)):
            for key, tensor in holder.items():
                if tensor is not None:
                    name = f"{path}.{key}".lstrip(".")
                    found.setdefault(id(tensor), _Entry(name, tensor, [])).holders.append((holder, key))
    return list(found.values())


def _groups(entries: Sequence[_Entry]) -> Sequence[Any]:
    """The process groups along the axes of the mesh that the model is on; without sharded tensors, of all ranks."""
    meshes = [entry.live.device_mesh for entry in entries if isinstance(entry.live, DTensor)]
    if meshes:
        mesh = max(meshes, key=lambda mesh: mesh.ndim)
        return [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return [dist.group.WORLD] if dist.is_initialized() else []


@torch.inference_mode(False)  # what evaluation is in, often: the whole tensors are ordinary ones all the same
def _show(entries: Sequence[_Entry], has_whole: bool, offload_to_cpu: bool, with_grads: bool) -> None:
    """Gather all tensors, one after the other, and put the whole ones in their places where this rank has them."""
    for entry in entries:
        exact = master_copies.exact(entry.live)
        whole = _gathered(entry.live if exact is None else exact, offload_to_cpu)
        gradient = entry.live.grad
        whole_gradient = _gathered(gradient, offload_to_cpu) if with_grads and gradient is not None else None
        if has_whole:
            is_parameter = isinstance(entry.live, nn.Parameter)
            entry.whole = nn.Parameter(whole, entry.live.requires_grad) if is_parameter else whole
            entry.whole.grad = whole_gradient
    for entry in entries:
        if entry.whole is not None:
            entry.put(entry.whole)


def _gathered(tensor: torch.Tensor, offload_to_cpu: bool) -> torch.Tensor:
    """The whole tensor in memory of its own."""
    found = tensor.detach()
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    whole = whole.cpu() if offload_to_cpu else whole
    return whole.clone() if storage_id(whole) == storage_id(local_tensor(tensor)) else whole


def _write_back(entry: _Entry, groups: Sequence[Any], with_grads: bool) -> None:
    """Write this rank's part of the whole tensor; with ``groups``, of that of the first rank of each."""
    with torch.no_grad():
        local_tensor(entry.live).copy_(_part(entry.live, entry.whole, groups))
        master_copies.take(entry.live)
        if with_grads and isinstance(entry.live, nn.Parameter):
            gradient = entry.whole.grad if entry.whole is not None else None
            exists = torch.tensor(int(gradient is not None), device=local_tensor(entry.live).device)
            _broadcast(exists, groups)
            entry.live.grad = _gradient(entry.live, gradient, groups) if exists else None


def _part(live: torch.Tensor, whole: torch.Tensor | None, groups: Sequence[Any]) -> torch.Tensor:
    device = local_tensor(live).device
    values = torch.empty(live.shape, dtype=live.dtype, device=device) if whole is None else whole.detach()
    values = values.to(device).contiguous()
    _broadcast(values, groups)
    return part_of(values, tuple(live.placements), describe(live.device_mesh)) if isinstance(live, DTensor) else values


def _gradient(live: torch.Tensor, whole: torch.Tensor | None, groups: Sequence[Any]) -> torch.Tensor:
    part = _part(live, whole, groups)
    if not isinstance(live, DTensor):
        return part.clone()
    return as_dtensor(part, tuple(live.placements), live.device_mesh, live.shape, live.stride())


def _broadcast(values: torch.Tensor, groups: Sequence[Any]) -> None:
    for group in groups:
        dist.broadcast(values, group_src=0, group=group)


def _all_done(done: bool, groups: Sequence[Any], entries: Sequence[_Entry]) -> bool:
    """Whether the block ended well on all ranks."""
    device = local_tensor(entries[0].live).device if entries else torch.device("cpu")
    flag = torch.tensor(int(done), device=device)
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MIN, group)
    return bool(flag)
