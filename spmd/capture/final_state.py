"""``FinalState``: what the step returned and what the state holds when it ends, read while still inside the trace.

Refused here: state that a compiled step could not store, or that it would change only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from passes import CaptureError

from .._torch import own_buffers, own_parameters, storage_id, tree_flatten, tree_map
from ..call.argument_logs import LogsFound
from ..call.nested_state import item_at, leaves_of
from ..call.refusals import refuse
from ..call.state import Slot, state_name, submodules_of, with_own_state
from ..call.tree import flatten
from ..python_state.effects.carried import Carried
from ..python_state.effects.containers import ArgumentEntry, logs_among
from ..python_state.effects.groups import group_changes
from ..python_state.effects.repeated import Effect, StateMemory, effects_of
from ..python_state.effects.writes import Write, check_effect, is_output, settle
from ..python_state.lines import line_naming
from ..python_state.reads import Change, Lines, Reads, containers_in
from ..python_state.traced import holds_fakes, is_traced
from ..watching.watch import Watched
from .set_data import is_same_memory
from .swap_state import StateSwap
from .unsupported import check_results, with_known_numbers


@dataclass(frozen=True)
class NewEntry:
    """New state of an optimizer."""

    optimizer: str
    parameter: str  # or a text, which is the key then
    key: Any
    value: Any  # a traced or plain value, or containers of them
    unless: int | None = None  # index in ``FinalState.skips`` of the condition under which it is not made after all


Entries = Sequence[tuple[ArgumentEntry, Change]]


class Incomplete(Exception):
    """Trace the step again: it reads and writes Python state that must be inputs (``missing``), or has logs.

    ``logs``: containers that it writes to, by name, which may need a journal. ``read``: those with one that it reads,
    after all.
    """

    def __init__(
        self, missing: Carried, logs: Sequence[tuple[str, Any]] = (), read: Mapping[int, Lines] | None = None
    ) -> None:
        super().__init__("the step carries Python state")
        self.missing, self.logs, self.read = missing, logs, read or {}

    def reasons(self) -> Iterator[str]:
        """A text for each thing for which the step is traced again."""
        yield from (f"{site.name}, which it reads and writes" for site in (*self.missing.numbers, *self.missing.sites))
        yield from (f"{path}.{index}.{key}, which it writes" for path, index, key in sorted(self.missing.counters))
        yield from (f"entries of {name}, which it writes" for name, _ in self.logs)
        yield from (f"what it reads at {lines.reads} and writes at {lines.writes}" for lines in self.read.values())


@dataclass(frozen=True)
class FinalState:
    """Values are traced tensors, or plain Python values."""

    results: list[Any]
    result_spec: Any
    slots: list[Any]  # one per slot; None where a gradient is gone
    gradients: dict[str, Any]  # new gradients by parameter name
    pending: frozenset[str]  # parameters whose gradient ``no_sync`` leaves a pending sum
    skips: list[Any]  # conditions under which new state was not made after all
    optimizer_state: list[NewEntry]
    writes: list[Write | Effect]  # to Python state
    requires_grad: dict[str, bool]  # of parameters for which the step changes it, by name
    asked: Sequence[Any] = ()  # values that the step branches on
    watched: Mapping[Watched, Any] = field(default_factory=dict)  # statistics that a call looks at

    @classmethod
    def of(cls, swap: StateSwap, result: Any, carried: Carried, reads: Reads, entries: Entries) -> FinalState:
        """Read the final state. Raises ``CaptureError`` and ``Refused`` for changes that cannot be compiled.

        Raises ``Incomplete`` if more Python state has to be carried.
        """
        leaves, spec = flatten(result)
        check_results(leaves)
        leaves = [*map(with_known_numbers, leaves)]
        _refuse_new_parameters(swap)
        _refuse_argument_gradients(swap)
        _refuse_replaced_parameters(swap, reads)
        _refuse_replaced_state(swap, reads)
        swap.skipped.check(swap.call.arguments.scalers)
        slots = [_final_value(swap, slot) for slot, _ in swap.pairs]
        skips: list[Any] = []
        new_state = _new_state(swap, skips)
        writes = _writes(swap, carried, reads, entries)
        writes = [replace(each, leaves=[*map(with_known_numbers, each.leaves)]) for each in writes]
        _refuse_kept_copies(swap, leaves, writes)
        changed = _changed_requires_grad(swap)
        pending = frozenset(swap.pending)
        return cls(leaves, spec, slots, _new_gradients(swap), pending, skips, new_state, writes, changed)

    def map_state(self, function: Callable[[Any], Any]) -> FinalState:
        """The same with ``function`` of each value of state."""
        new = [replace(entry, value=tree_map(function, entry.value)) for entry in self.optimizer_state]
        writes = [replace(write, leaves=[function(leaf) for leaf in write.leaves]) for write in self.writes]
        return replace(self, slots=[function(value) for value in self.slots], optimizer_state=new, writes=writes)

    def traced(self) -> list[Any]:
        """The traced values, in the order of the graph's outputs."""
        new_state = [leaf for entry in self.optimizer_state for leaf in tree_flatten(entry.value)[0]]
        values = [*self.results, *self.slots, *self.gradients.values(), *self.skips, *new_state]
        results = {id(value) for value in self.results}
        pairs = [(write, leaf) for write in self.writes for leaf in write.leaves if is_output(leaf)]
        written = [leaf for write, leaf in pairs if not isinstance(write, Effect) or id(leaf) not in results]
        return [*(value for value in values if is_traced(value)), *written, *self.asked, *self.watched.values()]


def _writes(swap: StateSwap, carried: Carried, reads: Reads, entries: Entries) -> list[Write | Effect]:
    """The writes of each call to Python state, and to containers among its arguments."""
    _check_unread(reads)
    passed = logs_among(entries) - swap.call.no_logs
    if passed:
        raise LogsFound(passed, are_logs=True)
    changes = [*(change for snapshot in swap.attributes for change in snapshot.changes(reads)), *reads.changes]
    logs = _logs(swap, carried, reads, changes)
    if reads.refused:
        refuse(
            CaptureError,
            f"the step reads {reads.refused[0]}, which refers to state of a model from a tuple, set, deque or weak "
            "dict, or to parameters that a step has split since. Take parameters from the module, keep them in a list "
            "or dict, or note their names",
        )
    groups, missing = group_changes(swap.groups, carried, reads)
    kept = [change for change in changes if not _is_in(change, [each for _, each in logs])]
    in_dicts = reads.journals.changes()
    kept += [change for change in in_dicts if change.after is not change.before]
    _refuse_moved_logs(changes, reads)
    settled = settle(kept, entries, carried, reads, swap.recorder.source_of)
    _check_unread(reads)  # of what is nested in what it wrote
    missing |= settled.missing
    missing |= _carried_in(in_dicts, carried)
    if missing or logs:
        raise Incomplete(missing, logs)
    swap.call.initial.is_seen |= bool(groups)
    effects = effects_of(reads.journals.logged())
    for effect in effects:
        check_effect(effect)
    # Effects are on the containers that are there when a call begins: a write may put another there (self.log = []).
    writes: list[Write | Effect] = [*effects, *settled.writes, *groups]
    writes = [_with_state_memory(swap, each) for each in writes]
    _refuse_aliases(swap, writes)
    reads.leave_out(carried.addresses | {change.site.address for change in changes if not change.was_read})
    return writes


def _carried_in(changes: Sequence[Change], carried: Carried) -> Carried:
    """The numbers and tensors that the step reads in dicts, as far as they are no inputs yet."""
    new = [change for change in changes if change.site.address not in carried.addresses]
    tensors = [change.site for change in new if isinstance(change.before, torch.Tensor)]
    return Carried(tuple(change.site for change in new if change.site not in tensors), tuple(tensors))


def _refuse_moved_logs(changes: Sequence[Change], reads: Reads) -> None:
    """Trace without journals for containers that the step puts somewhere else: what they held goes with them."""
    for change in changes:
        reads.journals.note_moved(change.after, line_naming(reads.code, change.site.key))
    _check_unread(reads)


def _check_unread(reads: Reads) -> None:
    """Raise ``Incomplete`` where the step reads what a container with a journal held."""
    if reads.journals.read():
        raise Incomplete(Carried(), read=reads.journals.read())


def _logs(swap: StateSwap, carried: Carried, reads: Reads, changes: Sequence[Change]) -> list[tuple[str, Any]]:
    """The containers that the step writes to, each with a name, which may have journals in another trace.

    Raises ``CaptureError`` for one that may not, unless a module or optimizer owns it.
    """
    # In the place of one that is an input, the trace has another, which has gone where the step put a new one there.
    replaced = [each for each in changes if each.after is not each.before and each.site.address in carried.addresses]
    gone = {id(each) for change in replaced for each in containers_in(change.before)}
    changed = []
    for each, key in reads.changed_containers:
        if id(each.value) in gone:
            continue
        if id(each.value) in reads.held or not reads.journals.can_have(each.value):
            lines = reads.journals.refused.get(id(each.value), Lines())
            line, read = lines.writes or line_naming(reads.code, key), lines.reads
            by_key = isinstance(each.value, dict) and read
            refuse(
                CaptureError,
                f"the step changes the entries of {each.name}{f' at {line}' if line else ''}"
                f"{f', and reads them at {read}' if read else ''}, which a compiled step would do only once, while it "
                f"is traced. {'Read its entries by their keys, not in a loop, or return' if by_key else 'Return'} the "
                "value, and keep it outside of the step, or in an attribute (self.total += loss.detach())",
            )
        else:
            changed.append((each, key))
    owned = [(snapshot.name, each.value) for snapshot in swap.attributes for each in snapshot.written()]
    inputs = {id(each) for site in carried.sites for each in containers_in(site.get())}
    owned = [(name, each) for name, each in owned if reads.journals.can_have(each) and id(each) not in inputs]
    return [*((each.name, each.value) for each, _ in changed), *owned]


def _is_in(change: Change, logs: list[Any]) -> bool:
    """Whether a change is of entries of ``logs``, or takes one away, as far as is known before they have journals."""
    if change.after is not change.before:
        return any(change.before is log for log in logs)
    return any(each is log for each in containers_in(change.after) for log in logs)


def _with_state_memory(swap: StateSwap, write: Write | Effect) -> Write | Effect:
    """The write, where a container that the step does not read gets all of a tensor's memory, as by ``p.data = kept``.

    Each call puts the live memory there, which costs nothing.
    """
    if not isinstance(write, Effect) or not write.is_kept:
        return write
    held = [(slot.input.name, fake) for slot, fake in swap.pairs if slot.input.role in ("parameter", "buffer")]

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not is_output(leaf) or leaf.requires_grad:
            return leaf
        return next((StateMemory(name) for name, fake in held if is_same_memory(leaf, fake)), leaf)

    return replace(write, leaves=list(map(moved, write.leaves)))


def _refuse_aliases(swap: StateSwap, writes: Sequence[Write | Effect]) -> None:
    """Raise ``CaptureError`` if the step keeps the memory of state under another name: both would change together."""
    memory = {storage_id(fake): slot.input.name for slot, fake in swap.pairs}
    for write in writes:
        for leaf in write.leaves:
            if isinstance(leaf, torch.Tensor) and is_output(leaf) and storage_id(leaf) in memory:
                line = swap.recorder.source_of(leaf)
                refuse(
                    CaptureError,
                    f"the step keeps the memory of {memory[storage_id(leaf)]} in {write.name}"
                    f"{f' at {line}' if line else ''}, where later writes would show. Keep a copy, with .clone()",
                )


def _refuse_kept_copies(swap: StateSwap, results: Sequence[Any], writes: Sequence[Write | Effect]) -> None:
    """Raise ``CaptureError`` for a model that the step has made or copied, and returns or leaves somewhere."""
    known = {id(fake) for _, fake in swap.pairs}
    kept = [(f"keeps in {write.name}", leaf) for write in writes for leaf in write.leaves]
    for how, model in [*(("returns", leaf) for leaf in results), *kept]:
        if isinstance(model, torch.nn.Module):
            own = [x for x in [*model.parameters(), *model.buffers()] if holds_fakes(x) and id(x) not in known]
            if own:
                refuse(
                    CaptureError,
                    f"the step {how} a {type(model).__name__} that it has made, or copied, itself, and which ends with "
                    "the call. Make it before the first call, and let the step write its values: "
                    "target.load_state_dict(model.state_dict())",
                )


def _refuse_new_parameters(swap: StateSwap) -> None:
    known = {(id(holder), key) for holder, key, _ in swap.entries}
    for name, submodule in submodules_of(swap.modules):
        for holder in (own_parameters(submodule), own_buffers(submodule)):
            for key, tensor in holder.items():
                if tensor is not None and (id(holder), key) not in known:
                    refuse(CaptureError, f"the step makes {name}.{key}: make it in the module's __init__, as a tensor")


def _refuse_argument_gradients(swap: StateSwap) -> None:
    for leaf, fake in zip(swap.call.arguments.tensors(), swap.fakes.tensors, strict=True):
        # A step may ask for gradients of an argument itself: they are its own, and end with it.
        if fake.grad is not None and leaf.value.requires_grad:
            refuse(
                CaptureError,
                f"backward gives the argument {leaf.name} a gradient, which a compiled step does not store: "
                f"return torch.autograd.grad(loss, {leaf.name}) instead, or pass it without requires_grad, and call "
                f"{leaf.name}.requires_grad_() inside of the step",
            )


def _refuse_replaced_parameters(swap: StateSwap, reads: Reads) -> None:
    for slot, fake in swap.pairs:
        name = slot.input.name
        if slot.input.role == "parameter" and slot.holder[slot.key] is not fake:
            line = line_naming(reads.code, slot.key)
            refuse(
                CaptureError,
                f"the step puts another tensor in the place of {name}{f' at {line}' if line else ''}, which the "
                f"optimizer would not know: write into it, under torch.no_grad(), with {name}.copy_(value)",
            )


def _refuse_replaced_state(swap: StateSwap, reads: Reads) -> None:
    names = {id(fake): name for name, fake in swap.fake_of.items()}
    for path, optimizer, parameter, values in swap.states:
        if dict.get(optimizer.state, parameter) is not values:
            line = line_naming(reads.code, "state") or line_naming(reads.code, "load_state_dict")
            refuse(
                CaptureError,
                f"the step removes or replaces the state that {path} has of {names.get(id(parameter), 'a parameter')}"
                f"{f' at {line}' if line else ''}, but programs are bound to it. Do so between calls, or write into "
                "its tensors (state[parameter]['exp_avg'].zero_())",
            )


def _changed_requires_grad(swap: StateSwap) -> dict[str, bool]:
    named = [(slot.input.name, fake) for slot, fake in swap.pairs if slot.input.role == "parameter"]
    return {name: x.requires_grad for name, x in named if x.requires_grad != swap.live_of[name].requires_grad}


def _final_value(swap: StateSwap, slot: Slot) -> Any:
    if slot.input.role == "gradient":
        return swap.fake_of[slot.input.of or ""].grad
    if slot.input.role == "optimizer state":
        return _checked(swap, slot, item_at(swap.fake_state[id(slot.holder)].get(slot.key), slot.nested))
    return _checked(swap, slot, slot.holder[slot.key])


def _checked(swap: StateSwap, slot: Slot, value: Any) -> Any:
    """``value``, if it has the shape and dtype of its slot: programs are bound to state, and ranks hold parts of it."""
    before = slot.input
    if isinstance(value, torch.Tensor) and (tuple(value.shape), value.dtype) == (before.shape, before.dtype):
        return value
    now = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    line = swap.recorder.source_of(value) if isinstance(value, torch.Tensor) else ""
    refuse(
        CaptureError,
        f"the step makes {before.name}, which is {before.dtype}{list(before.shape)}, into {now}"
        f"{f' at {line}' if line else ''}: state keeps its shape and dtype from call to call. Make it in its final "
        "form before the step, and convert what is written into it",
    )
    return torch.zeros(before.shape, dtype=before.dtype, device=slot.get().device)


def _new_gradients(swap: StateSwap) -> dict[str, Any]:
    stored = {slot.input.of for slot, _ in swap.pairs if slot.input.role == "gradient"}
    return {name: fake.grad for name, fake in swap.fake_of.items() if fake.grad is not None and name not in stored}


def _new_state(swap: StateSwap, skips: list[Any]) -> list[NewEntry]:
    """The state that optimizers created; the conditions under which they did not are appended to ``skips``."""
    names = {id(fake): name for name, fake in swap.fake_of.items()}
    found = []
    for path, optimizer in with_own_state(swap.optimizers).items():
        for fake, values in optimizer.state.items():
            name = names.get(id(fake), fake)
            if isinstance(name, torch.Tensor):  # a parameter that no module has any more
                continue
            entries = values.items() if isinstance(values, dict) else [(None, values)]
            for key, value in entries:
                if not _was_there(swap, path, name, key, value):
                    unless = _index_in(skips, swap.skipped.condition(optimizer, fake, key))
                    found.append(NewEntry(path, name, key, value, unless))
    return found


def _was_there(swap: StateSwap, path: str, owner: str, key: Any, value: Any) -> bool:
    """Whether an entry has tensors that are slots. Raises ``CaptureError`` where others stand beside them now."""
    known = {slot.input.name for slot, _ in swap.pairs}
    first, rest = (key, owner) if key is not None else (owner, "")
    slots = [slot for slot, _ in swap.pairs if slot.input.role == "optimizer state"]
    now = {nested: state_name(path, first, rest, nested) for nested, leaf in leaves_of(value) if is_traced(leaf)}
    if known.isdisjoint(now.values()):
        return False
    live = next(slot for slot in slots if slot.input.name in now.values())
    before = dict(leaves_of(live.holder[live.key]))
    plain = {nested: leaf for nested, leaf in leaves_of(value) if nested not in now}
    others = {nested: leaf for nested, leaf in before.items() if nested not in now}
    if before.keys() != {*now, *plain} or any(others[nested] is not leaf for nested, leaf in plain.items()):
        refuse(
            CaptureError,
            f"the step changes what {path} keeps in {state_name(path, first, rest)} besides the values of its tensors: "
            "lists, tuples and dicts in the state of an optimizer keep their lengths, keys and numbers from call to "
            "call. Keep what changes under a key of its own",
        )
    return True


def _index_in(values: list[Any], value: Any) -> int | None:
    """The index of ``value`` in ``values``, appended if it is not there; None for None."""
    if value is None:
        return None
    for index, each in enumerate(values):
        if each is value:
            return index
    values.append(value)
    return len(values) - 1
