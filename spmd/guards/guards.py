"""``Guards``: the conditions under which a call may run a program, checked at every call.

``admit`` is on the path of each call and compares in bulk: the leaves of the arguments, torch's global settings, the
tree of modules, the plain Python values that the trace read, parameter groups, the layout of all state, and conditions
on numbers. ``differences`` is slower: it describes, in the user's words, what is not as it was.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._torch import function_modes, users_global_hooks
from ..call.state import Arguments, Slot, gradient_name
from ..capture.captured import Captured
from ..capture.hyper_conditions import HyperGuards
from ..python_state.reads import Reads, is_plain
from .annotation_guards import AnnotationGuards
from .carried_tensors import CarriedTensors
from .found_owners import FoundOwners, holders_of
from .leaves import Leaves, describe, expectation
from .module_tree import ModuleTree
from .parameter_groups import ParameterGroups
from .read_guards import ReadGuards
from .state_layout import StateLayout

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Live:
    """The live state of a call, read once: ``tensors``, as ``layout.names``, and ``numbers``, as ``groups.names``."""

    tensors: list[torch.Tensor]
    numbers: list[Any]


@dataclass
class Guards:
    """The guards of one program."""

    leaves: Leaves
    found: FoundOwners
    settings: tuple[Any, ...]
    tree: ModuleTree
    annotations: AnnotationGuards
    groups: ParameterGroups
    reads: ReadGuards
    layout: StateLayout
    carried: CarriedTensors
    conditions: HyperGuards
    described: dict[str, str]  # each state tensor in a message, by name
    any_gradient: frozenset[str]  # names of gradients that a call may have or lack
    dead: bool = False
    on_release: Callable[[], None] | None = None  # releases what else holds state

    @classmethod
    def of(
        cls,
        arguments: Arguments,
        slots: Sequence[Slot],
        reads: Reads | ReadGuards,
        captured: Captured,
        settings: tuple[Any, ...],
    ) -> Guards:
        """Guards on the state as it is now. ``settings`` are ``torch_settings()`` when the step was traced."""
        constants = captured.constants_read
        read = reads if isinstance(reads, ReadGuards) else ReadGuards.of(reads, holders_of(arguments), constants)
        layout = StateLayout.of(arguments, slots, captured.cleared_first, read.names_in_code)
        specs = {slot.input.name: expectation(slot.get(), read.names_in_code) for slot in slots}
        state = [(name, specs.get(name)) for name in layout.names]
        guards = cls(
            Leaves.of(
                arguments,
                state,
                captured.carried.leaves,
                captured.carried.unread,
                read.names_in_code,
                read.layouts_read,
            ),
            FoundOwners.of(arguments),
            settings,
            ModuleTree.of(arguments),
            AnnotationGuards.of(arguments),
            ParameterGroups.of(arguments, captured.carried),
            read,
            layout,
            CarriedTensors.of(captured.carried),
            captured.guards,
            _describe_state(slots, read.names_in_code),
            frozenset(map(gradient_name, captured.cleared_first)),
        )
        guards._watch_owners(arguments)
        return guards

    def of_any_size(self, arguments: Arguments, dims: Mapping[str, Collection[int]], conditions: HyperGuards) -> Guards:
        """The guards of what was captured for any size of these dims, by the names of arguments."""
        leaves = self.leaves.of_any_size(dims)
        guards = replace(self, leaves=leaves, conditions=conditions, found=FoundOwners.of(arguments), on_release=None)
        guards._watch_owners(arguments)
        return guards

    def _watch_owners(self, arguments: Arguments) -> None:
        release = weakref.WeakMethod(self._release)

        def gone(reference: Any, is_end: Callable[[], bool] = sys.is_finalizing) -> None:
            method = release()
            if method is not None and not is_end():  # where modules have lost their names
                method(reference)

        self.leaves.watch_owners(arguments, gone)
        self.found.watch(arguments, gone)

    def _release(self, _: Any) -> None:
        """Let go of all state once a module or optimizer is gone, since no later call can match."""
        if not self.dead:
            self.dead = True
            del self.tree, self.annotations, self.reads, self.layout, self.carried, self.groups
            if self.on_release is not None:
                self.on_release()

    def has_owners_of(self, other: Guards) -> bool:
        """Whether both are of calls with the same modules and optimizers, or with none."""
        return self.owners() == other.owners()

    def shares_owners_with(self, arguments: Arguments) -> bool:
        """Whether a call has some of the same modules and optimizers, or the program has none."""
        owners = self.owners()
        return not owners or any(arguments.has(reference()) for reference in owners)

    def owners(self) -> list[weakref.ref[Any]]:
        """The modules, optimizers and other objects that the program is for."""
        return [*self.leaves.owners(), *self.found.expected]

    def admit(self, given: Arguments) -> tuple[Arguments, Live] | None:
        """The arguments of a call, with what the step uses besides them, and what it runs on.

        None unless the call may run the program.
        """
        if self.dead or not self.leaves.hold(given) or torch_settings() != self.settings:
            return None
        arguments = self.found.complete(given)
        if arguments is None:
            return None
        live = self._state(arguments)
        return None if live is None else (arguments, live)

    def live(self, arguments: Arguments) -> Live | None:
        """The live state of a call; None if state is laid out otherwise."""
        tensors = self.layout.read(arguments)
        return None if tensors is None else Live(tensors, self.groups.values(arguments))

    def _state(self, arguments: Arguments) -> Live | None:
        if not self.tree.hold() or not self.reads.hold() or not self.groups.hold(arguments):
            return None
        if not self.carried.hold() or not self.annotations.hold():
            return None
        live = self.live(arguments)
        if live is None or not self.leaves.hold_state(arguments, live.tensors):
            return None
        if not self.conditions.hold(live.numbers):
            return None
        return live if self.conditions.hold_for_state(self.layout.names, live.tensors) else None

    def differences(self, arguments: Arguments, slots: Sequence[Slot]) -> list[str]:
        """The differences between a call and the compiled one, in the user's words: one or more sentences.

        Of the arguments, or of one kind of Python state, it is the first that differs; of tensors each one.
        """
        found = self.leaves.difference(arguments) or self.found.difference(arguments)
        if found or self.dead:
            return [found or "another model or optimizer"]
        settings = zip(self.settings, torch_settings(), strict=True)
        differences = [
            *(f"torch's {now[0]}: {before[1:]} -> {now[1:]}" for before, now in settings if before != now),
            self.tree.difference(),
            self.annotations.difference(),
            self.reads.difference(),
            self.groups.difference(arguments),
            self.carried.difference(),
            *self._state_differences(slots),
        ]
        return list(filter(None, differences)) or [self._condition(arguments)]

    def _state_differences(self, slots: Sequence[Slot]) -> list[str]:
        before, now = self.described, _describe_state(slots, self.reads.names_in_code)
        names = [n for n in {**before, **now} if before.get(n) != now.get(n) and n not in self.any_gradient]
        return [f"{name}: {before.get(name, 'not there')} -> {now.get(name, 'not there')}" for name in names]

    def _condition(self, arguments: Arguments) -> str:
        """The numbers and 0-dim state on which a branch depends that this call does not take."""
        live = self.live(arguments)
        if live is None:
            return "state"
        failed = self.conditions.failed(self.groups.names, live.numbers)
        failed += self.conditions.failed_for_state(self.layout.names, live.tensors)
        return f"another branch of the step, for {', '.join(failed)}" if failed else "state"


def torch_settings() -> tuple[Any, ...]:
    """Global settings of torch that change what a trace records, each as (name, values)."""
    return (
        ("grad mode", torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(("autocast", d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("global hooks", *map(len, users_global_hooks())),
        ("function modes", *map(_of_mode, function_modes())),
    )


def _of_mode(mode: Any) -> tuple[type, dict[str, Any]]:
    """On what it depends what a function mode does: another object of its class may do the same."""
    return type(mode), {name: value if is_plain(value) else _Same(value) for name, value in vars(mode).items()}


@dataclass(frozen=True, eq=False)
class _Same:
    """A value that equals itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _describe_state(slots: Sequence[Slot], named: frozenset[str]) -> dict[str, str]:
    return {slot.input.name: _describe_tensor(slot.get(), named) for slot in slots}


def _describe_tensor(tensor: torch.Tensor, named: frozenset[str]) -> str:
    placed = f", placed as {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{describe(expectation(tensor, named))}, strides {tensor.stride()}{placed}"
