"""Edits: writes between calls to state that ranks have equal copies of, which part the ranks unless all make the same.

Torch counts the writes to a tensor. Each program remembers the counts at the end of its calls, so that a call at which
nothing was written costs a read of them. What was written to is compared between the ranks, by hashes: always where
they wrote to other tensors or in another number of writes; where all made the same writes, as an optimizer outside of
the step does at each call, the first time, the second, the fourth and so on. A write through ``.data`` is not counted.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add, or_, sub
from typing import Any

import torch

from passes import Program, RankMismatchError, Role

from .._torch import local_tensor, version_of
from ..call.call import Call
from ..ranks.equal_values import contents, digest, hash_of


class EditedError(RankMismatchError):
    """State that is not the same on all ranks any more, since some wrote to it between calls."""


class Edits:
    """The edits of the state of one program. ``names``: of the tensors of a call; ``copied``: as ``copied_state``."""

    def __init__(self, names: Sequence[str], copied: Mapping[str, str]) -> None:
        self._positions = [k for k, name in enumerate(names) if name in copied]
        self.names = [names[k] for k in self._positions]
        self.parts = [copied[name] for name in self.names]
        self._ids: list[int] = []
        self._references: list[weakref.ref[torch.Tensor]] = []  # to storages: torch converts no DTensor that has some
        self._versions: list[int] = []
        self._before: list[int] | None = None  # the versions at the start of this call, if nothing was written
        self._own: list[int] | None = None  # how often a call writes to each tensor itself, once that is known
        self._compared: Counter[int] = Counter()  # how often ranks made the same edits, by their number

    def tensors(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that are compared, as ``names``."""
        return [live[k] for k in self._positions]

    def end_call(self, live: Sequence[torch.Tensor]) -> None:
        """A call has ended: what is written from now on is an edit. All calls make the same number of writes."""
        before, self._before = self._before, None
        if before is not None and self._own is not None and _last is self:
            self._versions = list(map(add, before, self._own))
            return
        self.note(live)
        self._own = None if before is None else list(map(sub, self._versions, before))

    def note(self, live: Sequence[torch.Tensor]) -> None:
        """Begin to count: a write from now on is an edit."""
        global _last
        if _last is not self:
            _remember_last()
            _last = self
        tensors = self.tensors(live)
        self._ids, self._references = list(map(id, tensors)), list(map(weakref.ref, map(local_tensor, tensors)))
        self._versions = _versions_of(tensors)

    def made(self, live: Sequence[torch.Tensor]) -> dict[int, int]:
        """The edits since the last call: the number of writes by index of the tensor, 0 where it is another one."""
        tensors = self.tensors(live)
        ids, versions = list(map(id, tensors)), _versions_of(tensors)
        if _last is self and ids == self._ids and versions == self._versions:
            self._before = versions
            return {}
        self._before = self._own = None
        _remember_last()
        pairs = ((k, _known(each), version) for k, (each, version) in enumerate(zip(tensors, versions, strict=True)))
        return {k: version - (before or 0) for k, before, version in pairs if version != before}

    def is_due(self, number: int) -> bool:
        """Whether edits that all ranks have made are to be compared: the first time, the second, the fourth, ..."""
        self._compared[number] += 1
        times = self._compared[number]
        return times & (times - 1) == 0

    def close(self) -> None:
        """Forget it all: the state is gone."""
        global _last
        if _last is self:
            _remember_last()
            _last = None


def copied_state(call: Call, program: Program) -> dict[str, str]:
    """The names of state of which several ranks have equal copies, each with the part that this rank has: "" is all."""
    if not call.mode.sync:
        return {}
    ignored, axes, copied = call.annotations.ignored, program.mesh.axes, dict[str, str]()
    for each in program.inputs:
        if each.role.is_state and each.role is not Role.GRADIENT and each.name not in ignored:
            pairs = zip(axes, each.placement, strict=False)  # what has no placement is whole
            entries = [(axis, entry) for axis, entry in pairs if axis.size > 1]
            split = [f"{axis.name}={axis.coordinate}" for axis, entry in entries if not entry.is_replicate()]
            if len(split) < len(entries) or not entries:
                copied[each.name] = " ".join(split)
    return copied


def edited_before(call: Call) -> dict[str, torch.Tensor]:
    """The state of a call that compiles by name, where a call before it knew the tensor and it was written to since."""
    _remember_last()
    slots = [slot for slot in call.slots if slot.input.role is not Role.GRADIENT and type(slot.get()) in _PLAIN]
    slots = [slot for slot in slots if slot.input.name not in call.annotations.ignored]
    names, tensors = [slot.input.name for slot in slots], [slot.get() for slot in slots]
    found = zip(names, tensors, _versions_of(tensors), strict=True)
    return {name: each for name, each, version in found if _known(each) not in (None, version)}


def number_of(made: Mapping[int, int]) -> int:
    """A number for edits: equal where the same tensors were written to equally often, 0 where none was."""
    return digest(number for pair in sorted(made.items()) for number in pair) if made else 0


def compare_edits(
    what: str,
    names: Sequence[str],
    parts: Sequence[str],
    tensors: Sequence[torch.Tensor],
    made: Sequence[int],
    ranks: Sequence[int],
    all_gather_text: Callable[[str], list[str]],
) -> tuple[bool, str]:
    """Compare what some rank wrote to: whether any did, and a sentence on the first tensor that differs, if one does.

    All ranks call it. ``parts``: what each tensor is of the one that it is named for; ranks with equal parts are
    compared. ``made``: indices of what this one wrote to. Where ranks have other ``names``, which is for the caller to
    report, nothing is compared.
    """
    own = [hashlib.sha256(repr(names).encode()).hexdigest(), hex(sum(1 << k for k in made))]
    gathered = [json.loads(text) for text in all_gather_text(json.dumps(own))]
    if any(each != own[0] for each, _ in gathered):
        return False, ""
    by_rank = [int(bits, 16) for _, bits in gathered]
    written = [k for k in range(len(names)) if reduce(or_, by_rank) >> k & 1]
    hashes = [f"{parts[k]} {hash_of(local_tensor(tensors[k]))[:16]}" for k in written]
    if len({*all_gather_text(hashlib.sha256("".join(hashes).encode()).hexdigest())}) == 1:
        return bool(written), ""
    shown = zip(*(json.loads(text) for text in all_gather_text(json.dumps(hashes))), strict=True)
    differing = next((k for k, each in zip(written, shown, strict=True) if _differ(each)), None)
    if differing is None:
        return True, ""
    values = all_gather_text(json.dumps([parts[differing], contents(local_tensor(tensors[differing]))]))
    pairs = [tuple(json.loads(text)) for text in values]
    return True, _sentence(what, names[differing], ranks, pairs, [bits >> differing & 1 for bits in by_rank])


def _differ(found: Sequence[str]) -> bool:
    """Whether two ranks that have one part have other hashes of it."""
    return len({*found}) > len({each.rpartition(" ")[0] for each in found})


def _sentence(
    what: str, name: str, ranks: Sequence[int], values: Sequence[tuple[str, str]], made: Sequence[int]
) -> str:
    first, other = next(
        (j, k)
        for k, (part, value) in enumerate(values)
        for j in range(k)
        if values[j][0] == part and values[j][1] != value
    )
    writers = [str(rank) for rank, wrote in zip(ranks, made, strict=True) if wrote]
    where = "all ranks" if len(writers) == len(ranks) else f"rank {', '.join(writers)} alone"
    return (
        f"{name} is no longer the same on all ranks of {what}: rank {ranks[first]} has {values[first][1]}, "
        f"rank {ranks[other]} {values[other][1]}. It was written to between calls, on {where}: make the same edit on "
        "all ranks (load a file on each, draw noise from a generator with one seed, run a forward in train() mode on "
        "none), or call recover() of the step on all ranks, which gives them the state of the first"
    )


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(version_of, tensors))
    except RuntimeError:  # some were made in inference mode, and are not counted
        return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _remember_last() -> None:
    """Keep what the last call knew, for calls of other programs that use the same tensors."""
    global _purged
    if _last is not None:
        _versions.update(zip(_last._ids, zip(_last._references, _last._versions, strict=True), strict=True))
    if len(_versions) > 2 * _purged:
        for key in [key for key, (reference, _) in _versions.items() if reference() is None]:
            del _versions[key]
        _purged = max(len(_versions), _FEW)


def _known(tensor: torch.Tensor) -> int | None:
    """The version of a tensor at the end of a call; None of one that no call knew, even by a dead one's id."""
    reference, version = _versions.get(id(tensor), (None, None))
    return version if reference is not None and reference() is local_tensor(tensor) else None


_PLAIN: set[Any] = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_last: Edits | None = None  # of the program that ran last
_versions: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by id, at the end of the calls before that
_FEW = 1000
_purged = _FEW  # how many were left when the dead ones went last
