"""``FinalState``: what the step returned and what the state holds when it ends, read while still inside the trace.

Refused here: state that a compiled step could not store, or that it would change only once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from passes import CaptureError

from .._torch import own_buffers, own_parameters
from ..call.state import Slot, state_name, submodules_of
from ..call.tree import flatten
from .side_effects import holds_traced, is_traced
from .swap_state import StateSwap
from .unsupported import check_results


@dataclass(frozen=True)
class NewEntry:
    """New state of an optimizer."""

    optimizer: str
    parameter: str
    key: Any
    value: Any
    unless: int | None = None  # index in ``FinalState.skips`` of the condition under which it is not made after all


@dataclass(frozen=True)
class FinalState:
    """Values are traced tensors, or plain Python values."""

    results: list[Any]
    result_spec: Any
    slots: list[Any]  # one per slot; None where a gradient is gone
    gradients: dict[str, Any]  # new gradients by parameter name
    skips: list[Any]  # conditions under which new state was not made after all
    optimizer_state: list[NewEntry]

    @classmethod
    def of(cls, swap: StateSwap, result: Any) -> FinalState:
        """Read the final state. Raises ``CaptureError`` and ``Refused`` for changes that cannot be compiled."""
        leaves, spec = flatten(result)
        check_results(leaves)
        _refuse_new_parameters(swap)
        _refuse_argument_gradients(swap)
        _refuse_changed_parameters(swap)
        swap.skipped.check(swap.call.arguments.scalers)
        slots = [_final_value(swap, slot) for slot, _ in swap.pairs]
        skips: list[Any] = []
        new_state = _new_state(swap, skips)
        return cls(leaves, spec, slots, _new_gradients(swap), skips, new_state)

    def map_state(self, function: Callable[[Any], Any]) -> FinalState:
        """The same with ``function`` of each value of state."""
        new = [replace(entry, value=function(entry.value)) for entry in self.optimizer_state]
        return replace(self, slots=[function(value) for value in self.slots], optimizer_state=new)

    def traced(self) -> list[Any]:
        """The traced values, in the order of the graph's outputs."""
        new_state = [entry.value for entry in self.optimizer_state]
        values = [*self.results, *self.slots, *self.gradients.values(), *self.skips, *new_state]
        return [value for value in values if is_traced(value)]


def _refuse_new_parameters(swap: StateSwap) -> None:
    known = {(id(holder), key) for holder, key, _ in swap.entries}
    for name, submodule in submodules_of(swap.modules):
        for holder in (own_parameters(submodule), own_buffers(submodule)):
            for key, tensor in holder.items():
                if tensor is not None and (id(holder), key) not in known:
                    raise CaptureError(f"the step makes {name}.{key}: make it in the module's __init__, as a tensor")


def _refuse_argument_gradients(swap: StateSwap) -> None:
    for leaf, fake in zip(swap.call.arguments.tensors(), swap.fakes.tensors, strict=True):
        if fake.grad is not None:
            raise CaptureError(
                f"backward gives the argument {leaf.name} a gradient, which a compiled step does not store: "
                f"return torch.autograd.grad(loss, {leaf.name}) instead, or pass it without requires_grad"
            )


def _refuse_changed_parameters(swap: StateSwap) -> None:
    for slot, fake in swap.pairs:
        if slot.input.role != "parameter":
            continue
        name = slot.input.name
        if slot.holder[slot.key] is not fake:
            raise CaptureError(
                f"the step puts another tensor in the place of {name}, which the optimizer would not know: write into "
                f"it, under torch.no_grad(), with {name}.copy_(value)"
            )
        if fake.requires_grad != swap.live_of[name].requires_grad:
            raise CaptureError(
                f"the step leaves {name}.requires_grad changed, which a compiled step would do once instead of at "
                "every call: put it back at the end of the step, or change it outside"
            )


def _final_value(swap: StateSwap, slot: Slot) -> Any:
    if slot.input.role == "gradient":
        return swap.fake_of[slot.input.of or ""].grad
    if slot.input.role == "optimizer state":
        return _checked(swap, slot, swap.fake_state[id(slot.holder)].get(slot.key))
    return _checked(swap, slot, slot.holder[slot.key])


def _checked(swap: StateSwap, slot: Slot, value: Any) -> Any:
    """``value``, if it has the shape and dtype of its slot: programs are bound to state, and ranks hold parts of it."""
    before = slot.input
    if isinstance(value, torch.Tensor) and (tuple(value.shape), value.dtype) == (before.shape, before.dtype):
        return value
    now = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    line = swap.recorder.source_of(value) if isinstance(value, torch.Tensor) else ""
    raise CaptureError(
        f"the step makes {before.name}, which is {before.dtype}{list(before.shape)}, into {now}"
        f"{f' at {line}' if line else ''}: state keeps its shape and dtype from call to call. Make it in its final "
        "form before the step, and convert what is written into it"
    )


def _new_gradients(swap: StateSwap) -> dict[str, Any]:
    stored = {slot.input.of for slot, _ in swap.pairs if slot.input.role == "gradient"}
    return {name: fake.grad for name, fake in swap.fake_of.items() if fake.grad is not None and name not in stored}


def _new_state(swap: StateSwap, skips: list[Any]) -> list[NewEntry]:
    """What optimizers made; the conditions under which they did not are appended to ``skips``."""
    known = {slot.input.name for slot, _ in swap.pairs}
    names = {id(fake): name for name, fake in swap.fake_of.items()}
    found = []
    for path, optimizer in swap.optimizers.items():
        for fake, values in optimizer.state.items():
            for key, value in values.items():
                name = names[id(fake)]
                if not is_traced(value) and holds_traced(value):
                    raise CaptureError(
                        f"{path} keeps a {type(value).__name__} of tensors in state[{name}][{key!r}]: "
                        "keep each tensor under a key of its own"
                    )
                if state_name(path, key, name) not in known:
                    unless = _index_in(skips, swap.skipped.condition(optimizer, fake, key))
                    found.append(NewEntry(path, name, key, value, unless))
    return found


def _index_in(values: list[Any], value: Any) -> int | None:
    """The index of ``value`` in ``values``, appended if it is not there; None for None."""
    if value is None:
        return None
    for index, each in enumerate(values):
        if each is value:
            return index
    values.append(value)
    return len(values) - 1
