"""Routes: which tensors say where rows go, and which values should be computed on the rows of a rank's experts alone.

A product of weights that are split by expert reads rows sorted by expert, and where each expert's rows end; or weights
are looked up by the expert of each row. Rows that a product reads, and all that is computed row by row for them, up to
where they are taken from the tokens, have a hint: a rank's own rows: so that tokens are brought to the ranks of their
experts once, before anything is computed for each expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, AxisRole, Mesh, Program
from passes.ir.ops import Trait, has
from passes.ir.program import Placements
from passes.ir.schemas import name_of

from ...placements import ByGroup, Dealt, Interleaved, OwnOrder
from ...rules import Option, rule_of
from ..values import Value, call_of, leaves
from .axis import EXPERTS_AXIS
from .own_order import own_orders, splits_tokens
from .products import ends_of, is_grouped, rows_of
from .recomputed import originals
from .weights import weights_of

_LOOKUPS = {"index", "index_select"}
_SAME = {"detach", "alias", "_to_copy", "clone", "view", "_unsafe_view", "transpose", "permute", "unsqueeze", "squeeze"}
_PUT_BACK = {"index", "index_add", "index_put", "index_select", "scatter_add"}


@dataclass(frozen=True)
class Routes:
    """The routes of a program. ``groups``: by the node that says whose rows are whose; ``hints``: by node.

    ``returns``: the placements of what rows are put back into, that of tokens.
    ``numbered``: how many experts a node has the numbers of, by which weights are looked up where these lie.
    ``of_weights``: how the gradient of these lies along the axis of experts, and the summands that it is added up from.
    ``order``: the nodes, those that ``groups`` need before those that have hints. ``own``: how nodes compute with rows
    that each rank sorts by itself, along the axes that split tokens.
    """

    order: Sequence[fx.Node]
    groups: Mapping[fx.Node, ByGroup] = field(default_factory=dict)
    hints: Mapping[fx.Node, Placements] = field(default_factory=dict)
    returns: Mapping[fx.Node, Placements] = field(default_factory=dict)
    own: Mapping[fx.Node, Option] = field(default_factory=dict)
    numbered: Mapping[fx.Node, int] = field(default_factory=dict)
    of_weights: Mapping[fx.Node, Placement] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, experts: frozenset[str]) -> Routes:
        """The routes to ``experts``, the parameters that are split by expert."""
        order = list(program.graph.nodes)
        first = originals(order)
        sorted_apart = own_orders(order, program.mesh, first)
        if not experts:
            return cls(order, own=sorted_apart)
        declared = zip(program.placeholders, program.inputs, strict=True)
        weights = weights_of(order, {node: each.name for node, each in declared if each.name in experts})
        looked_up = dict(_looked_up(order, weights))
        in_turn = any(axis.size > 1 and not axis.at_once for axis in program.mesh.axes)
        groups, rows = dict[fx.Node, ByGroup](), dict[fx.Node, ByGroup]()
        parts = prod(axis.size for axis in program.mesh.axes if splits_tokens(axis))
        for node in order:
            apart = parts if node in sorted_apart else 1
            for of, own, operands in _routed(node, weights, groups, program.room, apart, first):
                if in_turn and not own.ends and node not in sorted_apart:
                    continue  # a micro-batch has some of the rows
                groups.setdefault(of, own)
                rows |= {operand: own.along(dim) for operand, dim in operands}
        groups |= {node: groups[original] for node, original in first.items() if original in groups}
        hints = dict[fx.Node, ByGroup]()
        for node, own in rows.items():
            _hint(node, own, hints, program.mesh)
        order = _others_first(_needed_first(order, hints), hints)
        position = {node.name: k for k, node in enumerate(order)}
        known = {node: own for node, own in hints.items() if position[own.of] < position[node.name]}
        returns = dict.fromkeys(_put_back(order, rows | hints), _of_tokens(program.mesh))
        placed = {node: _placement(own, program.mesh, sorted_apart.get(node)) for node, own in known.items()}
        of_weights = dict(_gradients(order, looked_up, groups))
        return cls(order, groups, placed, returns, sorted_apart, looked_up, of_weights)

    def back_among_tokens(self, node: fx.Node, value: Value, mesh: Mesh) -> Placements | None:
        """The placement of tokens, for a sum over the ranks of experts that has the tokens of a micro-batch in runs."""
        pending = [k for k in mesh.axes_with(EXPERTS_AXIS) if isinstance(value.primary[k], Partial)]
        if node not in self.own or not pending or not any(isinstance(p, Interleaved) for p in value.primary):
            return None
        return tuple(Shard(0) if k in pending or isinstance(p, Interleaved) else p for k, p in enumerate(value.primary))


Routed = tuple[fx.Node, ByGroup, list[tuple[fx.Node, int]]]


def _routed(
    node: fx.Node,
    weights: Collection[fx.Node],
    groups: Mapping[fx.Node, ByGroup],
    room: float | None,
    parts: int,
    first: Mapping[fx.Node, fx.Node],
) -> Iterator[Routed]:
    """The node that says whose rows ``node`` reads, and those rows with their dims; of ``parts``, each sorted apart.

    ``first``: the originals of recomputed nodes; where both say whose rows are whose, all rows are those of the first.
    """
    name = name_of(node.target) if node.op == "call_function" else ""
    if is_grouped(node):
        ends, rows = first.get(ends_of(node), ends_of(node)), rows_of(node)
        count = next((len(x.meta["val"]) for x in _args(node)[:2] if x in weights), None)
        known = groups.get(ends)
        if known is None and count != ends.meta["val"].shape[0]:  # weights seen as other groups are no experts
            return
        size = rows[0][0].meta["val"].shape[rows[0][1]] // parts
        yield ends, known or ByGroup(0, ends.name, count or 0, ends=True, rows=size, room=room), rows
    elif name == "index":
        for whose, count in _looked_up([node], weights):
            if whose.meta["val"].ndim == 1:
                whose = first.get(whose, whose)
                own = ByGroup(0, whose.name, count, ends=False, rows=len(whose.meta["val"]) // parts)
                yield whose, own, [(node, 0)]


def _looked_up(order: Iterable[fx.Node], weights: Collection[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    """The nodes by whose numbers weights are looked up, with the number of experts."""
    for node in order:
        name, args = name_of(node.target) if node.op == "call_function" else "", _args(node)
        if name not in _LOOKUPS or args[0] not in weights:
            continue
        numbers, *others = args[1] if name == "index" else [args[2]]
        if isinstance(numbers, fx.Node) and not any(others) and (name == "index" or args[1] == 0):
            val = numbers.meta["val"]
            if not val.is_floating_point() and val.dtype not in (torch.bool, torch.uint8):
                yield numbers, len(args[0].meta["val"])


def _gradients(
    order: Iterable[fx.Node], numbered: Mapping[fx.Node, int], groups: Collection[fx.Node]
) -> Iterator[tuple[fx.Node, Placement]]:
    """The nodes that add up gradients of weights by number, each rank those of its own; and all summands, whole.

    A rank computes the summands of all rows that it has the weights of: those of other rows would have to be sent.
    ``groups``: the numbers of rows that go to the ranks of their experts.
    """
    for node in order:
        name, args = name_of(node.target) if node.op == "call_function" else "", _args(node)
        if name == "index_put" and args[3:] == (True,):
            numbers, *others = args[1]
            summand = args[2]
            if numbers in groups:
                continue
        elif name == "index_add" and args[1] == 0:
            (numbers, summand), others = args[2:4], []
        else:
            continue
        if any(others) or numbered.get(numbers) != len(node.meta["val"]) or not has(args[0].target, Trait.ZEROS):
            continue
        yield node, Shard(0)
        while isinstance(summand, fx.Node) and summand.op == "call_function":
            yield summand, Replicate()
            summand = _args(summand)[0] if name_of(summand.target) in _SAME else None


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _hint(node: fx.Node, own: ByGroup, hints: dict[fx.Node, ByGroup], mesh: Mesh) -> None:
    """Hint at own rows for ``node``, and for its operands where their rows are those of the result."""
    if node in hints or node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return
    hints[node] = own
    rule = rule_of(node.target)
    operands = [leaf for leaf in leaves(node) if isinstance(leaf.meta.get("val"), torch.Tensor)]
    (axis, *_) = (mesh.axes[k] for k in mesh.axes_with(EXPERTS_AXIS))
    for option in rule(call_of(node, axis.size)) if rule is not None else []:
        if option.results[0] == Shard(own.dim) and option.local is None:
            for operand, placement in zip(operands, option.operands, strict=True):
                if type(placement) is Shard and operand.meta["val"].is_floating_point():
                    _hint(operand, own.along(placement.dim), hints, mesh)
            return


def _needed_first(order: Sequence[fx.Node], hints: Mapping[fx.Node, ByGroup]) -> list[fx.Node]:
    """``order``, with what groups need before what has a hint, where that does not need the latter."""
    by_name, done = {node.name: node for node in order}, dict[fx.Node, None]()
    for node in order:
        pending = [by_name[hints[node].of]] if node in hints else []
        while pending:
            missing = [each for each in pending[-1].all_input_nodes if each not in done]
            if missing:
                pending += missing
            else:
                done.setdefault(pending.pop())
        done.setdefault(node)
    return list(done)


def _others_first(order: Sequence[fx.Node], hints: Mapping[fx.Node, ByGroup]) -> list[fx.Node]:
    """``order``, with what does not need the rows of a layer's experts before their dispatch: work to hide it.

    That is a shared expert, which most models call behind the others.
    """
    ordered, waiting = list[fx.Node](), dict[fx.Node, None]()
    layer: tuple[str, Any] | None = None
    for node in order:
        phase = node.meta.get("phase")
        if node in hints and (hints[node].of, phase) != layer:
            ordered += waiting
            waiting, layer = {node: None}, (hints[node].of, phase)
        elif layer is None or (phase == layer[1] and not any(each in waiting for each in node.all_input_nodes)):
            ordered.append(node)
        else:
            waiting[node] = None
    return [*ordered, *waiting]


def _put_back(order: Sequence[fx.Node], rows: Mapping[fx.Node, ByGroup]) -> Iterator[fx.Node]:
    """The nodes that put rows of experts back among tokens; ``rows``: those that products read, and whose they are."""
    own = dict(rows)
    for node in order:
        val = node.meta.get("val")
        val = val[0] if isinstance(val, (list, tuple)) and val else val
        found = next((own[leaf] for leaf in node.all_input_nodes if leaf in own), None)
        if found is None or node in own or not isinstance(val, torch.Tensor) or not val.ndim:
            continue
        if name_of(node.target) not in _PUT_BACK:
            own |= {node: found} if len(val) == found.rows else {}
        elif len(val) != found.count:  # nor added up by expert
            yield node


def _of_tokens(mesh: Mesh) -> Placements:
    """Split along the batch; not along sequences, whose rows may lie in runs."""
    splits = (AxisRole.BATCH in axis.roles and axis.at_once for axis in mesh.axes)
    return tuple(Shard(0) if split else Replicate() for split in splits)


def _placement(own: ByGroup, mesh: Mesh, sorted_apart: Option | None) -> Placements:
    """Own rows over the axis of experts; over axes that split tokens, those of a rank, or dealt out evenly."""

    def along(axis: Axis) -> Any:
        if EXPERTS_AXIS in axis.roles:
            return own
        if sorted_apart is not None and splits_tokens(axis):
            return OwnOrder(own.dim)
        deals = {AxisRole.BATCH, AxisRole.SEQUENCE} & set(axis.roles) and axis.at_once
        return Dealt(own.dim) if deals else Replicate()

    return tuple(along(axis) if axis.size > 1 else Replicate() for axis in mesh.axes)
