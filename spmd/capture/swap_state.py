"""``StateSwap``: put fakes in the place of live state for the length of a trace, and the live state back afterwards.

Swapped are parameters and buffers of modules, gradients, optimizer state, parameter groups and the state of scalers.
All of it is restored at the end, also when tracing raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch

from passes import CaptureError

from .._torch import accumulation_hooks, gradient_hooks, own_buffers, own_parameters
from ..annotations.no_sync import is_left_pending
from ..call.call import Call
from ..call.grad_scaler import SkippedSteps
from ..call.nested_state import with_fakes
from ..call.state import SCHEDULER_NOTES, Slot, buffers_of, parameters_of, submodules_of
from ..python_state.effects.attributes import Snapshot, contain_group_list_effects, restored_attributes
from ..python_state.reads import is_plain
from ..python_state.traced import is_traced
from .batch_norm import traceable_norm
from .fakes import Fakes
from .optimizers import TracedOptimizer, check_traceable, other_optimizers, refuse_schedulers
from .provenance import Recorder
from .unsupported import accumulation_hook
from .watched_state import WatchedState


class StateSwap:
    """The fakes of one trace in the place of the live state of ``call``."""

    def __init__(self, call: Call, fakes: Fakes, recorder: Recorder) -> None:
        self.call, self.fakes, self.recorder = call, fakes, recorder
        self.modules, self.optimizers = call.arguments.modules, call.arguments.optimizers
        self.pairs: list[tuple[Slot, torch.Tensor]] = list(zip(call.slots, fakes.slots, strict=True))
        parameters = [(slot, fake) for slot, fake in self.pairs if slot.input.role == "parameter"]
        self.fake_of = {slot.input.name: fake for slot, fake in parameters}
        self.live_of = {slot.input.name: slot.get() for slot, _ in parameters}
        self.skipped = SkippedSteps()
        self.fake_state: dict[int, dict[Any, Any]] = {}  # by the id of the live state dict of one parameter
        self.states: list[tuple[str, torch.optim.Optimizer, Any, Any]] = []  # (name, optimizer, parameter, its state)
        self.entries: list[tuple[dict[str, Any], str, torch.Tensor]] = []  # (holder, key, fake) of swapped entries
        self.attributes: list[Snapshot] = []  # of modules and optimizers, as the step finds them
        self.groups: list[
            tuple[str, int, dict[str, Any], dict[str, Any]]
        ] = []  # (optimizer, index, group, its entries)
        self.live_and_fakes = [(slot.get(), fake) for slot, fake in self.pairs]
        self.by_id = {id(live): fake for live, fake in self.live_and_fakes}
        self.pending: set[str] = set()  # parameters whose last backward pass ran inside of ``no_sync``
        self._step_runs = False

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap for the length of the context."""
        with ExitStack() as stack:
            self._swap_modules(stack)
            self._swap_gradients(stack)
            # All are looked at before the form of one is changed: they may share their groups.
            traced = {path: TracedOptimizer(optimizer, self.recorder) for path, optimizer in self.optimizers.items()}
            # By the id of the live one: what wraps an optimizer may share its state. A state refers to this swap.
            states = dict[int, WatchedState]()
            for path, each in traced.items():
                self._swap_optimizer(stack, path, each, states)
            self.groups = self._groups()
            self._swap_scalers(stack)
            stack.enter_context(other_optimizers(self.optimizers.values(), self.recorder))
            stack.enter_context(refuse_schedulers())
            owners = [*submodules_of(self.modules), *self.optimizers.items()]
            self.attributes = stack.enter_context(restored_attributes(owners))
            yield

    def _swap_modules(self, stack: ExitStack) -> None:
        self.entries = self._module_entries()
        for _, submodule in submodules_of(self.modules):
            stack.enter_context(traceable_norm(submodule))
            stack.enter_context(_restored(own_parameters(submodule)))
            stack.enter_context(_restored(own_buffers(submodule)))
        for holder in {id(holder): holder for holder, _, _ in self.entries}.values():
            stack.enter_context(_restored(holder))
        for holder, key, fake in self.entries:
            holder[key] = fake

    def _module_entries(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Every entry of a module that holds state, with its fake; those of replaced submodules are among the slots."""
        entries = [
            (slot.holder, slot.key, fake) for slot, fake in self.pairs if slot.input.role in ("parameter", "buffer")
        ]
        for held in [*parameters_of(self.modules), *buffers_of(self.modules)]:
            fake = self.by_id.get(id(held.tensor))
            if fake is None:
                raise CaptureError(
                    f"{held.name} is new in a replacement that an Override made, and would not be trained: "
                    "a replacement may hold no parameters or buffers but those of the module it replaces"
                )
            entries += [(holder, key, fake) for holder, key in held.holders]
        return entries

    def _swap_gradients(self, stack: ExitStack) -> None:
        for slot, fake in self.pairs:
            if slot.input.role == "gradient":
                self.fake_of[slot.input.of or ""].grad = fake
        for name in self.fake_of:
            self._add_hooks(stack, name)

    def _add_hooks(self, stack: ExitStack, name: str) -> None:
        """Carry the user's hooks on a parameter over to its fake, and tag its gradient whenever it is complete."""
        fake, live = self.fake_of[name], self.live_of[name]
        if not fake.requires_grad:
            return
        for hook in (gradient_hooks(live) or {}).values():
            stack.callback(fake.register_hook(hook).remove)
        for hook in (accumulation_hooks(live) or {}).values():
            stack.callback(fake.register_post_accumulate_grad_hook(accumulation_hook(hook, name)).remove)

        def tag(tensor: torch.Tensor) -> None:
            if tensor.grad is not None:
                self.recorder.tag_gradient(tensor.grad, name)
                (self.pending.add if is_left_pending(fake) else self.pending.discard)(name)

        stack.callback(fake.register_post_accumulate_grad_hook(tag).remove)

    def _swap_optimizer(
        self, stack: ExitStack, path: str, traced: TracedOptimizer, states: dict[int, WatchedState]
    ) -> None:
        optimizer = traced.optimizer
        check_traceable(path, optimizer)
        live = optimizer.state
        stack.callback(setattr, optimizer, "state", live)
        if id(live) not in states:
            states[id(live)] = self._fake_optimizer_state(path, optimizer)
        optimizer.state = states[id(live)]
        stack.enter_context(contain_group_list_effects(path, optimizer))
        for group in optimizer.param_groups:
            stack.enter_context(_restored(group))
            # A parameter without a fake is a fake already: two optimizers share the group.
            group["params"] = [self.by_id.get(id(parameter), parameter) for parameter in group["params"]]
        self._swap_hyper_parameters(path)
        traced.use_plain_form()
        stack.enter_context(traced.watch_steps())

    def objects_in_groups(self) -> Iterator[tuple[str, Any]]:
        """Mutable objects in parameter groups, by name: groups are dicts, whose reads nothing observes."""
        for path, index, group, _ in self.groups:
            for key, value in group.items():
                if key not in ("params", *SCHEDULER_NOTES) and _can_change(value):
                    yield f"{path}.{index}.{key}", value

    def _groups(self) -> list[tuple[str, int, dict[str, Any], dict[str, Any]]]:
        """Each group once, under the name of the first optimizer that has it, with its entries."""
        found: dict[int, tuple[str, int, dict[str, Any], dict[str, Any]]] = {}
        for path, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                found.setdefault(id(group), (path, index, group, dict(group)))
        return list(found.values())

    def _fake_optimizer_state(self, path: str, optimizer: torch.optim.Optimizer) -> WatchedState:
        state = WatchedState(self._note_read)
        if not all(isinstance(each, dict) for each in optimizer.state.values()):
            self.fake_state[id(optimizer.state)] = state  # else not: in a cycle, live tensors would stay for longer
        for key, values in optimizer.state.items():
            if not isinstance(values, dict):  # under a text
                state[key] = with_fakes(values, self.by_id)
                continue
            fakes = {k: with_fakes(v, self.by_id) for k, v in values.items()}
            self.fake_state[id(values)] = fakes
            is_others = isinstance(key, torch.Tensor) and id(key) not in self.by_id  # it counts, and is not written
            key, held = self.by_id.get(id(key), key), MappingProxyType(fakes) if is_others else fakes
            state[key] = held
            self.states.append((path, optimizer, key, held))
        return state

    @contextmanager
    def watched_optimizer_state(self) -> Iterator[None]:
        """Notice whether the step looks at the state of optimizers, but for what these do themselves."""
        self._step_runs = True
        try:
            yield
        finally:
            self._step_runs = False

    def _note_read(self) -> None:
        """The step looks at the state of an optimizer, and so may behave otherwise where that was made ahead."""
        if self._step_runs and not self.recorder.updating:
            self.call.initial.is_seen = True

    def _swap_hyper_parameters(self, path: str) -> None:
        hypers = self.call.hyper_parameters
        for hyper, fake in zip(hypers, self.fakes.hyper_parameters[: len(hypers)], strict=True):
            if not hyper.name.startswith(f"{path}."):
                continue
            if hyper.item is None:
                self.fake_state.get(id(hyper.group), hyper.group)[hyper.key] = fake
            else:
                values = list(hyper.group[hyper.key])
                values[hyper.item] = fake
                hyper.group[hyper.key] = tuple(values)

    def _swap_scalers(self, stack: ExitStack) -> None:
        scalers = self.call.arguments.scalers
        for scaler in scalers.values():
            stack.enter_context(_restored(vars(scaler)))
        for slot, fake in self.pairs:
            if slot.input.role == "scaler state":
                slot.holder[slot.key] = fake
        stack.enter_context(self.skipped.watch(scalers, self.optimizers))


def _can_change(value: Any) -> bool:
    """Whether a value of a group is, or has in it, an object that can change in place and is no tensor."""
    if isinstance(value, tuple):
        return any(map(_can_change, value))
    return not is_plain(value) and not is_traced(value)


@contextmanager
def _restored(mapping: dict[str, Any]) -> Iterator[None]:
    """Give ``mapping`` its entries back at the end, in their order."""
    entries = dict(mapping)
    try:
        yield
    finally:
        mapping.clear()
        mapping.update(entries)
