"""Run the user's step once on fake tensors under ``make_fx``.

In: the function, its arguments, a fake for each piece of state and each tensor argument. Out: a graph with the
mutations that the step made, and what the state holds at its end. Whatever is swapped in for the trace (parameters,
optimizer state, flags of parameter groups, torch's compiling flag) is put back, also when tracing raises.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from passes import CaptureError

from .._torch import (
    FakeTensorMode,
    ShapeEnv,
    accumulation_hooks,
    compiling,
    gradient_hooks,
    make_fx,
    masks_as_given,
    own_buffers,
    own_parameters,
    selecting,
    tree_unflatten,
    unchecked_distributions,
)
from ..call.grad_scaler import Skips
from ..call.rng import only_torch_draws
from ..call.state import Arguments, HyperParameter, Slot, StateRef, buffers_of, parameters_of, submodules_of
from ..call.tree import flatten
from .batch_norm import traceable
from .decompositions import while_recorded
from .optimizers import Watched, check_traceable, only_these
from .provenance import Recorder
from .python_reads import Reads
from .random_decompositions import before_functionalization
from .set_data import SetDataCopies
from .side_effects import attributes_kept, group_kept, holds_traced, is_traced, optimizer_kept
from .state_branches import Branch, StateBranches
from .symbolic_minmax import symbolic_min_and_max
from .tensor_attributes import held_tensors
from .unsupported import check_results


@dataclass(frozen=True)
class NewEntry:
    """New state of an optimizer; ``unless`` is its condition's place in ``Ends.skips``."""

    optimizer: str
    parameter: str
    key: Any
    value: Any
    unless: int | None = None


@dataclass(frozen=True)
class Ends:
    """What the state holds when the step ends. Values are traced tensors, or plain Python values."""

    results: list[Any]
    result_spec: Any
    slots: list[Any]  # one per slot; None where a gradient is gone
    gradients: dict[str, Any]  # new gradients by parameter name
    skips: list[Any]  # conditions under which new state was not made after all
    optimizer_state: list[NewEntry]

    def updated(self, now: Callable[[Any], Any]) -> Ends:
        """The same with ``now`` of each value of state."""
        new = [replace(entry, value=now(entry.value)) for entry in self.optimizer_state]
        return replace(self, slots=[now(value) for value in self.slots], optimizer_state=new)


@dataclass(frozen=True)
class Fakes:
    """The stand-ins for one trace, in the order of the graph's placeholders."""

    mode: FakeTensorMode
    shapes: ShapeEnv
    slots: list[torch.Tensor]
    hyper_parameters: list[Any]  # symbolic floats, or tensors
    symbols: list[Any]  # the symbol of each, None for a tensor
    tensors: list[torch.Tensor]

    @property
    def flat(self) -> list[Any]:
        """All of them."""
        return [*self.slots, *self.hyper_parameters, *self.tensors]

    def as_traced(self, flat: Sequence[Any]) -> Fakes:
        """The same, as the tracer hands them to the function it traces."""
        slots, hyper = len(self.slots), len(self.slots) + len(self.hyper_parameters)
        return replace(
            self, slots=list(flat[:slots]), hyper_parameters=list(flat[slots:hyper]), tensors=list(flat[hyper:])
        )


@dataclass
class Trace:
    """One run of the step, to be made into a graph: ``graph_module()``, then ``ends``."""

    function: Callable[..., Any]
    arguments: Arguments
    slots: list[Slot]
    hyper_parameters: list[HyperParameter]
    fakes: Fakes
    reads: Reads
    ends: Ends | None = field(default=None)
    branches: list[Branch] = field(default_factory=list)

    def graph_module(self) -> fx.GraphModule:
        """Trace; the graph's outputs are the tensors of ``ends``, flat."""
        table = {**while_recorded(), **before_functionalization()}
        return make_fx(self._run, decomposition_table=table, tracing_mode="fake")(*self.fakes.flat)

    def _run(self, *flat: Any) -> list[Any]:
        names = {id(module): name for name, module in submodules_of(self.arguments.modules)}
        self.reads.names.update(names)
        recorder, asked = Recorder(names, self.reads), StateBranches(self.slots)
        fakes = self.fakes.as_traced(flat)
        with ExitStack() as stack:
            swap = _Swap(self, fakes, recorder)
            stack.enter_context(swap.state())
            stack.enter_context(compiling())
            stack.enter_context(selecting())
            stack.enter_context(unchecked_distributions())
            stack.enter_context(masks_as_given())
            stack.enter_context(symbolic_min_and_max())
            stack.enter_context(_without_mkldnn())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(recorder.watch_modules())
            stack.enter_context(recorder.generators_kept())
            stack.enter_context(only_torch_draws())
            set_data = stack.enter_context(SetDataCopies([*fakes.slots, *fakes.tensors]))
            self.branches = stack.enter_context(asked).found
            stack.enter_context(held_tensors(submodules_of(self.arguments.modules)))
            stack.enter_context(recorder)  # outermost: no Python code but what is below it runs inside of an op
            args, kwargs = self._call_arguments(fakes)
            with self._told_of_changes((args, kwargs)), self.reads.watch(self.function, *self._objects()):
                result = self.function(*args, **kwargs)
            set_data.check_end()
            self.ends = swap.ends(result).updated(set_data.now)
            return [value for value in _flat(self.ends) if is_traced(value)]

    @contextmanager
    def _told_of_changes(self, call: Any) -> Iterator[None]:
        """Warn if the step changes a list, dict or dataclass among its arguments: what it has is a copy."""
        before, spec = flatten(call)
        yield
        after, now = flatten(call)
        names = [leaf.name for leaf in self.arguments.leaves]
        gone = [name for name, leaf in zip(names, before, strict=True) if all(leaf is not other for other in after)]
        if gone or now != spec:
            warnings.warn(
                f"the step changes containers among its arguments ({', '.join(gone) or 'new entries'}), but a compiled "
                "step gets copies of lists, dicts and dataclasses. Return the new values, or write into tensors",
                stacklevel=2,
            )

    def _objects(self) -> list[Any]:
        """What the step is given besides tensors."""
        self.reads.names.update((id(leaf.value), leaf.name) for leaf in self.arguments.leaves)
        return [leaf.value for leaf in self.arguments.leaves]

    def _call_arguments(self, fakes: Fakes) -> tuple[Any, Any]:
        tensors = iter(fakes.tensors)
        state = {slot.input.name: fake for slot, fake in zip(self.slots, fakes.slots, strict=True)}

        def stand_in(value: Any) -> Any:
            if isinstance(value, StateRef):
                return state[value.name]
            return next(tensors) if isinstance(value, torch.Tensor) else value

        leaves = [stand_in(leaf.value) for leaf in self.arguments.leaves]
        args, kwargs = tree_unflatten(leaves, self.arguments.spec)
        return args, kwargs


def _flat(ends: Ends) -> list[Any]:
    new_state = [entry.value for entry in ends.optimizer_state]
    return [*ends.results, *ends.slots, *ends.gradients.values(), *ends.skips, *new_state]


class _Swap:
    """Puts fakes in the place of live state for the length of a trace."""

    def __init__(self, trace: Trace, fakes: Fakes, recorder: Recorder) -> None:
        self.trace, self.fakes, self.recorder = trace, fakes, recorder
        self.modules, self.optimizers = trace.arguments.modules, trace.arguments.optimizers
        pairs = list(zip(trace.slots, fakes.slots, strict=True))
        self.by_id = {id(slot.get()): fake for slot, fake in pairs}
        self.fake_of = {slot.input.name: fake for slot, fake in pairs if slot.input.role == "parameter"}
        self.live_of = {slot.input.name: slot.get() for slot, _ in pairs if slot.input.role == "parameter"}
        self.skips = Skips()
        self.fake_state: dict[int, dict[Any, Any]] = {}  # by the id of the live state dict of one parameter

    @contextmanager
    def state(self) -> Iterator[None]:
        """Swap for the length of the context."""
        with ExitStack() as stack:
            self._swap_module_state(stack)
            # All are looked at before one is made plain: they may share their groups.
            watched = {path: Watched(optimizer, self.recorder) for path, optimizer in self.optimizers.items()}
            for path, each in watched.items():
                self._swap_optimizer(stack, path, each)
            self._swap_scalers(stack)
            stack.enter_context(only_these(self.optimizers.values()))
            yield

    def _swap_module_state(self, stack: ExitStack) -> None:
        places = self._swapped = self._places()
        for name, submodule in submodules_of(self.modules):
            stack.enter_context(attributes_kept(name, submodule))
            stack.enter_context(traceable(submodule))
            stack.enter_context(_restored(own_parameters(submodule)))
            stack.enter_context(_restored(own_buffers(submodule)))
        for holder in {id(holder): holder for holder, _, _ in places}.values():
            stack.enter_context(_restored(holder))
        for holder, key, fake in places:
            holder[key] = fake
        for slot, fake in zip(self.trace.slots, self.fakes.slots, strict=True):
            if slot.input.role == "gradient":
                self.fake_of[slot.input.of or ""].grad = fake
        for name in self.fake_of:
            self._hook(stack, name)

    def _places(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Every entry of a module that holds state, with its fake; replaced submodules still hold theirs."""
        places = [
            (slot.holder, slot.key, fake)
            for slot, fake in zip(self.trace.slots, self.fakes.slots, strict=True)
            if slot.input.role in ("parameter", "buffer")
        ]
        for held in [*parameters_of(self.modules), *buffers_of(self.modules)]:
            fake = self.by_id.get(id(held.tensor))
            if fake is None:
                raise CaptureError(
                    f"{held.name} is new in a replacement that an Override made, and would not be trained: "
                    "a replacement may hold no parameters or buffers but those of the module it replaces"
                )
            places += [(holder, key, fake) for holder, key in held.holders]
        return places

    def _hook(self, stack: ExitStack, name: str) -> None:
        """Carry the user's hooks over to the fake, and tag its gradient whenever it is complete."""
        fake, live = self.fake_of[name], self.live_of[name]
        if not fake.requires_grad:
            return
        for hook in (gradient_hooks(live) or {}).values():
            stack.callback(fake.register_hook(hook).remove)
        for hook in (accumulation_hooks(live) or {}).values():
            stack.callback(fake.register_post_accumulate_grad_hook(hook).remove)

        def tag(tensor: torch.Tensor) -> None:
            if tensor.grad is not None:
                self.recorder.tag_gradient(tensor.grad, name)

        stack.callback(fake.register_post_accumulate_grad_hook(tag).remove)

    def _swap_optimizer(self, stack: ExitStack, path: str, watched: Watched) -> None:
        optimizer = watched.optimizer
        check_traceable(path, optimizer)
        stack.enter_context(optimizer_kept(path, optimizer))
        live_state = optimizer.state
        stack.callback(setattr, optimizer, "state", live_state)
        by_id = self.by_id
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for parameter, values in live_state.items():
            if id(parameter) in by_id:
                fakes = {key: self._state_value(value) for key, value in values.items()}
                state[by_id[id(parameter)]] = self.fake_state[id(values)] = fakes
        optimizer.state = state
        stack.enter_context(_groups_kept(path, optimizer.param_groups))
        for group in optimizer.param_groups:
            stack.enter_context(_restored(group))
            group["params"] = [by_id.get(id(parameter), parameter) for parameter in group["params"]]  # or done: shared
        self._swap_hyper_parameters(path)
        watched.make_plain()
        for index, group in enumerate(optimizer.param_groups):
            stack.enter_context(group_kept(f"{path}.{index}", group))
        stack.enter_context(watched.stepping())

    def _swap_scalers(self, stack: ExitStack) -> None:
        scalers = self.trace.arguments.scalers
        for scaler in scalers.values():
            stack.enter_context(_restored(vars(scaler)))
        for slot, fake in zip(self.trace.slots, self.fakes.slots, strict=True):
            if slot.input.role == "scaler state":
                slot.holder[slot.key] = fake
        stack.enter_context(self.skips.watch(scalers, self.optimizers))

    def _state_value(self, value: Any) -> Any:
        return self.by_id[id(value)] if isinstance(value, torch.Tensor) else value

    def _swap_hyper_parameters(self, path: str) -> None:
        for hyper, fake in zip(self.trace.hyper_parameters, self.fakes.hyper_parameters, strict=True):
            if not hyper.name.startswith(f"{path}."):
                continue
            if hyper.item is None:
                self.fake_state.get(id(hyper.group), hyper.group)[hyper.key] = fake
            else:
                values = list(hyper.group[hyper.key])
                values[hyper.item] = fake
                hyper.group[hyper.key] = tuple(values)

    def ends(self, result: Any) -> Ends:
        """Read, still inside the trace, what the step left behind."""
        leaves, spec = flatten(result)
        check_results(leaves)
        self._refuse_what_would_be_lost()
        self._refuse_changed_parameters()
        self.skips.check(self.trace.arguments.scalers)
        slots = [self._end_of(slot, fake) for slot, fake in zip(self.trace.slots, self.fakes.slots, strict=True)]
        skips: list[Any] = []
        new_state = self._new_state(skips)
        return Ends(leaves, spec, slots, self._new_gradients(), skips, new_state)

    def _refuse_what_would_be_lost(self) -> None:
        known = {(id(holder), key) for holder, key, _ in self._swapped}
        for name, submodule in submodules_of(self.modules):
            for holder in (own_parameters(submodule), own_buffers(submodule)):
                for key, tensor in holder.items():
                    if tensor is not None and (id(holder), key) not in known:
                        raise CaptureError(
                            f"the step makes {name}.{key}: make it in the module's __init__, as a tensor"
                        )
        for leaf, fake in zip(self.trace.arguments.tensors(), self.fakes.tensors, strict=True):
            if fake.grad is not None:
                raise CaptureError(
                    f"backward gives the argument {leaf.name} a gradient, which a compiled step does not store: "
                    f"return torch.autograd.grad(loss, {leaf.name}) instead, or pass it without requires_grad"
                )

    def _refuse_changed_parameters(self) -> None:
        for slot, fake in zip(self.trace.slots, self.fakes.slots, strict=True):
            if slot.input.role != "parameter":
                continue
            if slot.holder[slot.key] is not fake:
                raise CaptureError(
                    f"the step puts another tensor in the place of {slot.input.name}, which the optimizer would not "
                    f"know: write into it, under torch.no_grad(), with {slot.input.name}.copy_(value)"
                )
            if fake.requires_grad != self.live_of[slot.input.name].requires_grad:
                raise CaptureError(
                    f"the step leaves {slot.input.name}.requires_grad changed, which a compiled step would do once "
                    "instead of at every call: put it back at the end of the step, or change it outside"
                )

    def _end_of(self, slot: Slot, fake: torch.Tensor) -> Any:
        if slot.input.role == "gradient":
            return self.fake_of[slot.input.of or ""].grad
        if slot.input.role != "optimizer state":
            return self._unchanged_in_kind(slot, slot.holder[slot.key])
        return self._unchanged_in_kind(slot, self.fake_state[id(slot.holder)].get(slot.key))

    def _unchanged_in_kind(self, slot: Slot, value: Any) -> Any:
        """State keeps its shape and dtype from call to call: programs are bound to it, and ranks hold parts of it."""
        before = slot.input
        if isinstance(value, torch.Tensor) and (tuple(value.shape), value.dtype) == (before.shape, before.dtype):
            return value
        now = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        line = self.recorder.source_of(value) if isinstance(value, torch.Tensor) else ""
        raise CaptureError(
            f"the step makes {before.name}, which is {before.dtype}{list(before.shape)}, into {now}"
            f"{f' at {line}' if line else ''}: state keeps its shape and dtype from call to call. Make it in its final "
            "form before the step, and convert what is written into it"
        )

    def _new_gradients(self) -> dict[str, Any]:
        kept = {slot.input.of for slot in self.trace.slots if slot.input.role == "gradient"}
        return {name: fake.grad for name, fake in self.fake_of.items() if fake.grad is not None and name not in kept}

    def _new_state(self, skips: list[Any]) -> list[NewEntry]:
        """What optimizers made; the conditions under which they did not are added to ``skips``."""
        known = {slot.input.name for slot in self.trace.slots}
        names = {id(fake): name for name, fake in self.fake_of.items()}
        found = []
        for path, optimizer in self.optimizers.items():
            for fake, values in optimizer.state.items():
                for key, value in values.items():
                    name = names[id(fake)]
                    if not is_traced(value) and holds_traced(value):
                        raise CaptureError(
                            f"{path} keeps a {type(value).__name__} of tensors in state[{name}][{key!r}]: "
                            "keep each tensor under a key of its own"
                        )
                    if f"{path}.{key}[{name}]" not in known:
                        unless = _place_in(skips, self.skips.condition(optimizer, fake, key))
                        found.append(NewEntry(path, name, key, value, unless))
        return found


def _place_in(values: list[Any], value: Any) -> int | None:
    """The index of ``value`` in ``values``, where it is put if it is not there; None for None."""
    if value is None:
        return None
    for index, each in enumerate(values):
        if each is value:
            return index
    values.append(value)
    return len(values) - 1


@contextmanager
def _groups_kept(path: str, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Raise ``CaptureError`` if the step adds or removes parameter groups; the list is as before in any case."""
    before = list(groups)
    try:
        yield
        if len(groups) != len(before):
            raise CaptureError(f"the step changes the number of {path}.param_groups: do so outside of the step")
    finally:
        groups[:] = before


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Its LSTM keeps what only its own kernel can read; without it an LSTM is traced as the ops it is made of."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@contextmanager
def _restored(mapping: dict[str, Any]) -> Iterator[None]:
    """Give ``mapping`` its entries back, in their order."""
    entries = dict(mapping)
    try:
        yield
    finally:
        mapping.clear()
        mapping.update(entries)
