"""The engine under nearly every rule: dims with letters, as in einsum, and from them the options of a call.

In comes a ``Dims``: one letter per dim for each operand (by the name of the argument) and each result. Dims with the
same letter run over the same rows, so splitting all of them at once is right; a letter that a result lacks was summed
over, or the result does not depend on it; a dot is a dim that the op needs whole. Out come ``Option``s. A rule is then
a line, "mk,kn->mn", and what is right about it is argued here once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..placements import rows
from .base import Info, OpCall, Option, P, R, parameters

Labels = str | Sequence[str]
"""One character per dim; for an argument that is a list of tensors, one such string per tensor."""

WHOLE = "."
EQUAL = "="
"""In the place of a result's labels: this result is the same on all ranks, whatever is split."""

PARTIALS = (P, Partial("max"), Partial("min"))


@dataclass(frozen=True)
class Dims:
    """Which dims of a call belong together, and which operands may be partial.

    - ``operands``, ``results``: labels by argument name (an operand left out is needed whole), and per result.
    - ``reduced``: letters summed over: a result that lacks one is ``reduced_as`` when it is split.
    - ``same``: letters on which a result that lacks them does not depend.
    - ``even``: letters whose dims must split evenly ("*": all), because a short or empty shard is not understood.
    - ``grouped``: letters whose dims may differ in size, a row of the smaller with a run of rows of the larger.
    - ``broadcast``: a dim of size 1 stands for all rows of its letter, and is then replicated.
    - ``onto``: an operand that the op adds the rest to: where the result is partial, it must be partial too.
    - ``linear``: sets of operands; the results are sums over ranks if exactly one such set is.
    - ``moves``: operands whose elements are the results' elements, unchanged: any kind of partial passes through.
    """

    operands: Mapping[str, Labels]
    results: str | tuple[str, ...]
    reduced: str = ""
    reduced_as: Placement = field(default=P)
    same: str = ""
    even: str = ""
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
    """``dim`` counted from the front; a tensor without dims counts as one with one, as in torch."""
    return dim % max(ndim, 1)


def without(labels: str, *dims: int) -> str:
    """``labels`` with ``dims`` needed whole."""
    return "".join(WHOLE if d in dims else c for d, c in enumerate(labels))


def aligned(info: Info, labels: str) -> str:
    """The last of ``labels``, as many as ``info`` has dims: how broadcasting lines tensors up."""
    return labels[len(labels) - info.ndim :]


def options(call: OpCall, dims: Dims) -> list[Option]:
    """Every split of a letter that is right, and every partial operand that passes through."""
    splits = (split(call, dims, letter) for letter in dims.letters())
    found = [option for option in splits if option is not None]
    found += [option for plain in found for option in in_runs(call, plain)]
    found += [option for names in dims.linear for option in partial(call, names, P)]
    return found + [option for kind in PARTIALS if dims.moves for option in partial(call, dims.moves, kind)]


def split(call: OpCall, dims: Dims, letter: str) -> Option | None:
    """All dims called ``letter`` split over the ranks, or None where that is not right."""
    results = _result_labels(call, dims)
    sizes = _sizes(call, dims, results, letter)
    needs_even = dims.even == "*" or letter in dims.even
    if not sizes or (needs_even and not all(call.even(size) for size in sizes)):
        return None
    placed = [
        _place_result(dims, labels, info, letter, sizes) for labels, info in zip(results, call.results, strict=True)
    ]
    if any(p is None for p, info in zip(placed, call.results, strict=True) if info is not None):
        return None
    operands = {name: _place_operand(call, name, labels, letter, sizes) for name, labels in dims.operands.items()}
    if dims.onto and dims.reduced_as in placed:
        operands[dims.onto] = dims.reduced_as
    return option(call, operands, placed)


def in_runs(call: OpCall, plain: Option) -> list[Option]:
    """``plain``, which splits one letter, with its rows in runs as an operand has them.

    All dims of a letter run over the same rows, so it does not matter which rows a rank has, if all its operands have
    the same ones. Not where dims of one letter differ in size: then their rows lie in other runs.
    """
    found: dict[int, Option] = {}
    for placement, held, info in zip(plain.operands, call.interleaved, call.operands, strict=bool(call.interleaved)):
        for runs in held:
            if placement == Shard(runs.dim) and _sizes_split(call, plain) == {info.shape[runs.dim]}:
                found.setdefault(runs.outer, _with_runs(plain, runs.outer))
    return list(found.values())


def _sizes_split(call: OpCall, plain: Option) -> set[int]:
    """The sizes of all dims that an option splits."""
    placed = zip((*plain.operands, *plain.results), (*call.operands, *call.results), strict=True)
    return {info.shape[p.dim] for p, info in placed if isinstance(p, Shard) and info is not None}


def _with_runs(plain: Option, outer: int) -> Option:
    def lifted(placement: Any) -> Any:
        return rows(placement.dim, outer) if isinstance(placement, Shard) else placement

    return Option(tuple(map(lifted, plain.operands)), tuple(map(lifted, plain.results)))


def partial(call: OpCall, names: Sequence[str], kind: Partial) -> list[Option]:
    """``names`` all partial gives partial results, unless one is no tensor or a result's dtype would lose bits."""
    given = [list(infos(call.arg(name))) for name in names]
    present = [info for info in call.results if info is not None]
    if not all(given) or not present:
        return []
    if not all(widens(i.dtype, result.dtype) for operand in given for i in operand for result in present):
        return []
    return [option(call, dict.fromkeys(names, kind), kind)]


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every number of ``source`` is one of ``target``: summing before or after the conversion is the same."""
    return (
        source != torch.bool
        and torch.promote_types(source, target) == target
        and (source == target or source.is_floating_point or source.is_complex)
    )


def is_zero(value: Any) -> bool:
    """Whether ``value`` is the number zero, known now: a symbolic number may be zero in this call alone."""
    return type(value) in (int, float, bool) and value == 0


def grows(call: OpCall, names: Sequence[str]) -> bool:
    """Whether the results have more elements than any of ``names``: reducing later would then move more bytes."""
    before = max((prod(i.shape) for name in names for i in infos(call.arg(name))), default=0)
    return any(prod(info.shape) > before for info in call.results if info is not None)


def option(
    call: OpCall,
    operands: Mapping[str, Placement | Sequence[Placement]],
    results: Placement | Sequence[Placement | None],
) -> Option:
    """An ``Option`` from placements by argument name; operands not named are replicated."""
    placed = tuple(p for name, value in arguments(call) for p in _spread(value, operands.get(name, R)))
    given: Sequence[Any] = results if isinstance(results, (list, tuple)) else [results] * len(call.results)
    return Option(placed, tuple(None if info is None else p for p, info in zip(given, call.results, strict=True)))


def arguments(call: OpCall) -> Iterator[tuple[str, Any]]:
    """The arguments that the call gives, with their names, in the order of its operands."""
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
    # Asking whether something is a Placement is slow; whether it is a list is not.
    if isinstance(placement, (list, tuple)):
        for item, one in zip(value, placement, strict=True):
            yield from _spread(item, one)
    elif isinstance(value, Info):
        yield placement  # type: ignore[misc]
    else:
        yield from (placement for _ in infos(value))  # type: ignore[misc]


def _result_labels(call: OpCall, dims: Dims) -> list[str]:
    """One string per result; a lone string in ``Dims`` goes for all of them."""
    return [dims.results] * len(call.results) if isinstance(dims.results, str) else list(dims.results)


def _sizes(call: OpCall, dims: Dims, results: Sequence[str], letter: str) -> set[int]:
    """How many rows ``letter`` has (several counts if they are grouped), or nothing where its dims disagree."""
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
    """Every operand and result that is there, with its labels."""
    for name, labels in dims.operands.items():
        yield from _pairs(call.arg(name), labels)
    for one, info in zip(results, call.results, strict=True):
        if info is not None and one != EQUAL:
            yield one, info


def _pairs(value: Any, labels: Labels) -> Iterator[tuple[str, Info]]:
    """Labels with the tensor they stand for; arguments that are absent have none."""
    if isinstance(value, Info):
        assert isinstance(labels, str)
        yield labels, value
    elif isinstance(value, (list, tuple)):
        each = [labels] * len(value) if isinstance(labels, str) else labels
        yield from ((one, item) for one, item in zip(each, value, strict=True) if isinstance(item, Info))


def _place_operand(
    call: OpCall, name: str, labels: Labels, letter: str, sizes: set[int]
) -> Placement | Sequence[Placement]:
    value = call.arg(name)
    if isinstance(value, Info):
        assert isinstance(labels, str)
        return _place(labels, value, letter, sizes)
    if not isinstance(value, (list, tuple)):
        return R
    each = [labels] * len(value) if isinstance(labels, str) else labels
    return [
        _place(one, item, letter, sizes) if isinstance(item, Info) else R for one, item in zip(each, value, strict=True)
    ]


def _place(labels: str, info: Info, letter: str, sizes: set[int]) -> Placement:
    where = labels.find(letter)
    return Shard(where) if where >= 0 and info.shape[where] in sizes else Replicate()


def _place_result(dims: Dims, labels: str, info: Info | None, letter: str, sizes: set[int]) -> Placement | None:
    """The placement of one result, or None where splitting ``letter`` would make it wrong."""
    if info is None or labels == EQUAL or (letter in dims.same and letter not in labels):
        return R
    if letter in labels:
        return Shard(labels.index(letter)) if info.shape[labels.index(letter)] in sizes else None
    return dims.reduced_as if letter in dims.reduced else None
