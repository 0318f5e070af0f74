"""Guards on the leaves of a call's arguments: tensors by their specs, modules by identity, all else by value."""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from passes import CaptureError

from .._torch import TreeSpec
from ..call.argument_logs import Log
from ..call.grad_scaler import Settings
from ..call.inputs import is_apart, is_index
from ..call.state import Arguments, StateRef
from .attached import Attributes, are_same, described, named_of
from .equality import structurally_equal

_SHOWN = 3  # changes of the structure of the arguments, in a message


@dataclass(frozen=True)
class TensorSpec:
    """The properties of a tensor that a program depends on."""

    type: type
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    attached: Attributes = field(default_factory=dict, compare=False)  # the user's, as ``named_of`` has them
    named: frozenset[str] = field(default=frozenset(), compare=False)  # names of those that count
    is_contiguous: bool = field(default=False, compare=False)  # where the step asks for strides
    is_apart: bool = field(default=True, compare=False)  # it has no graph and no gradient

    def matches(self, value: Any) -> bool:
        """Whether ``value`` is a tensor with these properties."""
        return (
            isinstance(value, torch.Tensor)
            and value.shape == self.shape
            and value.dtype is self.dtype
            and value.requires_grad is self.requires_grad
            and type(value) is self.type
            and value.device == self.device
            and are_same(self.attached, value, self.named)
            and (not self.is_contiguous or value.is_contiguous())
            and is_apart(value) is self.is_apart
        )


@dataclass
class Leaves:
    """The expected leaves of a call's arguments; ``identified`` are compared by identity, whatever they are."""

    spec: TreeSpec
    names: list[str]
    expected: list[Any]  # see ``expectation``; a weak reference to a module or optimizer
    checks: list[Callable[[Any], bool]]
    state: list[tuple[int, int]]  # arguments that are themselves state: (leaf, position of the state tensor)
    not_state: list[
        tuple[int, int]
    ]  # the same pairs for other arguments, which a state tensor of equal spec may replace
    identified: set[int]
    firsts: list[int]  # see ``firsts_of``

    @classmethod
    def of(
        cls,
        arguments: Arguments,
        state: Sequence[tuple[str, Any]] = (),
        live: Collection[str] = (),
        unread: Collection[str] = (),
        named: frozenset[str] = frozenset(),
        contiguous: Collection[bool] = (),
    ) -> Leaves:
        """The leaves now. ``state``: (name, spec) of each state tensor; ``live``: names of numbers of any value.

        ``unread``: those of numbers and texts that nothing reads; ``named``: the attributes of tensors that count;
        ``contiguous``: ``is_index`` of the tensors that must be so.
        """
        position = {name: k for k, (name, _) in enumerate(state)}
        names, values = [leaf.name for leaf in arguments.leaves], [leaf.value for leaf in arguments.leaves]
        expected = [
            AnyNumber(type(value))
            if name in live
            else AnyValue(type(value))
            if name in unread
            else expectation(value, named, contiguous)
            for name, value in zip(names, values, strict=True)
        ]
        not_state = [
            (leaf, k)
            for leaf, spec in enumerate(expected)
            for k, (_, other) in enumerate(state)
            if isinstance(spec, TensorSpec) and spec == other
        ]
        return cls(
            arguments.spec,
            names,
            expected,
            [_check(each) for each in expected],
            [(k, position[value.name]) for k, value in enumerate(values) if isinstance(value, StateRef)],
            not_state,
            arguments.identified,
            firsts_of(arguments),
        )

    def watch_owners(self, arguments: Arguments, gone: Callable[[Any], None]) -> None:
        """Compare modules and optimizers by identity without keeping them alive; call ``gone`` when one is gone."""
        for k, leaf in enumerate(arguments.leaves):
            if k in self.identified or isinstance(leaf.value, (nn.Module, torch.optim.Optimizer)):
                self.expected[k] = _reference(leaf.value, gone)
                self.checks[k] = _is_identical(self.expected[k], type(leaf.value))

    def owners(self) -> list[Any]:
        """Weak references to the modules and optimizers among the leaves; that of the same object is equal."""
        return [expected for expected in self.expected if isinstance(expected, weakref.ref)]

    def of_any_size(self, dims: Mapping[str, Collection[int]]) -> Leaves:
        """The same leaves, where these dims of tensors, by the names of arguments, may have any size."""
        checks = [
            _has_any_size(expected, dims[name]) if name in dims and isinstance(expected, TensorSpec) else check
            for name, expected, check in zip(self.names, self.expected, self.checks, strict=True)
        ]
        return replace(self, expected=list(self.expected), checks=checks)

    def hold(self, arguments: Arguments) -> bool:
        """Whether all leaves are as expected; which of them are state is left to ``hold_state``."""
        if len(arguments.leaves) != len(self.checks) or arguments.spec != self.spec:
            return False
        checked = zip(self.checks, arguments.leaves, strict=True)
        return all(check(leaf.value) for check, leaf in checked) and firsts_of(arguments) == self.firsts

    def hold_state(self, arguments: Arguments, tensors: list[torch.Tensor]) -> bool:
        """Whether the same arguments are state, and no others."""
        for leaf, position in self.state:
            if arguments.leaves[leaf].value is not tensors[position]:
                return False
        return not any(arguments.leaves[leaf].value is tensors[k] for leaf, k in self.not_state)

    def changed_numbers(self, arguments: Arguments) -> dict[str, bool]:
        """The numbers among the arguments by name, each with whether it has another value now."""
        if arguments.spec != self.spec:
            return {}
        pairs = zip(self.expected, arguments.leaves, strict=True)
        return {leaf.name: leaf.value != was for was, leaf in pairs if can_be_live(was, leaf.value)}

    def changed_texts(self, arguments: Arguments) -> dict[str, bool]:
        """The texts among the arguments by name, each with whether it is another now."""
        if arguments.spec != self.spec:
            return {}
        pairs = zip(self.expected, arguments.leaves, strict=True)
        return {leaf.name: leaf.value != was for was, leaf in pairs if is_text(was) and type(leaf.value) is type(was)}

    def tensor_names(self) -> list[str]:
        """The names of the tensor arguments that are no state."""
        return [name for name, spec in zip(self.names, self.expected, strict=True) if isinstance(spec, TensorSpec)]

    def tensor_specs(self) -> list[TensorSpec]:
        """The expected spec of each of those."""
        return [spec for spec in self.expected if isinstance(spec, TensorSpec)]

    def tensors(self, arguments: Arguments) -> list[torch.Tensor]:
        """The values of those."""
        pairs = zip(self.expected, arguments.leaves, strict=True)
        return [leaf.value for spec, leaf in pairs if isinstance(spec, TensorSpec)]

    def describe(self) -> list[str]:
        """A line for each argument."""
        return [
            f"{name}: {type(value).__name__ if k in self.identified else describe(value)}"
            for k, (name, value) in enumerate(zip(self.names, self.expected, strict=True))
        ]

    def difference(self, arguments: Arguments) -> str:
        """The first leaf that is not as expected, or nothing."""
        if arguments.spec != self.spec:
            return _structure_difference(self.names, [leaf.name for leaf in arguments.leaves])
        for name, expected, check, leaf in zip(self.names, self.expected, self.checks, arguments.leaves, strict=True):
            if check(leaf.value):
                continue
            if isinstance(expected, (weakref.ref, _Strong)):
                return f"{name} is another object"
            named = expected.named if isinstance(expected, TensorSpec) else frozenset[str]()
            return f"{name}: {describe(expected)} -> {describe(expectation(leaf.value, named))}"
        if firsts_of(arguments) != self.firsts:
            return "other arguments are one tensor"
        return ""


@dataclass(frozen=True)
class AnyNumber:
    """Any int, or any float: each call reads its value."""

    kind: type


@dataclass(frozen=True)
class AnyValue:
    """Any value of a type: nothing reads it."""

    kind: type


def is_text(value: Any) -> bool:
    """Whether a value is one that is not compared if nothing reads it: a string, bytes or a path."""
    return isinstance(value, (str, bytes, PurePath)) and not isinstance(value, enum.Enum)


def can_be_live(before: Any, now: Any) -> bool:
    """Whether a number may be read anew at each call: an int or a float (numpy's, too) both times, within bounds."""
    is_number = type(now) in (int, float) or (isinstance(now, float) and type(now).__module__ == "numpy")
    if not is_number or type(before) is not type(now):
        return False
    return abs(now) < 2**62 if isinstance(now, int) else math.isfinite(now)


def expectation(value: Any, named: frozenset[str] = frozenset(), contiguous: Collection[bool] = ()) -> Any:
    """The expectation that later values are compared with: a tensor's spec, a scaler's settings, or ``value`` itself.

    ``named``: the attributes of tensors that count; ``contiguous``: ``is_index`` of the tensors that must be so.
    """
    if isinstance(value, torch.Tensor):
        properties = type(value), tuple(value.shape), value.dtype, value.device, value.requires_grad
        return TensorSpec(*properties, named_of(value, named), named, is_index(value) in contiguous, is_apart(value))
    if isinstance(value, Log):
        return Log(type(value.container)(), value.path)  # an empty one, that keeps nothing alive
    return Settings.of(value) if isinstance(value, GradScaler) else value


def firsts_of(arguments: Arguments) -> list[int]:
    """For each tensor among the arguments the first that is the same object: the step may ask ``x is y``."""
    tensors = [leaf.value for leaf in arguments.leaves if isinstance(leaf.value, (torch.Tensor, StateRef))]
    seen: dict[Any, int] = {}
    return [seen.setdefault(x.name if isinstance(x, StateRef) else id(x), k) for k, x in enumerate(tensors)]


def describe(expected: Any) -> str:
    """``expected`` in a message: ``float32[8, 4] on cpu``."""
    if isinstance(expected, TensorSpec):
        grad = ", requires_grad" if expected.requires_grad else ""
        attached = f", with {described(expected.attached)}" if expected.attached else ""
        dtype = str(expected.dtype).removeprefix("torch.")
        joined = "" if expected.is_apart else ", with a graph or a gradient"
        return f"{dtype}{list(expected.shape)} on {expected.device}{grad}{joined}{attached}"
    if isinstance(expected, (AnyNumber, AnyValue)):
        return f"any {expected.kind.__name__}"
    return type(expected).__name__ if isinstance(expected, (nn.Module, torch.optim.Optimizer)) else repr(expected)


def check_leaves(arguments: Arguments) -> None:
    """Raise ``CaptureError`` for an argument that cannot be compared from call to call."""
    for k, leaf in enumerate(arguments.leaves):
        if k in arguments.identified or isinstance(leaf.value, (torch.Tensor, nn.Module, torch.optim.Optimizer)):
            continue
        try:
            hash(leaf.value)
        except TypeError:
            advice = "pass tensors, modules, optimizers, hashable values, or lists, tuples and dicts of them"
            if type(leaf.value).__module__ == "numpy":
                advice = f"pass torch.from_numpy({leaf.name}), which shares its memory"
            raise CaptureError(
                f"the argument {leaf.name} is a {type(leaf.value).__name__}, which cannot be compared from call to "
                f"call: {advice}"
            ) from None


def _structure_difference(before: Collection[str], now: Collection[str]) -> str:
    changes = [f"{name} is new" for name in now if name not in before]
    changes += [f"{name} is gone" for name in before if name not in now]
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return f"the structure of the arguments ({', '.join(changes[:_SHOWN]) or 'other containers'}{more})"


def _check(expected: Any) -> Callable[[Any], bool]:
    if isinstance(expected, TensorSpec):
        return expected.matches
    if isinstance(expected, AnyNumber):
        return lambda value: type(value) is expected.kind and can_be_live(value, value)
    if isinstance(expected, AnyValue):
        return lambda value: type(value) is expected.kind
    if isinstance(expected, StateRef):
        return lambda value: isinstance(value, torch.Tensor)
    if isinstance(expected, Settings):
        return lambda value: isinstance(value, GradScaler) and Settings.of(value) == expected
    return lambda value: structurally_equal(value, expected)


def _has_any_size(expected: TensorSpec, dims: Collection[int]) -> Callable[[Any], bool]:
    """Like ``expected.matches``, but for the size of these dims."""

    def matches(value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.ndim != len(expected.shape):
            return False
        shape = tuple(value.shape[k] if k in dims else size for k, size in enumerate(expected.shape))
        return replace(expected, shape=shape).matches(value)

    return matches


@dataclass(frozen=True, eq=False)
class _Strong:
    """Refers to an object of a class with ``__slots__`` that cannot be referred to weakly."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def _reference(value: Any, gone: Callable[[Any], None]) -> Any:
    try:
        return weakref.ref(value, gone)
    except TypeError:
        return _Strong(value)


def _is_identical(reference: Callable[[], Any], kind: type) -> Callable[[Any], bool]:
    return lambda value: reference() is value and type(value) is kind
