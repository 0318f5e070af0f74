"""Derive the options of a call from einsum labels, as nearly every rule does.

In comes a ``Dims``: one letter per dim for each operand (by the name of the argument) and each result. Dims with the
same letter have the same rows, so splitting all of them at once is correct; a letter that a result lacks was summed
over, or the result does not depend on it; a dot is a dim that the op needs whole. Out come ``Option``s. A rule is then
one line, "mk,kn->mn", and its correctness follows from this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..placements import Interleaved, OwnRows, same_rows
from .base import Info, Local, OpCall, Option, P, Parts, R, Run, parameters

Labels = str | Sequence[str]
"""One character per dim; for an argument that is a list of tensors, one such string per tensor."""

WHOLE = "."
EQUAL = "="
"""Instead of a result's labels: the result is equal on all ranks, whatever is split."""

PARTIALS = (P, Partial("max"), Partial("min"))


@dataclass(frozen=True)
class Dims:
    """The dims of a call that are split together, and the operands that may be partial.

    - ``operands``, ``results``: labels by argument name (an operand left out is needed whole), and per result.
    - ``reduced``: letters summed over: a result that lacks one is ``reduced_as`` when it is split.
    - ``same``: letters on which a result that lacks them does not depend.
    - ``even``: letters whose dims must split evenly.
    - ``filled``: letters of whose dims no rank may be left without any ("*": all), since kernels reject empty tensors.
    - ``grouped``: letters whose dims may differ in size, a row of the smaller with a run of rows of the larger.
    - ``broadcast``: a dim of size 1 stands for all rows of its letter, and is then replicated.
    - ``onto``: an operand to which the op adds: where the result is partial, it must be partial too.
    - ``linear``: sets of operands; if exactly the operands of one set are partial sums, so are the results.
    - ``moves``: operands whose elements the results have unchanged: any kind of partial passes through.
    """

    operands: Mapping[str, Labels]
    results: str | tuple[str, ...]
    reduced: str = ""
    reduced_as: Placement = field(default=P)
    same: str = ""
    even: str = ""
    filled: str = ""
    grouped: str = ""
    broadcast: bool = False
    onto: str = ""
    linear: tuple[tuple[str, ...], ...] = ()
    moves: tuple[str, ...] = ()

    def letters(self) -> str:
        """Each letter once, in the order of operands and results."""
        every = [labels for _, labels in self._all()]
        return "".join(dict.fromkeys(c for labels in every for c in labels if c not in (WHOLE, EQUAL)))

    def _all(self) -> Iterator[tuple[str, str]]:
        for name, labels in self.operands.items():
            for one in [labels] if isinstance(labels, str) else labels:
                yield name, one
        for one in [self.results] if isinstance(self.results, str) else self.results:
            yield "", one


def letters(count: int, start: int = 0) -> str:
    """``count`` distinct labels, from the ``start``-th on."""
    return ascii_letters[start : start + count]


def wrap(dim: int, ndim: int) -> int:
    """``dim`` counted from the front; a 0-dim tensor is treated as 1-D, as in torch."""
    return dim % max(ndim, 1)


def without(labels: str, *dims: int) -> str:
    """``labels``, with ``dims`` marked as needed whole."""
    return "".join(WHOLE if d in dims else c for d, c in enumerate(labels))


def aligned(info: Info, labels: str) -> str:
    """The last ``info.ndim`` of ``labels``, as broadcasting aligns dims."""
    return labels[len(labels) - info.ndim :]


_READ: ContextVar[list[Dims] | None] = ContextVar("dims that rules read", default=None)


@contextmanager
def dims_read() -> Iterator[list[Dims]]:
    """The ``Dims`` by which rules that are called meanwhile divide their calls: the letters that a table shows."""
    found: list[Dims] = []
    token = _READ.set(found)
    try:
        yield found
    finally:
        _READ.reset(token)


def options(call: OpCall, dims: Dims) -> list[Option]:
    """Every correct split of a letter, and every partial operand that passes through."""
    read = _READ.get()
    if read is not None:
        read.append(dims)
    splits = (split(call, dims, letter) for letter in dims.letters())
    found = [option for option in splits if option is not None]
    found += [option for plain in found for option in (*in_runs(call, plain), *on_own_rows(call, plain, dims))]
    found += [option for names in dims.linear for option in partial(call, names, P)]
    return found + [option for kind in PARTIALS if dims.moves for option in partial(call, dims.moves, kind)]


def split(call: OpCall, dims: Dims, letter: str) -> Option | None:
    """The option that splits all dims called ``letter``, or None if that is not correct."""
    results = _result_labels(call, dims)
    sizes = _sizes(call, dims, results, letter)
    if not sizes or (letter in dims.even and not all(call.even(size) for size in sizes)):
        return None
    if (dims.filled == "*" or letter in dims.filled) and not all(call.fills(size) for size in sizes):
        return None
    placements = [
        _of_result(dims, labels, info, letter, sizes) for labels, info in zip(results, call.results, strict=True)
    ]
    if any(p is None for p, info in zip(placements, call.results, strict=True) if info is not None):
        return None
    operands = {name: _of_operand(call, name, labels, letter, sizes) for name, labels in dims.operands.items()}
    if dims.onto and dims.reduced_as in placements:
        operands[dims.onto] = dims.reduced_as
    return option(call, operands, placements)


def in_runs(call: OpCall, plain: Option) -> list[Option]:
    """``plain``, which splits one letter, with its rows in runs as in the operands.

    All dims of a letter have the same rows, so a rank may have any of them, if it has the same ones of each operand.
    Not where dims of one letter differ in size: their runs differ, too.
    """
    if not any(call.interleaved):
        return []
    found: dict[Shard, Option] = {}
    sizes = _sizes_split(call, plain)
    for placement, held, info in zip(plain.operands, call.interleaved, call.operands, strict=True):
        for runs in held:
            key = same_rows(runs, 0, runs.outer)
            if key not in found and placement == Shard(runs.dim) and sizes == {info.shape[runs.dim]}:
                found[key] = _with_runs(plain, runs)
    return list(found.values())


def _sizes_split(call: OpCall, plain: Option) -> set[int]:
    """The sizes of all dims that an option splits."""
    placed = zip((*plain.operands, *plain.results), (*call.operands, *call.results), strict=True)
    return {info.shape[p.dim] for p, info in placed if isinstance(p, Shard) and info is not None}


def _with_runs(plain: Option, runs: Interleaved) -> Option:
    def lifted(placement: Any) -> Any:
        return same_rows(runs, placement.dim, runs.outer) if isinstance(placement, Shard) else placement

    return Option(tuple(map(lifted, plain.operands)), tuple(map(lifted, plain.results)))


def on_own_rows(call: OpCall, plain: Option, dims: Dims) -> list[Option]:
    """``plain``, which splits one letter, with rows that each have one owner, as in the operands or as is hinted.

    Where the op sums over rows, what lies behind a rank's own is set to zero: so it must be linear in such an operand.
    """
    if not any(call.owned) and call.hinted is None:
        return []
    kinds = dict[OwnRows, None]()
    for placement, held in zip(plain.operands, call.owned, strict=True):
        kinds |= {kind.along(0): None for kind in held if placement == Shard(kind.dim)}
    if call.hinted is not None and plain.results[0] == Shard(call.hinted.dim):
        kinds[call.hinted.along(0)] = None
    sums = any(isinstance(p, Partial) for p in plain.results)
    others = any(isinstance(p, Partial) and p != P for p in plain.results)
    if sums and (others or call.kwargs or not _zero_adds_nothing(call, plain, dims)):
        return []
    if len(_sizes_split(call, plain)) != 1 or torch.Tag.nondeterministic_seeded in call.target.tags:
        return []
    return [_with_own_rows(plain, kind, _summed if sums else None) for kind in kinds]


def _zero_adds_nothing(call: OpCall, plain: Option, dims: Dims) -> bool:
    """Whether rows of zeros, in the operands that ``plain`` splits, add nothing to the result."""
    names = [name for name, value in arguments(call) for _ in infos(value)]
    split = {name for name, p in zip(names, plain.operands, strict=True) if isinstance(p, Shard)}
    return any({*linear} - {dims.onto} <= split for linear in dims.linear)


def _with_own_rows(plain: Option, kind: OwnRows, local: Local | None) -> Option:
    def lifted(placement: Any) -> Any:
        return kind.along(placement.dim) if isinstance(placement, Shard) else placement

    return Option(tuple(map(lifted, plain.operands)), tuple(map(lifted, plain.results)), local=local)


def _summed(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The op, on operands with zeros behind a rank's own rows."""
    positions = count()
    return run(
        call.target, tuple(_only_own(run, arg, given, positions) for arg, given in zip(args, call.args, strict=True))
    )


def _only_own(run: Run, arg: Any, given: Any, positions: Iterator[int]) -> Any:
    if isinstance(given, Info):
        return run.only_own(arg, next(positions))
    if isinstance(given, (list, tuple)):
        return [_only_own(run, each, info, positions) for each, info in zip(arg, given, strict=True)]
    return arg


def partial(call: OpCall, names: Sequence[str], kind: Partial) -> list[Option]:
    """The option with ``names`` and results partial, unless one is no tensor or a result's dtype would lose bits."""
    given = [list(infos(call.arg(name))) for name in names]
    present = [info for info in call.results if info is not None]
    if not all(given) or not present:
        return []
    if not all(widens(i.dtype, result.dtype) for operand in given for i in operand for result in present):
        return []
    return [option(call, dict.fromkeys(names, kind), kind)]


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``target`` represents every number of ``source``, so that conversion and summation commute."""
    if source == target or source == torch.bool:
        return source == target != torch.bool
    if not (source.is_floating_point or source.is_complex) or source.is_complex > target.is_complex:
        return False
    if not (target.is_floating_point or target.is_complex):
        return False
    held, wide = torch.finfo(source), torch.finfo(target)
    return wide.eps <= held.eps and wide.max >= held.max and wide.smallest_normal <= held.smallest_normal


def is_zero(value: Any) -> bool:
    """Whether ``value`` is a plain zero; a symbolic number may be zero in this call only."""
    return type(value) in (int, float, bool) and value == 0


def grows(call: OpCall, names: Sequence[str]) -> bool:
    """Whether the results have more elements than each of ``names``, so that reducing later would move more bytes."""
    before = max((prod(i.shape) for name in names for i in infos(call.arg(name))), default=0)
    return any(prod(info.shape) > before for info in call.results if info is not None)


def option(
    call: OpCall,
    operands: Mapping[str, Placement | Sequence[Placement]],
    results: Placement | Sequence[Placement | None],
) -> Option:
    """An ``Option`` from placements by argument name; operands not named are replicated."""
    placements = tuple(p for name, value in arguments(call) for p in _spread(value, operands.get(name, R)))
    given: Sequence[Any] = results if isinstance(results, (list, tuple)) else [results] * len(call.results)
    return Option(placements, tuple(None if info is None else p for p, info in zip(given, call.results, strict=True)))


def arguments(call: OpCall) -> Iterator[tuple[str, Any]]:
    """The names and values of the call's arguments, in the order of its operands."""
    yield from zip(parameters(call.target), call.args, strict=False)
    yield from call.kwargs.items()


def infos(value: Any) -> Iterator[Info]:
    """The tensors in one argument."""
    if isinstance(value, Info):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from infos(item)


def _spread(value: Any, placement: Placement | Sequence[Placement]) -> Iterator[Placement]:
    # isinstance is slow for Placement, and fast for list and tuple.
    if isinstance(placement, (list, tuple)):
        for item, one in zip(value, placement, strict=True):
            yield from _spread(item, one)
    elif isinstance(value, Info):
        yield placement  # type: ignore[misc]
    else:
        yield from (placement for _ in infos(value))  # type: ignore[misc]


def _result_labels(call: OpCall, dims: Dims) -> list[str]:
    """One string per result; a single string in ``Dims`` is for all of them."""
    return [dims.results] * len(call.results) if isinstance(dims.results, str) else list(dims.results)


def _sizes(call: OpCall, dims: Dims, results: Sequence[str], letter: str) -> set[int]:
    """The size of the dims called ``letter`` (several sizes if grouped), or nothing if they disagree."""
    sizes = set[int]()
    for labels, info in _labelled(call, dims, results):
        assert len(labels) == info.ndim, f"{call.target}: labels {labels!r} for a tensor of shape {info.shape}"
        sizes |= {info.shape[d] for d, c in enumerate(labels) if c == letter}
    if dims.broadcast and len(sizes) > 1:
        sizes -= {1}
    if letter in dims.grouped and len(sizes) > 1:
        return sizes if all(call.even(size) for size in sizes) else set()
    return sizes if len(sizes) == 1 else set()


def _labelled(call: OpCall, dims: Dims, results: Sequence[str]) -> Iterator[tuple[str, Info]]:
    """Every operand and result that is present, with its labels."""
    for name, labels in dims.operands.items():
        yield from _pairs(call.arg(name), labels)
    for one, info in zip(results, call.results, strict=True):
        if info is not None and one != EQUAL:
            yield one, info


def _pairs(value: Any, labels: Labels) -> Iterator[tuple[str, Info]]:
    """The tensors of one argument with their labels; nothing for an absent argument."""
    if isinstance(value, Info):
        assert isinstance(labels, str)
        yield labels, value
    elif isinstance(value, (list, tuple)):
        each = [labels] * len(value) if isinstance(labels, str) else labels
        yield from ((one, item) for one, item in zip(each, value, strict=True) if isinstance(item, Info))


def _of_operand(
    call: OpCall, name: str, labels: Labels, letter: str, sizes: set[int]
) -> Placement | Sequence[Placement]:
    """The placements of one argument's tensors where ``letter`` is split."""
    value = call.arg(name)
    if isinstance(value, Info):
        assert isinstance(labels, str)
        return _of_tensor(labels, value, letter, sizes)
    if not isinstance(value, (list, tuple)):
        return R
    each = [labels] * len(value) if isinstance(labels, str) else labels
    pairs = zip(each, value, strict=True)
    return [_of_tensor(one, item, letter, sizes) if isinstance(item, Info) else R for one, item in pairs]


def _of_tensor(labels: str, info: Info, letter: str, sizes: set[int]) -> Placement:
    dim = labels.find(letter)
    return Shard(dim) if dim >= 0 and info.shape[dim] in sizes else Replicate()


def _of_result(dims: Dims, labels: str, info: Info | None, letter: str, sizes: set[int]) -> Placement | None:
    """The placement of one result, or None if splitting ``letter`` would make it wrong."""
    if info is None or labels == EQUAL or (letter in dims.same and letter not in labels):
        return R
    if letter in labels:
        return Shard(labels.index(letter)) if info.shape[labels.index(letter)] in sizes else None
    return dims.reduced_as if letter in dims.reduced else None
