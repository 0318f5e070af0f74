"""When a call may run a program: everything that tracing took for granted, checked at every call.

``Guards.admit`` is on the path of each call, so it compares in bulk: leaves of the arguments, torch's modes, the tree
of modules, hyper-parameters, plain Python values that the trace read (``python_reads.py``), and the layout of all state
(``state_layout.py``). ``Guards.difference`` takes its time, and says in the user's words what is not as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from passes import CaptureError

from .._torch import CHILDREN, TreeSpec, global_hooks, own_children
from ..call.grad_scaler import Settings
from ..call.state import (
    SCHEDULER_NOTES,
    Arguments,
    HyperParameter,
    Slot,
    StateRef,
    hyper_parameters_of,
    is_live,
    submodules_of,
)
from ..capture.hyper_conditions import HyperGuards
from ..capture.python_reads import MISSING, READERS, Place, Reads, content_of, is_plain
from ..capture.tensor_attributes import is_held
from .state_layout import StateLayout, same

_DEVICES = ("cpu", "cuda")


@dataclass
class Guards:
    """What one program takes for granted."""

    leaves: Leaves
    modes: tuple[Any, ...]
    tree: Tree
    groups: Groups
    reads: ReadGuards
    layout: StateLayout
    conditions: HyperGuards
    described: dict[str, str]  # state by name, for messages
    dead: bool = False
    on_release: Callable[[], None] | None = None  # what else is to let go of state

    @classmethod
    def of(
        cls, arguments: Arguments, slots: Sequence[Slot], reads: Reads, conditions: HyperGuards, modes: tuple[Any, ...]
    ) -> Guards:
        """The call that was compiled, as state stands now. ``modes`` are ``torch_modes()`` when it was traced."""
        layout = StateLayout.of(arguments, slots)
        kinds = {slot.input.name: _kind(slot.get()) for slot in slots}
        guards = cls(
            Leaves.of(arguments, [(name, kinds.get(name)) for name in layout.names]),
            modes,
            Tree.of(arguments),
            Groups.of(arguments),
            ReadGuards.of(reads.places.values(), [each.value for each in reads.containers.values()]),
            layout,
            conditions,
            _described(slots),
        )
        guards.leaves.watch_owners(arguments, weakref.WeakMethod(guards._release))
        return guards

    def _release(self, _: Any) -> None:
        """A module or optimizer is gone: no call is like this again, so hold on to nothing of it."""
        if not self.dead:
            self.dead = True
            del self.tree, self.reads, self.layout
            if self.on_release is not None:
                self.on_release()

    def admit(self, arguments: Arguments) -> list[torch.Tensor] | None:
        """The state tensors of a call that may run the program, in the order of its slots; else None."""
        if self.dead or not self.leaves.hold(arguments) or torch_modes() != self.modes:
            return None
        if not self.tree.hold() or not self.reads.hold() or not self.groups.hold(arguments):
            return None
        tensors = self.layout.read(arguments)
        if tensors is None or not self.leaves.hold_state(arguments, tensors):
            return None
        if not self.conditions.hold(self.groups.values(arguments)):
            return None
        return tensors if self.conditions.hold_on(self.layout.names, tensors) else None

    def difference(self, arguments: Arguments, slots: Sequence[Slot]) -> str:
        """The first thing by which a call differs from that which was compiled, in the user's words."""
        told = self.leaves.difference(arguments)
        if told or self.dead:
            return told or "another model or optimizer"
        for had, has in zip(self.modes, torch_modes(), strict=True):
            if had != has:
                return f"torch's {has[0]}: {had[1:]} -> {has[1:]}"
        told = self.tree.difference() or self.reads.difference() or self.groups.difference(arguments)
        return told or _first_difference(self.described, _described(slots)) or self.groups.conditions_told(arguments)


def torch_modes() -> tuple[Any, ...]:
    """What torch itself does differently when it is set otherwise, each with its name."""
    return (
        ("grad mode", torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(("autocast", d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("global hooks", *map(len, global_hooks())),
    )


@dataclass
class Leaves:
    """The arguments, flat: tensors by type, shape and dtype, owners of state by identity, all else by value."""

    spec: TreeSpec
    names: list[str]
    expected: list[Any]
    checks: list[Callable[[Any], bool]]
    state: list[tuple[int, int]]  # where an argument is itself state: (leaf, position of the state tensor)
    alike: list[tuple[int, int]]  # where it is not, but a state tensor of its kind might be passed instead

    @classmethod
    def of(cls, arguments: Arguments, state: Sequence[tuple[str, Any]] = ()) -> Leaves:
        """As they are now; ``state`` is the name and kind of each state tensor."""
        number = {name: k for k, (name, _) in enumerate(state)}
        names, values = [leaf.name for leaf in arguments.leaves], [leaf.value for leaf in arguments.leaves]
        kinds = [_kind(value) for value in values]
        own = [(k, number[value.name]) for k, value in enumerate(values) if isinstance(value, StateRef)]
        alike = [
            (leaf, k)
            for leaf, kind in enumerate(kinds)
            for k, (_, other) in enumerate(state)
            if isinstance(kind, _TensorKind) and kind == other
        ]
        return cls(arguments.spec, names, kinds, [_check(kind) for kind in kinds], own, alike)

    def watch_owners(self, arguments: Arguments, release: weakref.WeakMethod[Any]) -> None:
        """Compare modules and optimizers by identity without keeping them alive."""

        def gone(reference: Any) -> None:
            method = release()
            if method is not None:
                method(reference)

        for k, leaf in enumerate(arguments.leaves):
            if isinstance(leaf.value, (nn.Module, torch.optim.Optimizer)):
                self.expected[k] = weakref.ref(leaf.value, gone)
                self.checks[k] = _is_still(self.expected[k], type(leaf.value))

    def hold(self, arguments: Arguments) -> bool:
        """Whether all are as they were, but for those that are state."""
        if len(arguments.leaves) != len(self.checks) or arguments.spec != self.spec:
            return False
        return all(check(leaf.value) for check, leaf in zip(self.checks, arguments.leaves, strict=True))

    def hold_state(self, arguments: Arguments, tensors: list[torch.Tensor]) -> bool:
        """Whether the same arguments are state, and no others."""
        for leaf, slot in self.state:
            if arguments.leaves[leaf].value is not tensors[slot]:
                return False
        return not any(arguments.leaves[leaf].value is tensors[k] for leaf, k in self.alike)

    def tensor_names(self) -> list[str]:
        """The names of the tensor arguments that are no state."""
        return [name for name, kind in zip(self.names, self.expected, strict=True) if isinstance(kind, _TensorKind)]

    def tensors(self, arguments: Arguments) -> list[torch.Tensor]:
        """The values of those."""
        pairs = zip(self.expected, arguments.leaves, strict=True)
        return [leaf.value for kind, leaf in pairs if isinstance(kind, _TensorKind)]

    def told(self) -> list[str]:
        """A line for each argument."""
        return [f"{name}: {_said(kind)}" for name, kind in zip(self.names, self.expected, strict=True)]

    def difference(self, arguments: Arguments) -> str:
        """What is not as it was, or nothing."""
        if arguments.spec != self.spec:
            return f"the structure of the arguments: {self.spec} -> {arguments.spec}"
        for name, kind, check, leaf in zip(self.names, self.expected, self.checks, arguments.leaves, strict=True):
            if check(leaf.value):
                continue
            if isinstance(kind, weakref.ref):
                return f"{name} is another object"
            return f"{name}: {_said(kind)} -> {_said(_kind(leaf.value))}"
        return ""


@dataclass(frozen=True)
class _TensorKind:
    type: type
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TensorKind(type(value), tuple(value.shape), value.dtype, value.device, value.requires_grad)
    return Settings.of(value) if isinstance(value, GradScaler) else value


def _check(kind: Any) -> Callable[[Any], bool]:
    if isinstance(kind, _TensorKind):
        return lambda value: (
            isinstance(value, torch.Tensor)
            and (
                value.shape == kind.shape
                and value.dtype is kind.dtype
                and value.requires_grad is kind.requires_grad
                and type(value) is kind.type
                and value.device == kind.device
            )
        )
    if isinstance(kind, StateRef):
        return lambda value: isinstance(value, torch.Tensor)
    if isinstance(kind, Settings):
        return lambda value: isinstance(value, GradScaler) and Settings.of(value) == kind
    return lambda value: same(value, kind)


def _is_still(reference: weakref.ref[Any], kind: type) -> Callable[[Any], bool]:
    return lambda value: reference() is value and type(value) is kind


def _said(kind: Any) -> str:
    if isinstance(kind, _TensorKind):
        grad = ", requires_grad" if kind.requires_grad else ""
        return f"{str(kind.dtype).removeprefix('torch.')}{list(kind.shape)} on {kind.device}{grad}"
    return repr(kind)


def check_leaves(arguments: Arguments) -> None:
    """Raise ``CaptureError`` for an argument that cannot be compared from call to call."""
    for leaf in arguments.leaves:
        if isinstance(leaf.value, (torch.Tensor, nn.Module, torch.optim.Optimizer)):
            continue
        try:
            hash(leaf.value)
        except TypeError:
            raise CaptureError(
                f"the argument {leaf.name} is a {type(leaf.value).__name__}, which cannot be compared from call to "
                "call: pass tensors, modules, optimizers, hashable values, or lists, tuples and dicts of them"
            ) from None


@dataclass
class Tree:
    """Which modules there are, and which of them are training."""

    names: list[str]
    fields: list[dict[str, Any]]  # of each module
    training: list[bool | None]
    children: list[dict[str, Any]]  # of each module that has some
    childless: list[dict[str, Any]]
    child_names: list[str]
    modules: list[Any]
    kinds: list[type]  # of those: registering a parametrization changes the class of a module

    @classmethod
    def of(cls, arguments: Arguments) -> Tree:
        """As it is now."""
        named = list(submodules_of(arguments.modules))
        children = [own_children(module) for _, module in named if own_children(module)]
        modules = list(chain.from_iterable(map(dict.values, children)))
        return cls(
            [name for name, _ in named],
            [vars(module) for _, module in named],
            [vars(module).get("training") for _, module in named],  # a compiled module asks the one that it holds
            children,
            [own_children(module) for _, module in named if not own_children(module)],
            [f"{name}.{key}" for name, module in named for key in own_children(module)],
            modules,
            list(map(type, modules)),
        )

    def hold(self) -> bool:
        """Whether no module was exchanged, and none switched between train and eval."""
        now = list(chain.from_iterable(map(dict.values, self.children)))  # modules are equal if they are identical
        if now != self.modules or any(self.childless) or list(map(type, now)) != self.kinds:
            return False
        return list(map(dict.get, self.fields, repeat("training"))) == self.training

    def difference(self) -> str:
        """What is not as it was, or nothing."""
        now = [
            (f"{name}.{key}", module)
            for name, fields in zip(self.names, self.fields, strict=True)
            for key, module in fields[CHILDREN].items()
        ]
        before = dict(zip(self.child_names, self.modules, strict=True))
        for name, module in now:
            if before.get(name) is not module:
                return f"{name} is another module"
        if len(now) != len(before):
            return f"{next(iter(before.keys() - dict(now).keys()))} is gone"
        for name, module, kind in zip(self.child_names, self.modules, self.kinds, strict=True):
            if type(module) is not kind:
                return f"the class of {name}: {kind.__qualname__} -> {type(module).__qualname__}"
        for name, fields, was in zip(self.names, self.fields, self.training, strict=True):
            if fields.get("training") is not was:
                return f"{name}.training: {was} -> {fields.get('training')}"
        return ""


@dataclass
class Groups:
    """Parameter groups, and numbers of optimizer state."""

    flags: list[list[dict[str, Any]]]  # by optimizer and group: what the trace took as it was
    live: list[tuple[int, int, str, int | None]]  # (optimizer, group, key, item) of what is read at each call
    counters: list[tuple[int, int, str]]  # (optimizer, position in its state, key) of numbers
    names: list[str]
    held: list[Any]  # all values of all groups, where none of them can change in place

    @classmethod
    def of(cls, arguments: Arguments) -> Groups:
        """As they are now."""
        found = hyper_parameters_of(arguments.optimizers)
        place = {
            id(group): (k, j)
            for k, optimizer in enumerate(arguments.optimizers.values())
            for j, group in enumerate(optimizer.param_groups)
        }
        position = {
            id(values): (k, j)
            for k, optimizer in enumerate(arguments.optimizers.values())
            for j, values in enumerate(optimizer.state.values())
        }
        return cls(
            _flags(arguments),
            [(*place[id(h.group)], h.key, h.item) for h in found if id(h.group) in place],
            [(*position[id(h.group)], h.key) for h in found if id(h.group) in position],
            [hyper.name for hyper in found],
            _values(arguments) if all(map(_is_fixed, _values(arguments))) else [],
        )

    def hold(self, arguments: Arguments) -> bool:
        """Whether every flag is as it was."""
        now = _values(arguments)
        if len(now) == len(self.held) and all(map(is_, now, self.held)):
            return True
        return same(_flags(arguments), self.flags)

    def values(self, arguments: Arguments) -> list[Any]:
        """The live hyper-parameters, in order."""
        groups = [optimizer.param_groups for optimizer in arguments.optimizers.values()]
        found = [HyperParameter("", groups[k][j], key, item).get() for k, j, key, item in self.live]
        if self.counters:
            states = [list(optimizer.state.values()) for optimizer in arguments.optimizers.values()]
            found += [states[k][j][key] for k, j, key in self.counters]
        return found

    def difference(self, arguments: Arguments) -> str:
        """What is not as it was, or nothing."""
        for path, groups, now in zip(arguments.optimizers, self.flags, _flags(arguments), strict=True):
            if len(groups) != len(now):
                return f"{path} has {len(now)} parameter groups instead of {len(groups)}"
            for index, (group, current) in enumerate(zip(groups, now, strict=True)):
                for key in {**group, **current}:
                    if not same(group.get(key), current.get(key)):
                        return f"{path}.{index}.{key}: {group.get(key)} -> {current.get(key)}"
        return ""

    def conditions_told(self, arguments: Arguments) -> str:
        """The hyper-parameters, of which one has crossed a condition that the optimizer branches on."""
        told = ", ".join(f"{name} = {value}" for name, value in zip(self.names, self.values(arguments), strict=True))
        return f"a hyper-parameter for which the optimizer branches ({told})" if told else "state"


def _values(arguments: Arguments) -> list[Any]:
    groups = [group for optimizer in arguments.optimizers.values() for group in optimizer.param_groups]
    return [value for group in groups for key, value in group.items() if key != "params"]


def _is_fixed(value: Any) -> bool:
    return is_plain(value) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


def _flags(arguments: Arguments) -> list[list[dict[str, Any]]]:
    return [[_group(group) for group in optimizer.param_groups] for optimizer in arguments.optimizers.values()]


def _group(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _flag(value) for key, value in group.items() if key != "params" and key not in SCHEDULER_NOTES}


def _flag(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_flag, value))
    if not is_live(value):
        return value
    return "float" if isinstance(value, float) else ("tensor", tuple(value.shape), value.dtype, value.device)


@dataclass
class ReadGuards:
    """What the places that the trace read hold."""

    places: list[Place]
    values: list[Any]
    bulk: list[tuple[Callable[..., Any], list[Any], list[str], list[Any]]]  # the same by kind: reader, sources, keys
    absent: tuple[list[dict[str, Any]], list[str]]  # (sources, keys) of what was not there, as a forward of one's own
    empties: list[Any]
    contents: list[tuple[Any, Any]]
    names: dict[int, str]

    @classmethod
    def of(cls, places: Collection[Place], containers: list[Any]) -> ReadGuards:
        """As they are now. Of tensors those that modules hold are constants; all others are refused, or state."""
        places = [p for p in places if not isinstance(p.get(), torch.Tensor) or (p.kept and is_held(p.get()))]
        bulk = []
        for kind, reader in READERS.items():
            ones = [p for p in places if p.kind == kind and (kind != "item" or p.get() is not MISSING)]
            bulk.append((reader, [p.source for p in ones], [p.key for p in ones], [p.get() for p in ones]))
        absent = [place for place in places if place.kind == "item" and place.get() is MISSING]
        mutable = [(c, content) for c in containers if (content := content_of(c)) is not None]
        return cls(
            places,
            [place.get() for place in places],
            bulk,
            ([place.source for place in absent], [place.key for place in absent]),
            [c for c, content in mutable if not content],
            [(c, content) for c, content in mutable if content],
            {id(place.get()): place.name for place in places},
        )

    def hold(self) -> bool:
        """Whether all is as it was."""
        if any(self.empties) or any(map(dict.__contains__, *self.absent)):
            return False
        if not all(_alike_within(c, content) for c, content in self.contents):
            return False
        for reader, sources, keys, values in self.bulk:
            now = list(map(reader, sources, keys, repeat(MISSING)))
            if not all(map(is_, now, values)) and not all(map(_alike, now, values)):
                return False
        return True

    def difference(self) -> str:
        """What is not as it was, or nothing."""
        for place, value in zip(self.places, self.values, strict=True):
            now = place.get()
            if not _alike(now, value):
                return f"{place.name}: {_short(value)} -> {_short(now)}"
        for container, content in [*self.contents, *((empty, ()) for empty in self.empties)]:
            if not _alike_within(container, content):
                return f"the entries of {self.names.get(id(container), 'a container that the step reads')}"
        return ""


def _alike(now: Any, value: Any) -> bool:
    """Whether a place holds what it held: an object is that very one, numbers and lists of them may be equal."""
    return now is value or (
        (is_plain(value) or type(value) in (list, dict) or isinstance(value, tuple)) and same(now, value)
    )


def _alike_within(container: Any, content: tuple[Any, ...]) -> bool:
    now = content_of(container) or ()
    return len(now) == len(content) and (all(map(is_, now, content)) or all(map(_alike, now, content)))


def _short(value: Any) -> str:
    text = repr(value) if value is not MISSING else "not there"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _described(slots: Sequence[Slot]) -> dict[str, str]:
    return {slot.input.name: f"{_said(_kind(slot.get()))}, strides {slot.get().stride()}" for slot in slots}


def _first_difference(before: dict[str, str], now: dict[str, str]) -> str:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{name}: {before.get(name, 'not there')} -> {now.get(name, 'not there')}"
    return ""
