"""Match calls of the final programs to those of the captured one that they are parts of, by their sharding rules.

Found by trying: every call of the same op, every option of its rule along every axis. It is one if the operands of all
ranks are the parts that the option speaks of; then the results are the parts that it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Shard

from passes import Axis, Mesh, PartitionError, Program, Role
from passes.runtime.random import draw

from .._torch import tree_flatten
from ..placements import Interleaved, Mirrored, local_runs
from ..rules import Info, OpCall, Option, R, localize_of, rule_of
from ..rules.reductions import EXTREMES
from . import symbols
from .machine import CapturedMachine, Machine
from .symbolic_ops import call_of
from .symbols import number
from .wholes import part_of

aten = torch.ops.aten
Placed = tuple[Any, ...]  # a placement for each axis


@dataclass(frozen=True)
class Renamed:
    """Another op that computes the same: the ``op`` of the captured program, and what of its call is changed."""

    op: Any
    operands: Callable[..., list[Tensor]]
    results: Callable[[Tensor], Tensor]
    settings: list[Any]


RENAMED = {
    aten.index_select.default: Renamed(
        aten.embedding.default, lambda table, rows: [table, rows.reshape(-1)], lambda x: x.flatten(0, -2), [number(0)]
    )
}
"""By the op of the final programs: rows of a table are selected by an op that has an out variant."""


@dataclass(frozen=True)
class Found:
    """A captured call, the option of its rule along each axis, and how the ranks' call differs from it."""

    node: fx.Node
    options: list[Option]
    renamed: Renamed | None = None


@dataclass(frozen=True)
class PartsByRule:
    """The captured program, and the programs of some ranks."""

    captured: CapturedMachine
    ranks: Sequence[Machine]

    def may_be(self, own: Tensor) -> bool:
        """Whether all elements are of captured values, or equal addends of them: that is all it takes to look."""
        sizes = [axis.size for axis in self.ranks[0].mesh.axes]
        counts = {prod(some) for n in range(len(sizes) + 1) for some in combinations(sizes, n)}
        found = symbols.pieces(own)[0]
        return any(bool(self.captured.has(symbols.times(found, torch.tensor(number(n)))).all()) for n in counts)

    def find(self, nodes: Sequence[fx.Node], ours: Sequence[Sequence[Tensor]]) -> Found | None:
        """The call of which the ranks' ``nodes``, with these operands, compute the parts."""
        for found in islice(self._candidates(nodes[0]), _MOST):
            if all(self._holds(*each, found) for each in zip(self.ranks, nodes, ours, strict=True)):
                return found
        return None

    def _candidates(self, node: fx.Node) -> Iterator[Found]:
        """Each captured call of the op of a rank's ``node``, with each way to divide it."""
        op = call_of(node)[0]
        hint = node.meta.get("captured")  # which to try first: nothing more
        names = (None, RENAMED[op]) if op in RENAMED else (None,)
        for in_runs, renamed in product((False, True), names):
            candidates = self.captured.by_op.get(op if renamed is None else renamed.op, [])
            for candidate in sorted(candidates, key=lambda each: each.name != hint):
                for options in self._options([rule_call(candidate, in_runs)], 0):
                    yield Found(candidate, options, renamed)

    def results(self, rank: Machine, found: Found) -> list[Any]:
        """A rank's parts of the results."""
        values = self.captured.env[found.node]
        given = []
        for k, value in enumerate(values if isinstance(values, (list, tuple)) else [values]):
            placed = tuple(option.results[k] for option in found.options)
            is_tensor = isinstance(value, Tensor) and value.dtype == torch.complex128
            own = part(value, placed, rank.mesh) if is_tensor and None not in placed else value
            given.append(found.renamed.results(own) if found.renamed else own)
        return given

    def _options(self, calls: list[OpCall], index: int) -> Iterator[list[Option]]:
        """Options for the axes from ``index`` on that are right for parts of every length: ``calls`` has one each."""
        mesh = self.ranks[0].mesh
        if index == len(mesh.axes):
            yield []
            return
        axis = mesh.axes[index]
        calls = [_along(call, axis.size) for call in calls]
        of_each = [_options_of(call) for call in calls]
        for option in of_each[0]:
            if all(any(_same(option, other) for other in others) for others in of_each[1:]):
                narrower: list[OpCall] = []
                for call in calls:
                    for k in {0, 1, axis.size - 1} & set(range(axis.size)) if axis.size > _FEW else range(axis.size):
                        one = _narrowed(call, option, replace(axis, coordinate=k))
                        narrower += [] if one in narrower else [one]
                for rest in self._options(narrower, index + 1):
                    yield [option, *rest]

    def _holds(self, rank: Machine, node: fx.Node, ours: Sequence[Tensor], found: Found) -> bool:
        """Whether the operands of ``node`` on a rank are the parts of the found call's that the options speak of."""
        candidate, options, mesh = found.node, found.options, rank.mesh
        theirs = [
            part(whole, tuple(option.operands[k] for option in options), mesh)
            for k, whole in enumerate(self.captured.operands(candidate))
        ]
        if found.renamed:
            theirs = found.renamed.operands(*theirs)
        if len(theirs) != len(ours) or not all(
            is_part(own, each, mesh) for own, each in zip(ours, theirs, strict=True)
        ):
            return False
        call, args = rule_call(candidate), None
        results = [tuple(option.results[k] for option in options) for k in range(len(call.results))]
        if self.captured.draws(candidate) and not _draws_part(rank, node, candidate, results[0]):
            return False
        localize = localize_of(call.target)
        if localize is not None:
            shapes = tuple(
                None if info is None else tuple(_part_shape(info.shape, placed, mesh))
                for info, placed in zip(call.results, results, strict=True)
            )
            args = localize(call, call.args, call.kwargs, shapes)
        settings = found.renamed.settings if found.renamed else self.captured.settings(candidate, args)
        return settings == rank.settings(node)


_FEW = 16  # ranks along an axis, of which all are looked at
_MOST = 4_096  # ways to divide a call that are tried: of three axes and runs of rows there are millions


def part(whole: Tensor, placed: Placed, mesh: Mesh) -> Tensor:
    """A rank's part of the elements of a captured value, marked with what is still to be reduced."""
    own = part_of(whole, placed, mesh).clone()
    for k, (entry, axis) in enumerate(zip(placed, mesh.axes, strict=False)):
        if isinstance(entry, Partial) and axis.size > 1:
            found, marks = symbols.pieces(own)
            in_turn = not axis.at_once and entry.reduce_op == "sum"
            marks.bitwise_or_(symbols.pending(k, entry.reduce_op) * (found != 0 if in_turn else 1))
    return own


def is_part(own: Tensor, expected: Tensor, mesh: Mesh) -> bool:
    """Whether these are the elements that are expected; what all ranks have may stand for an addend of a sum."""
    if own.shape != expected.shape:
        return False
    pending = symbols.pieces(expected)[1] & symbols.PENDING
    if bool(pending.any()) and int(pending.max()) < 1 << symbols.AXES:
        own = symbols.as_pending(own, pending, [axis.size for axis in mesh.axes])
    return all(map(torch.equal, symbols.pieces(own), symbols.pieces(expected)))


def rule_call(node: fx.Node, in_runs: bool = False) -> OpCall:
    """A captured call as rules want it. ``in_runs``: its operands may be split in runs of rows."""
    vals = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: _info(each.meta.get("val")))
    args, kwargs = vals
    results = node.meta["val"]
    results = results if isinstance(results, (list, tuple)) else [results]
    operands = tuple(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Info))
    target: Any = node.target
    call = OpCall(target, args, kwargs, operands, tuple(_info(each, none=True) for each in results), 1)
    return replace(call, interleaved=tuple(map(_in_runs, operands))) if in_runs else call


def _along(call: OpCall, size: int) -> OpCall:
    """The call along an axis of this size, whose ranks have both parts of what is mirrored."""
    held = zip(call.operands, call.interleaved, strict=True) if call.interleaved else ()
    fits = (tuple(runs for runs in each if _is_possible(info, runs, size)) for info, each in held)
    return replace(call, size=size, interleaved=tuple(fits))


def _is_possible(info: Info, runs: Interleaved, size: int) -> bool:
    return not isinstance(runs, Mirrored) or info.shape[runs.dim] % (2 * size * runs.outer) == 0


def _in_runs(info: Info) -> tuple[Interleaved, ...]:
    sizes = [(dim, size) for dim, size in enumerate(info.shape) if size > 1]
    runs = [(dim, n) for dim, size in sizes for n in range(1, size) if size % n == 0]
    return (*(Interleaved(*each) for each in runs if each[1] > 1), *(Mirrored(*each) for each in runs))


def _draws_part(rank: Machine, node: fx.Node, candidate: fx.Node, placed: Placed) -> bool:
    """Whether a rank draws its own part of what the candidate draws: the same number, and the part's region."""
    if node.target is not draw or candidate.meta.get("draw") != node.args[2]:
        return False
    val = candidate.meta["val"]
    shape = (val[0] if isinstance(val, (list, tuple)) else val).shape
    try:
        runs = local_runs(shape, placed, rank.mesh)
    except PartitionError:  # it has no such parts
        return False
    return tuple(map(tuple, rank.value(node.args[3]))) == runs and _is_seed(rank.program, node.args[1])


def _is_seed(program: Program, value: Any) -> bool:
    """Whether a value is the seed of the call, perhaps as one of the numbers on the device."""
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    if isinstance(value, fx.Node) and value.target is torch.ops.aten.select.int and value.args[0] in inputs:
        packed, _, k = value.args
        return inputs[packed].numbers[k : k + 1] == ("seed",)  # type: ignore[index, operator]
    return value in inputs and inputs[value].role is Role.SEED


def _info(val: Any, none: bool = False) -> Any:
    return Info(tuple(val.shape), val.dtype) if isinstance(val, Tensor) else (None if none else val)


def _options_of(call: OpCall) -> list[Option]:
    rule = rule_of(call.target)
    whole = Option(tuple(R for _ in call.operands), tuple(None if r is None else R for r in call.results))
    found = [whole, *(rule(call) if rule is not None else [])]
    own = call.target in EXTREMES  # of a part that has elements, its own
    plain = [option for option in found if (option.local is None or own) and not option.from_zero]
    return [option for option in plain if all(map(_is_known, (*option.operands, *option.results)))]


def _is_known(entry: Any) -> bool:
    return not isinstance(entry, Partial) or entry.reduce_op in symbols.REDUCTIONS


def _same(one: Option, other: Option) -> bool:
    return (one.operands, one.results) == (other.operands, other.results)


def _part_shape(shape: Sequence[int], placed: Placed, mesh: Mesh) -> torch.Size:
    return part_of(torch.empty(tuple(shape), device="meta"), placed, mesh).shape


def _narrowed(call: OpCall, option: Option, axis: Axis) -> OpCall:
    """The call on the part that an option leaves a rank: what the axes behind divide."""
    first = Mesh((axis,))

    def narrowed(info: Any, placed: Any) -> Any:
        return None if info is None else replace(info, shape=tuple(_part_shape(info.shape, (placed,), first)))

    operands = tuple(map(narrowed, call.operands, option.operands))
    results = tuple(map(narrowed, call.results, option.results))
    left = iter(operands)
    args, kwargs = _map_infos((call.args, call.kwargs), lambda: next(left))
    localize = localize_of(call.target)
    if localize is not None:
        args = localize(call, args, kwargs, tuple(None if each is None else each.shape for each in results))
    split = any(isinstance(entry, Shard) for entry in option.operands)
    runs = tuple(map(_in_runs, operands)) if call.interleaved else ()
    return replace(
        call,
        args=args,
        kwargs=kwargs,
        operands=operands,
        results=results,
        interleaved=runs,
        of_parts=call.of_parts or split,
    )


def _map_infos(tree: Any, take: Callable[[], Any]) -> Any:
    if isinstance(tree, Info):
        return take()
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_infos(each, take) for each in tree)
    return {name: _map_infos(each, take) for name, each in tree.items()} if isinstance(tree, dict) else tree
