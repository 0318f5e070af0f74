"""Find what each call of a program writes back to Python state, and which of that state must be its inputs.

In come the changes that one trace of a step found. Numbers, strings and flags are written back as they are; tensors
and numbers that the graph computes become outputs. What was read before it was written, and differs from call to call,
becomes an input (``carried.py``); flags are guarded by the value that was read. All else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from passes import CaptureError

from ..._torch import FakeTensor, TreeSpec, tree_flatten, tree_unflatten
from ...call.refusals import refuse
from ...call.state import Arguments
from ..lines import line_naming
from ..reads import Change, Lines, Reads, ReadSite, containers_in, passed_on
from ..traced import holds_fakes
from .carried import Carried, leaf_name
from .containers import ArgumentEntry
from .lost_graph import has_lost_graph, mark
from .repeated import Effect

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


@dataclass(frozen=True)
class GroupEntry:
    """An entry of a parameter group as a place to write to."""

    path: str
    index: int
    key: str

    @property
    def name(self) -> str:
        """The name in the user's words."""
        return f"{self.path}.{self.index}.{self.key}"


@dataclass(frozen=True, eq=False)
class Write:
    """A value that each call writes: ``leaves`` are plain, traced, or (once they are outputs) ``FromOutput``."""

    target: ReadSite | GroupEntry | ArgumentEntry
    leaves: list[Any]
    spec: TreeSpec
    in_place: bool  # into the container that is there
    had_graph: bool = False  # of some tensor, which no later call may compute with

    @property
    def name(self) -> str:
        """The name of the target in the user's words."""
        return self.target.name

    def names(self) -> list[str]:
        """A name for each leaf."""
        total = len(self.leaves)
        return [leaf_name(self.name, k, total) for k in range(total)]

    def apply(self, arguments: Arguments, current: Callable[[Any], Any]) -> None:
        """Write the values of a call; ``current`` gives that of a leaf."""
        leaves = [current(leaf) for leaf in self.leaves]
        if self.had_graph:
            for leaf in leaves:
                mark(leaf)
        value = tree_unflatten(leaves, self.spec)
        if isinstance(self.target, GroupEntry):
            arguments.optimizers[self.target.path].param_groups[self.target.index][self.target.key] = value
        elif isinstance(self.target, ArgumentEntry):
            self.target.put(arguments.given, value)
        elif self.in_place:
            _fill(self.target.get(), value)
        else:
            self.target.put(value)


def _fill(container: Any, value: Any) -> None:
    """Give a container the entries of another."""
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(value)


@dataclass
class Settled:
    """``writes`` of each call, and what the program must take as inputs besides what it has."""

    writes: list[Write]
    missing: Carried


def settle(
    changes: Iterable[Change],
    entries: Iterable[tuple[ArgumentEntry, Change]],
    carried: Carried,
    reads: Reads,
    source_of: Callable[[torch.Tensor], str],
) -> Settled:
    """Decide about every change. Raises ``CaptureError``, at the user's line, for what cannot be repeated.

    ``entries`` are those of containers among the arguments.
    """
    settled = Settled([], Carried())
    known = {site.address: site for site in (*carried.numbers, *carried.sites)}
    for change in changes:
        change = replace(change, site=known.get(change.site.address, change.site))
        explained = _Explained(change, reads, source_of)
        is_log = id(change.before) in reads.journals.by_id  # of which it read nothing, or entries by themselves
        if change.was_read and not is_log and change.site.address not in known:
            more = _to_carry(change, explained)
            if more:
                settled.missing |= more
                continue
        settled.writes.append(_write(change, explained))
    for entry, change in entries:
        write = _write(change, _Explained(change, reads, source_of))
        settled.writes.append(replace(write, target=entry, in_place=False))
    return settled


@dataclass(frozen=True, eq=False)
class _Explained:
    """A change, with what it takes to name the user's line."""

    change: Change
    reads: Reads
    source_of: Callable[[torch.Tensor], str]

    def refuse(self, what: str, alternative: str, tensor: Any = None, line: str = "") -> None:
        """Refuse: the step ``what`` <the site> at its line, and the ``alternative``."""
        site = self.change.site
        found = self.source_of(tensor) if isinstance(tensor, FakeTensor) else ""
        line = line or line_naming(self.reads.code, site.key) or found
        refuse(CaptureError, f"the step {what} {site.name}{f' at {line}' if line else ''}. {alternative}")


def _to_carry(change: Change, explained: _Explained) -> Carried:
    """The state that must be an input, since the step read the value before it wrote another."""
    if change.grew:
        refused = explained.reads.journals.refused
        lines = next((refused[id(each)] for each in containers_in(change.after) if id(each) in refused), Lines())
        explained.refuse(
            "appends to",
            f"{f'It reads the list, too, at {lines.reads}. ' if lines.reads else ''}A list that grows at every call is "
            "no state of a program: return the value, and append it outside of the step",
            line=lines.writes,
        )
    tensors = [leaf for leaf in change.held if isinstance(leaf, torch.Tensor)]
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors):
        explained.refuse("replaces parameters in", "Write into them, under torch.no_grad(), with copy_(value)")
    if any(tensor.requires_grad or has_lost_graph(tensor) for tensor in tensors):
        explained.refuse("reads a tensor with its graph in", "Keep tensor.detach() there")
    if tensors:
        return Carried(sites=(change.site,))
    if type(change.before) in (int, float) and isinstance(change.after, _NUMBERS) and type(change.after) is not bool:
        return Carried(numbers=(change.site,))
    return Carried()


def _write(change: Change, explained: _Explained) -> Write:
    """The write of a change. A tensor with its graph becomes one without, where the step itself never reads it."""
    leaves, spec = tree_flatten(change.after)
    leaves = [bool(leaf) if isinstance(leaf, torch.SymBool) else passed_on(leaf) for leaf in leaves]
    for leaf in leaves:
        _check_object(leaf, explained)
    graphs = [leaf for leaf in leaves if isinstance(leaf, FakeTensor) and leaf.requires_grad]
    if graphs and change.was_read:
        explained.refuse("keeps a tensor with its graph in", "Keep tensor.detach() there", graphs[0])
    return Write(change.site, leaves, spec, change.after is change.before, bool(graphs))


def check_effect(effect: Effect) -> None:
    """Raise ``CaptureError``, at the user's line, if a call cannot repeat an effect."""
    held = [leaf for leaf in effect.leaves if _held_by(leaf)]
    if held:
        refuse(
            CaptureError,
            f"the step puts a {type(held[0]).__name__} that holds tensors in {effect.name} at {effect.line}. {_KEPT}",
        )


_KEPT = (
    "Keep the tensors and numbers themselves, in a tuple, list or dict, or make the object before the first call: what "
    "the step writes to its attributes is state"
)


def _held_by(leaf: Any) -> list[Any]:
    """The traced tensors and numbers that an object has as attributes."""
    if isinstance(leaf, (torch.Tensor, torch.nn.Module)):
        return []
    values = list(getattr(leaf, "__dict__", {}).values())
    return [each for each in tree_flatten(values)[0] if holds_fakes(each)]


def _check_object(leaf: Any, explained: _Explained) -> None:
    held = _held_by(leaf)
    if held:
        kind = type(leaf).__name__
        explained.refuse(f"puts a {kind} that holds tensors in", _KEPT, held[0])


def bound(
    writes: Iterable[Write | Effect], known: Mapping[int, Any], add: Callable[[str], Any]
) -> list[Write | Effect]:
    """The writes, with ``add(name)`` in the place of each traced leaf, in order; names are made unique.

    ``known``: outputs that there are already, by the id of the leaf, for effects to share.
    """
    taken = set[str]()

    def output(write: Write | Effect, name: str, leaf: Any) -> Any:
        if isinstance(write, Effect) and id(leaf) in known:
            return known[id(leaf)]
        names = (name if k == 1 else f"{name} ({k})" for k in count(1))
        unique = next(each for each in names if each not in taken)
        taken.add(unique)
        return add(unique)

    def leaves(write: Write | Effect) -> list[Any]:
        pairs = zip(write.names(), write.leaves, strict=True)
        return [output(write, name, leaf) if is_output(leaf) else leaf for name, leaf in pairs]

    return [replace(write, leaves=leaves(write)) for write in writes]


def is_output(leaf: Any) -> bool:
    """Whether the graph computes a leaf: a tensor that was there before is written back as the object it is."""
    return isinstance(leaf, (FakeTensor, torch.SymInt, torch.SymFloat))
