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
from ..call.state import buffers_of, parameters_of
from .provenance import proxy_node

_Entry = tuple[dict[str, Any], str]  # a module's dict of parameters or buffers, and a key in it


@dataclass
class _Casts:
    """The casts of one unit."""

    policy: MixedPrecisionPolicy
    parameters: list[_Entry] = field(default_factory=list)
    buffers: list[_Entry] = field(default_factory=list)

    def run(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call ``module`` on casts of its arguments, and cast what it returns."""
        policy = self.policy
        if policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        with _swapped(self.parameters, policy.param_dtype), _written_back(self.buffers, policy.buffer_dtype):
            result = call(module, *args, **kwargs)
        return _cast(result, policy.output_dtype)


@contextmanager
def mixed_precision(call: Call) -> Iterator[None]:
    """Apply the policies of the annotated modules of a call."""
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


def _casts(call: Call) -> dict[int, _Casts]:
    """The casts of each module that has a policy, by its id: an annotated one, or a module among the arguments."""
    found: dict[Unit | None, _Casts]
    found = {unit: _Casts(unit.mp_policy) for unit in call.annotations.units if unit.mp_policy is not None}
    if call.mp_policy is not None:
        found[None] = _Casts(call.mp_policy)  # of what no annotation claims
    for held, kind in ((parameters_of, "parameters"), (buffers_of, "buffers")):
        for each in held(call.arguments.modules):
            mark = call.annotations.marks.get(each.name, Mark(None))
            if mark.unit in found and not mark.ignored:
                getattr(found[mark.unit], kind).extend(each.holders)
    roots = [module for module in call.arguments.modules.values() if state(module) is None]
    of_unit = {unit: unit.annotation.modules if unit is not None else roots for unit in found}
    return {id(module): found[unit] for unit, modules in of_unit.items() for module in modules}


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
def _swapped(entries: list[_Entry], dtype: torch.dtype | None) -> Iterator[list[tuple[_Entry, Any, Any]]]:
    """Put casts in the place of tensors; yields each entry with the tensor and its cast."""
    swapped = []
    for holder, key in entries if dtype is not None else ():
        tensor = holder[key]
        if _is_float(tensor) and tensor.dtype is not dtype:
            holder[key] = tensor.to(dtype)
            swapped.append(((holder, key), tensor, holder[key]))
    try:
        yield swapped
    finally:
        for (holder, key), tensor, _ in reversed(swapped):
            holder[key] = tensor


@contextmanager
def _written_back(buffers: list[_Entry], dtype: torch.dtype | None) -> Iterator[None]:
    """Put casts in the place of buffers; what the module writes to them, or puts in their place, is cast back."""
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    with _swapped(buffers, dtype) as swapped:
        values = [_traced(cast) for _, _, cast in swapped]
        yield
        for ((holder, key), tensor, _), value in zip(swapped, values, strict=True):
            if _traced(holder[key]) is not value:
                written.append((tensor, holder[key]))
    with torch.no_grad():
        for tensor, now in written:
            tensor.copy_(now)
