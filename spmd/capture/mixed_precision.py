"""Mixed precision: casts at the boundaries of annotated modules, as a ``MixedPrecisionPolicy`` asks for them.

While a module with a policy runs, its parameters and buffers are casts of the ones that it holds, so that autograd
casts gradients back. ``nn.Module.__call__`` is replaced for the length of a trace: unlike torch's global hooks it sees
arguments by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from .._torch import get_proxy_mode, tree_map
from ..annotations.contract import state
from ..annotations.policies import MixedPrecisionPolicy
from ..annotations.resolve import Mark, Unit
from ..call.call import Call
from ..call.state import buffers_of, parameters_of, submodules_of
from .provenance import proxy_node
from .unsupported import Refused


@dataclass
class _Entry:
    """A parameter or buffer of a module, by its name, with each dict and key that holds it."""

    name: str
    holders: tuple[tuple[dict[str, Any], str], ...]

    def get(self) -> Any:
        """The tensor that the module holds now."""
        holder, key = self.holders[0]
        return holder.get(key)

    def put(self, tensor: torch.Tensor) -> None:
        """Let every holder hold ``tensor``: what is tied stays so."""
        for holder, key in self.holders:
            holder[key] = tensor


@dataclass
class _Casts:
    """The casts of one unit. ``ran``: whether one of its modules was called."""

    policy: MixedPrecisionPolicy
    parameters: list[_Entry] = field(default_factory=list)
    buffers: list[_Entry] = field(default_factory=list)
    ran: bool = False

    def run(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call ``module`` on casts of its arguments, and cast what it returns."""
        policy, self.ran = self.policy, True
        if policy.full_precision_in_eval and not module.training:
            return call(module, *args, **kwargs)
        if policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        with _unwritten(self.parameters, policy.param_dtype), _written_back(self.buffers, policy.buffer_dtype):
            result = call(module, *args, **kwargs)
        return _cast(result, policy.output_dtype)


@contextmanager
def mixed_precision(call: Call) -> Iterator[None]:
    """Apply the policies of the modules of a call. A policy whose modules never run is in the notes of the call."""
    casts = _casts(call)
    if not casts:
        yield
        return
    original = nn.Module.__call__

    def cast_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = casts.get(id(module))
        return found.run(original, module, args, kwargs) if found else original(module, *args, **kwargs)

    nn.Module.__call__ = cast_and_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
    idle = {each.parameters[0].name for each in casts.values() if each.parameters and not each.ran}
    call.notes = [f"the mixed precision of {name} has no effect: its module was not called" for name in sorted(idle)]


def _casts(call: Call) -> dict[int, _Casts]:
    """The casts of each module that has a policy, by its id: an annotated one, or a module among the arguments."""
    found: dict[Unit | None, _Casts]
    found = {unit: _Casts(unit.mp_policy) for unit in call.annotations.units if unit.mp_policy is not None}
    if call.mode.mp_policy is not None:
        found[None] = _Casts(call.mode.mp_policy)  # of what no annotation claims
    for held, kind in ((parameters_of, "parameters"), (buffers_of, "buffers")):
        for each in held(call.arguments.modules):
            mark = call.annotations.marks.get(each.name, Mark(None))
            if mark.unit in found and not mark.ignored:
                getattr(found[mark.unit], kind).append(_Entry(each.name, each.holders))
    modules = dict(submodules_of(call.arguments.modules))  # an override may have put another one in the place of one
    of_unit = {unit: unit.paths if unit is not None else _unmarked(call) for unit in found}
    return {id(modules[path]): found[unit] for unit, paths in of_unit.items() for path in paths if path in modules}


def _unmarked(call: Call) -> list[str]:
    """The modules among the arguments that carry no annotation."""
    return [path for path, module in call.arguments.modules.items() if state(module) is None]


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """``values`` with all floating-point tensors in them cast."""
    if dtype is None:
        return values
    return tree_map(lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, values)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _traced(tensor: torch.Tensor) -> fx.Node | None:
    """The node whose value a tensor has now: that of the op that wrote it last, in place or not."""
    mode = get_proxy_mode()
    assert mode is not None, "casts are made while tracing"
    return proxy_node(tensor, mode.tracer)


@contextmanager
def _swapped(entries: list[_Entry], dtype: torch.dtype | None) -> Iterator[list[tuple[_Entry, torch.Tensor]]]:
    """Put casts in the place of tensors; yields each entry with its cast. The tensors are back at the end."""
    swapped, before = list[tuple[_Entry, torch.Tensor]](), list[torch.Tensor]()
    for entry in entries if dtype is not None else ():
        tensor = entry.get()
        if _is_float(tensor) and tensor.dtype is not dtype:
            cast = tensor.to(dtype)
            entry.put(cast)
            before.append(tensor)
            swapped.append((entry, cast))
    try:
        yield swapped
    finally:
        for (entry, _), tensor in zip(swapped, before, strict=True):
            entry.put(tensor)


@contextmanager
def _unwritten(parameters: list[_Entry], dtype: torch.dtype | None) -> Iterator[None]:
    """Put casts in the place of parameters, which the module may not write: it would round all of them."""
    with _swapped(parameters, dtype) as swapped:
        values = [_traced(cast) for _, cast in swapped]
        yield
        for (entry, cast), value in zip(swapped, values, strict=True):
            if entry.get() is not cast or _traced(cast) is not value:
                raise Refused(
                    f"forward writes to {entry.name} while mixed precision has a cast of it in its place. Write to it "
                    "outside of the module."
                )


@contextmanager
def _written_back(buffers: list[_Entry], dtype: torch.dtype | None) -> Iterator[None]:
    """Put casts in the place of buffers; what the module writes to them, or puts in their place, is cast back."""
    written: list[tuple[_Entry, Any]] = []
    with _swapped(buffers, dtype) as swapped:
        values = [_traced(cast) for _, cast in swapped]
        yield
        for (entry, cast), value in zip(swapped, values, strict=True):
            now = entry.get()
            if now is not cast or _traced(cast) is not value:
                written.append((entry, now))
    with torch.no_grad():
        for entry, now in written:
            tensor = entry.get()
            if isinstance(now, torch.Tensor) and now.shape == tensor.shape:
                tensor.copy_(now)
            else:
                entry.put(now)  # refused as any other change of a buffer's shape
