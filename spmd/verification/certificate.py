"""Certify a step: derive which function of which global values each value of the final programs is, from rules alone.

The captured program runs on symbols (``symbols.py``), once. The final programs run on them in lockstep, each rank with
the symbols of its own parts; a pending sum is named by what it sums to, and marked with its axes. What only moves
elements, moves symbols; pointwise ops are computed; any other op must be one of the captured program's, on parts for
which the op's sharding rule says what its results are. Which part is found by trying, and nothing that the partitioner
says of a node is believed. At the end each output must be the captured one's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Shard

from passes import Axis, Mesh, Program, Role
from passes.ir.collectives import Kind, c10d, group_of, is_collective, is_shared, is_wait, kind_of
from passes.ir.program import Placements
from passes.ir.schemas import argument, schema
from passes.runtime.random import draw

from .._torch import tree_flatten
from ..placements import local_runs
from ..rules import Info, OpCall, Option, R, localize_of, rule_of
from . import symbols
from .collectives import COPIES_FIRST, SEMANTICS
from .lockstep import LockstepError, Published, groups_of
from .stages import values_after
from .symbolic_ops import CapturedMachine, Machine, Unknown, call_of, tensors_of
from .wholes import part_of

Ranks = list[Any]  # the value of each rank


@dataclass(frozen=True)
class Certificate:
    """What was found; true if every output is shown to be the global output under its placement.

    ``outcome`` is ``"shown"``, ``"wrong"`` or ``"cannot show"``. Of the last two: ``what``, the output or the state,
    ``node`` and ``line``, the first node that is not shown, ``expected`` and ``derived`` or ``why``.
    """

    outcome: str
    nodes: int
    outputs: int
    what: str = ""
    node: str = ""
    line: str = ""
    expected: str = ""
    derived: str = ""
    why: str = ""

    def __bool__(self) -> bool:
        return self.outcome == "shown"

    def __str__(self) -> str:
        if self:
            return (
                f"shown: each of {self.outputs} outputs is the global output under its placement ({self.nodes} nodes)"
            )
        says = self.why or f"expected {self.expected}, derived {self.derived}"
        return f"{self.outcome}: {self.what}, at {self.node}: {says} {self.line}".rstrip()


def certify_programs(captured: Program, partitioned: Sequence[Program], final: Sequence[Program]) -> Certificate:
    """Certify the final programs of all ranks; ``partitioned`` ones declare the placements of inputs and outputs."""
    return _Certification(captured, partitioned, final).run()


@dataclass
class _InFlight:
    """A collective that was started and not yet waited for."""

    node: fx.Node
    nodes: Sequence[fx.Node]
    operands: Ranks
    before: Ranks  # copies of the operands, as they were at the start
    results: Ranks


@dataclass
class _Certification:
    captured: Program
    partitioned: Sequence[Program]
    final: Sequence[Program]
    unshown: dict[fx.Node, str] = field(default_factory=dict)
    _flying: list[_InFlight] = field(default_factory=list)

    @cached_property
    def whole(self) -> Machine:
        """The captured program, which has run on symbols."""
        machine = CapturedMachine(self.captured)
        machine.start([machine.input(declared.name, node) for declared, node in self._declared()])
        for node in self.captured.graph.nodes:
            machine.step(node)
        return machine

    def _declared(self) -> Iterator[tuple[Any, fx.Node]]:
        return zip(self.captured.inputs, self.captured.placeholders, strict=True)

    @property
    def meshes(self) -> list[Mesh]:
        return [program.mesh for program in self.final]

    def run(self) -> Certificate:
        """The outcome."""
        self.published = Published()
        self.ranks = [Machine(program) for program in self.final]
        self.inputs = [self._inputs_of(rank) for rank in range(len(self.final))]
        for machine, given in zip(self.ranks, self.inputs, strict=True):
            machine.start(given)
        lengths = {len(program.graph.nodes) for program in self.final}
        node = self.final[0].output_node
        try:
            if len(lengths) > 1:
                raise LockstepError("expected all ranks to run the same ops", node)
            for nodes in zip(*(program.graph.nodes for program in self.final), strict=True):
                node = nodes[0]
                if len({(str(each.op), str(each.target)) for each in nodes if each.op == "call_function"}) > 1:
                    raise LockstepError("expected all ranks to run the same ops", node)
                self._step(nodes)
            self.published.check_all(node)
        except LockstepError as error:
            return self._not_shown("wrong", "", error.node, why=str(error))
        return self._outputs()

    def _inputs_of(self, rank: int) -> list[Any]:
        wholes = {each.name: self.whole.env[node] for each, node in self._declared()}
        placed = {each.name: each.placement for each in self.partitioned[rank].inputs}
        for each in self.final[rank].inputs:
            wholes.setdefault(each.name, torch.tensor(symbols.key("input", each.name)))
        mesh = self.meshes[rank]

        def part(name: str) -> Any:
            whole = wholes[name]
            return part_of(whole, placed[name], mesh) if isinstance(whole, Tensor) else whole

        given = []
        for declared, node in zip(self.final[rank].inputs, self.final[rank].placeholders, strict=True):
            if declared.parts:
                parts = sorted(declared.parts, key=lambda each: each.offset)
                given.append(torch.cat([part(each.input.name).reshape(-1) for each in parts]))
            else:
                value, val = part(declared.name), node.meta.get("val")
                given.append(value.clone() if isinstance(value, Tensor) and isinstance(val, Tensor) else value)
        return given

    def _step(self, nodes: Sequence[fx.Node]) -> None:
        node = nodes[0]
        if is_collective(node):
            return self._start(nodes)
        if is_wait(node):
            self._wait([machine.env[each.args[0]] for machine, each in zip(self.ranks, nodes, strict=True)])
        unknown: dict[int, str] = {}
        for rank, (machine, each) in enumerate(zip(self.ranks, nodes, strict=True)):
            try:
                machine.step(each)
            except Unknown as error:
                unknown[rank] = str(error)
        found = self._find(nodes) if 0 in unknown else None
        for rank, why in unknown.items():
            if found is None:
                self.ranks[rank].give_unknown(nodes[rank])
                self.unshown.setdefault(node, why)
            else:
                self.ranks[rank].give(nodes[rank], self._results(rank, *found))

    # Ops by their rules.

    def _find(self, nodes: Sequence[fx.Node]) -> tuple[fx.Node, list[Option]] | None:
        """The captured node of which these compute the parts, and the options of its rule by which they do."""
        ours = [machine.operands(each) for machine, each in zip(self.ranks, nodes, strict=True)]
        if not all(bool(self.whole.knows(symbols.pieces(x)[0]).all()) for x in ours[0]):
            return None  # they are parts of nothing that the captured program has
        candidates = self.whole.by_op.get(call_of(nodes[0])[0], [])
        hint = nodes[0].meta.get("captured")  # which to try first: nothing more
        for candidate in sorted(candidates, key=lambda each: each.name != hint):
            for options in self._options([_rule_call(candidate)], 0):
                if all(self._holds(rank, node, ours[rank], candidate, options) for rank, node in enumerate(nodes)):
                    return candidate, options
        return None

    def _options(self, calls: list[OpCall], index: int) -> Iterator[list[Option]]:
        """Options for the axes from ``index`` on that are right for parts of every length: ``calls`` has one each."""
        mesh = self.meshes[0]
        if index == len(mesh.axes):
            yield []
            return
        calls = [replace(call, size=mesh.axes[index].size) for call in calls]
        of_each = [_options_of(call) for call in calls]
        for option in of_each[0]:
            if all(any(_same(option, other) for other in others) for others in of_each[1:]):
                narrower = [
                    _narrowed(call, option, replace(mesh.axes[index], coordinate=k))
                    for call in calls
                    for k in range(mesh.axes[index].size)
                ]
                for rest in self._options([c for k, c in enumerate(narrower) if c not in narrower[:k]], index + 1):
                    yield [option, *rest]

    def _holds(self, rank: int, node: fx.Node, ours: list[Tensor], candidate: fx.Node, options: list[Option]) -> bool:
        """Whether the operands of ``node`` on a rank are the parts of the candidate's that the options speak of."""
        theirs = self.whole.operands(candidate)
        if len(theirs) != len(ours):
            return False
        for k, (whole, own) in enumerate(zip(theirs, ours, strict=True)):
            part = self._part(rank, whole, tuple(option.operands[k] for option in options))
            if part.shape != own.shape or not _equal(part, own):
                return False
        call, args = _rule_call(candidate), None
        results = [tuple(option.results[k] for option in options) for k in range(len(call.results))]
        if self.whole.draws(candidate) and not self._draws_part(rank, node, candidate, results[0]):
            return False
        localize = localize_of(call.target)
        if localize is not None:
            shapes = tuple(
                None if info is None else tuple(_part_shape(info.shape, placed, self.meshes[rank]))
                for info, placed in zip(call.results, results, strict=True)
            )
            args = localize(call, call.args, call.kwargs, shapes)
        return self.whole.settings(candidate, args) == self.ranks[rank].settings(node)

    def _draws_part(self, rank: int, node: fx.Node, candidate: fx.Node, placed: Placements) -> bool:
        """Whether a rank draws its own part of what the candidate draws: the same number, and the part's region."""
        if node.target is not draw or candidate.meta.get("draw") != node.args[2]:
            return False
        seeds = [
            i.role is Role.SEED
            for i, p in zip(self.final[rank].inputs, self.final[rank].placeholders, strict=True)
            if p is node.args[1]
        ]
        val = candidate.meta["val"]
        shape = (val[0] if isinstance(val, (list, tuple)) else val).shape
        return seeds == [True] and tuple(map(tuple, node.args[3])) == local_runs(shape, placed, self.meshes[rank])

    def _results(self, rank: int, candidate: fx.Node, options: list[Option]) -> list[Any]:
        values = self.whole.env[candidate]
        given = []
        for k, value in enumerate(values if isinstance(values, (list, tuple)) else [values]):
            placed = tuple(option.results[k] for option in options)
            given.append(None if value is None or None in placed else self._part(rank, value, placed))
        return given

    def _part(self, rank: int, whole: Tensor, placed: Placements) -> Tensor:
        part = part_of(whole, placed, self.meshes[rank]).clone()
        bits = sum(1 << axis for axis, entry in enumerate(placed) if isinstance(entry, Partial))
        symbols.pieces(part)[1].bitwise_or_(bits)
        return part

    # Collectives.

    def _start(self, nodes: Sequence[fx.Node]) -> None:
        node = nodes[0]
        name = schema(node.target).arguments[0].name
        pairs = list(zip(self.ranks, nodes, strict=True))
        operands = [machine.value(argument(each, name)) for machine, each in pairs]
        outs = [machine.value(argument(each, "out")) for machine, each in pairs]
        if node.target is c10d.all_reduce_.default:
            outs = operands
        results = [
            out if out is not None else machine.fresh(each) for (machine, each), out in zip(pairs, outs, strict=True)
        ]
        if is_shared(node):
            self.published.start(node, [part for x in operands for part in symbols.pieces(x)])
        before = [[x.clone() for x in tensors_of(value)] for value in operands]
        late = is_shared(node) and outs[0] is not None
        for machine, into, read in zip(self.ranks, results, operands, strict=True):
            if not late and (node.target in COPIES_FIRST or not _overlap(tensors_of(into), tensors_of(read))):
                machine.poison(tensors_of(into))
        self._flying.append(_InFlight(node, nodes, operands, before, results))
        for (machine, each), result in zip(pairs, results, strict=True):
            machine.env[each] = result

    def _wait(self, values: Ranks) -> None:
        for each in list(self._flying):
            if any(x is values[0] for x in tensors_of(each.results[0])):
                self._flying.remove(each)
                self._finish(each)

    def _finish(self, flying: _InFlight) -> None:
        node, ok = flying.node, True
        if node.target not in COPIES_FIRST:
            for now, then in zip(flying.operands, flying.before, strict=True):
                ok = ok and all(_equal(x, y) for x, y in zip(tensors_of(now), then, strict=True))
        if not ok:
            raise LockstepError(f"the operand of {node} is overwritten before the collective is waited for", node)
        is_list = isinstance(flying.operands[0], (list, tuple))
        for members in groups_of(self.final, group_of(node), node):
            operands = [flying.before[rank] if is_list else flying.before[rank][0] for rank in members]
            given = [self._arguments(flying.nodes[rank], members) for rank in members]
            if kind_of(node) in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST):
                self._check_complete(node, operands)
            computed = SEMANTICS[node.target](operands, given)
            for rank, result in zip(members, computed, strict=True):
                for into, new in zip(tensors_of(flying.results[rank]), tensors_of(result), strict=True):
                    self.ranks[rank].write(into, new.reshape(into.shape), flying.nodes[rank])
        self.published.wait(node)

    def _axis(self, node: fx.Node) -> int:
        axis = self.meshes[0].axis_of_group(group_of(node))
        names = [each.name for each in self.meshes[0].axes]
        return names.index(axis.name) if axis is not None and axis.name in names else -1

    def _check_complete(self, node: fx.Node, operands: Ranks) -> None:
        """Parts of a sum that is pending over an axis cannot be exchanged along it."""
        bit = 1 << max(self._axis(node), 0)
        if any(bool((symbols.pieces(x)[1] & bit).any()) for value in operands for x in tensors_of(value)):
            raise LockstepError(f"{node} exchanges parts of a sum that is still pending over its axis", node)

    def _arguments(self, node: fx.Node, members: list[int]) -> dict[str, Any]:
        given = {each.name: argument(node, each.name) for each in schema(node.target).arguments}
        if "reduce_op" in given:
            reduction, axis = str(given["reduce_op"]), self._axis(node)
            given["reduce_op"] = lambda operands: self._total(node, operands, reduction, axis)
        return given

    def _total(self, node: fx.Node, operands: Sequence[Tensor], reduction: str, axis: int) -> Tensor:
        """What reducing gives: a pending sum is complete; values that all ranks have are summed as often."""
        if axis < 0 or reduction not in ("sum", "avg"):
            self.unshown.setdefault(node, f"it reduces by {reduction!r}")
            return self.ranks[0].unknown(operands[0].shape)
        if not all(_equal(operands[0], other) for other in operands[1:]):
            self.unshown.setdefault(node, "the ranks sum values of which it is not known what the sum is")
            return self.ranks[0].unknown(operands[0].shape)
        found, masks = symbols.pieces(operands[0])
        ranks = torch.tensor(symbols.number(len(operands)))
        pending = (masks & (1 << axis)).bool()
        summed, averaged = symbols.times(found, ranks), symbols.over(found, ranks)
        complete = torch.where(pending, found, summed) if reduction == "sum" else torch.where(pending, averaged, found)
        return symbols.elements(complete, masks & ~(1 << axis))

    # The end.

    def _outputs(self) -> Certificate:
        expected = values_after(self.captured, self._captured_inputs(), self.whole.returned)
        placed = {each.name: each.placement for each in (*self.partitioned[0].inputs, *self.partitioned[0].outputs)}
        after = [
            values_after(program, given, machine.returned)
            for program, given, machine in zip(self.final, self.inputs, self.ranks, strict=True)
        ]
        count = 0
        for name, value in expected.items():
            if not isinstance(value, Tensor) or value.dtype != torch.complex128:
                continue
            count += 1
            for rank, values in enumerate(after):
                part, own = self._part(rank, value, placed[name]), values[name]
                if part.shape != own.shape or not _equal(part, own):
                    return self._mismatch(name, own, placed[name])
        return Certificate("shown", len(self.final[0].graph.nodes), count)

    def _captured_inputs(self) -> list[Any]:
        return [self.whole.env[node] for node in self.captured.placeholders]

    def _mismatch(self, name: str, own: Tensor, placed: Placements) -> Certificate:
        """Wrong if what was derived is known to be something else; else it cannot be shown."""
        expected = f"{name} under {' '.join(map(str, placed))}"
        found, masks = symbols.pieces(own)
        known = self.whole.knows(found)
        if bool(known.all()):
            axes = [axis.name for k, axis in enumerate(self.meshes[0].axes) if bool((masks >> k & 1).any())]
            derived = (
                f"a sum that is pending over {', '.join(axes)}" if axes else "another value of the captured program"
            )
            return self._not_shown("wrong", name, self._culprit(), expected=expected, derived=derived)
        if self.ranks[0].is_poisoned(found):
            return self._not_shown("wrong", name, self._culprit(), expected=expected, derived="memory without a value")
        node = next(iter(self.unshown), None) or self._culprit()
        why = self.unshown.get(node, "it is no value of the captured program")
        return self._not_shown("cannot show", name, node, why=why)

    def _culprit(self) -> fx.Node:
        """The first node that computes what the captured program does not, of operands that it has."""
        strange: set[fx.Node] = set()
        for node in self.final[0].graph.nodes:
            value = self.ranks[0].first.get(node)
            if value is not None and not bool(self.whole.knows(value).all()):
                strange.add(node)
                if not strange.intersection(node.all_input_nodes):
                    return node
        return self.final[0].output_node

    def _not_shown(self, outcome: str, what: str, node: fx.Node, **found: str) -> Certificate:
        line, count = str(node.meta.get("source", "")), len(self.final[0].graph.nodes)
        return Certificate(outcome, count, len(self.captured.outputs), what, str(node), line, **found)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of elements are the same: symbols and masks."""
    return all(torch.equal(x, y) for x, y in zip(symbols.pieces(one), symbols.pieces(other), strict=True))


def _overlap(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    spans = [[(x.data_ptr(), x.data_ptr() + _extent(x)) for x in of if x.numel()] for of in (some, others)]
    return any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


def _extent(x: Tensor) -> int:
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _is_known(entry: Any) -> bool:
    return not isinstance(entry, Partial) or entry.reduce_op == "sum"


def _part_shape(shape: Sequence[int], placed: Placements, mesh: Mesh) -> torch.Size:
    return part_of(torch.empty(tuple(shape), device="meta"), placed, mesh).shape


def _rule_call(node: fx.Node) -> OpCall:
    """A captured call as rules want it."""
    vals = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: _info(each.meta.get("val")))
    args, kwargs = vals
    results = node.meta["val"]
    results = results if isinstance(results, (list, tuple)) else [results]
    operands = tuple(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Info))
    return OpCall(node.target, args, kwargs, operands, tuple(_info(each, none=True) for each in results), 1)


def _info(val: Any, none: bool = False) -> Any:
    return Info(tuple(val.shape), val.dtype) if isinstance(val, Tensor) else (None if none else val)


def _options_of(call: OpCall) -> list[Option]:
    rule = rule_of(call.target)
    whole = Option(tuple(R for _ in call.operands), tuple(None if r is None else R for r in call.results))
    found = [whole, *(rule(call) if rule is not None else [])]
    plain = [option for option in found if option.local is None and not option.from_zero]
    return [option for option in plain if all(map(_is_known, (*option.operands, *option.results)))]


def _same(one: Option, other: Option) -> bool:
    return (one.operands, one.results) == (other.operands, other.results)


def _narrowed(call: OpCall, option: Option, axis: Axis) -> OpCall:
    """The call on the part that an option leaves a rank: what the axes behind divide."""
    first = Mesh((axis,))

    def part(info: Any, placed: Any) -> Any:
        return None if info is None else replace(info, shape=tuple(_part_shape(info.shape, (placed,), first)))

    operands = tuple(map(part, call.operands, option.operands))
    results = tuple(map(part, call.results, option.results))
    left = iter(operands)
    args, kwargs = _map_infos((call.args, call.kwargs), lambda: next(left))
    localize = localize_of(call.target)
    if localize is not None:
        args = localize(call, args, kwargs, tuple(None if each is None else each.shape for each in results))
    split = any(isinstance(entry, Shard) for entry in option.operands)
    return replace(call, args=args, kwargs=kwargs, operands=operands, results=results, of_parts=call.of_parts or split)


def _map_infos(tree: Any, take: Callable[[], Any]) -> Any:
    if isinstance(tree, Info):
        return take()
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_infos(each, take) for each in tree)
    return {name: _map_infos(each, take) for name, each in tree.items()} if isinstance(tree, dict) else tree
