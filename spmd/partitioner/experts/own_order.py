"""Find rows that each rank may sort by itself: those that a step sorts by expert and puts back by the same order.

What experts compute for a token depends on that token alone, so the order of all rows is only a name for them: ranks
that split tokens sort their own rows, count them, and multiply them. All that reads sorted rows or their order is
looked at first: if one op needs the order of all rows, no rank sorts by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, AxisRole, Mesh
from passes.ir.ops import Trait, draws, has
from passes.ir.schemas import name_of

from ..._torch import OpOverload
from ...placements import OwnOrder
from ...rules import Option, rule_of
from ...rules.base import P, R, S
from ..values import call_of, leaves, results
from .axis import EXPERTS_AXIS
from .products import base, ends_of, is_grouped, rows_of
from .recomputed import merged

_SAME = {"detach", "alias", "_to_copy", "clone"}
_SORTS = {"sort", "argsort"}
_BLANK = {"empty_like", "zeros_like", "new_zeros", "new_empty", "zeros", "empty"}
_REPEATS = {"view", "unsqueeze", "expand"}
_INVERSE = 0


def splits_tokens(axis: Axis) -> bool:
    """Whether ranks along an axis, or its micro-batches, have other tokens, and the same experts."""
    return AxisRole.BATCH in axis.roles and EXPERTS_AXIS not in axis.roles and axis.size > 1


def own_orders(order: Sequence[fx.Node], mesh: Mesh, first: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, Option]:
    """By node that computes with rows that each rank sorts by itself: how, along each axis that splits tokens.

    ``first``: the originals of recomputed nodes, whose rows have the same order.
    """
    parts = [mesh.axes[k].size for k in mesh.axes_with(AxisRole.BATCH)]
    if not any(map(splits_tokens, mesh.axes)):
        return {}
    copies = merged(order, first)
    options = _options(dict.fromkeys(copies.values()), prod(parts))
    return {node: options[copy] for node, copy in copies.items() if copy in options}


def _options(order: Iterable[fx.Node], ranks: int) -> dict[fx.Node, Option]:
    """The options of nodes that compute with rows that each of ``ranks`` sorts by itself."""
    found, all_rows = dict[fx.Node, _Rows](), list[_Rows]()
    for node in order:
        read = list(dict.fromkeys(found[each] for each in node.all_input_nodes if each in found))
        if not read and _sorts_keys(node, ranks):
            all_rows.append(_Rows(node, ranks))
            found[node] = all_rows[-1]
        elif len(read) == 1 and read[0].is_closed:
            read[0].visit(node)
            found |= {node: read[0]} if node in read[0].placed else {}
        for each in read[1:]:
            each.is_closed = read[0].is_closed = False
    closed = (each.options for each in all_rows if each.is_closed and each.is_grouped)
    return {node: option for options in closed for node, option in options.items()}


def _sorts_keys(node: fx.Node, ranks: int) -> bool:
    """Whether a node sorts numbers of experts, of which ranks have equal parts, the least first."""
    if node.op != "call_function" or name_of(node.target) not in _SORTS:
        return False
    given, *options = _args(node)
    keys, is_up = given.meta["val"], not node.kwargs.get("descending") and True not in options
    return keys.ndim == 1 and not keys.is_floating_point() and is_up and len(keys) % ranks == 0


@dataclass(eq=False)
class _Rows:
    """The rows that one node sorts. ``placed``: what has a dim of them, by node; an op's results are a tuple.

    ``numbers``: the nodes that hold their order, with the number of rows of a token, of which they number the tokens;
    ``_INVERSE`` for those that hold where each row is. ``keys``: those that hold the sorted keys. ``is_grouped``: the
    rows of each expert are multiplied or counted.
    """

    sort: fx.Node
    ranks: int
    placed: dict[fx.Node, Any] = field(default_factory=dict)
    options: dict[fx.Node, Option] = field(default_factory=dict)
    numbers: dict[fx.Node, int] = field(default_factory=dict)
    keys: set[fx.Node] = field(default_factory=set)
    is_closed: bool = True
    is_grouped: bool = False

    def __post_init__(self) -> None:
        self.own = OwnOrder(0)
        self.given = _args(self.sort)[0]
        self.size = len(self.given.meta["val"])
        self._set(self.sort, [S(0)], *[self.own for _ in results(self.sort.meta["val"])])
        if name_of(self.sort.target) == "argsort":
            self.numbers[self.sort] = 1

    def visit(self, node: fx.Node) -> None:
        """Note how ``node``, which reads rows, is computed; or that it needs the order of all rows."""
        self.is_closed = self._is_noted(node)

    def _is_noted(self, node: fx.Node) -> bool:
        if node.target is getitem:
            return self._taken(node)
        if not isinstance(node.target, OpOverload) or draws(node.target, node.args, node.kwargs):
            return False  # what is drawn for a row depends on its position
        name = name_of(node.target)
        if is_grouped(node):
            return self._product(node)
        if any(each in self.numbers for each in node.all_input_nodes) and name not in _BLANK:
            return self._by_number(node, name)
        if name in _SAME and node.args[0] in self.keys:
            self.keys.add(node)
        if name == "scatter_add" or (name == "histc" and self._counted(node)):
            return self._counted(node)
        if name == "new_zeros":
            return self._zeros(node)
        return self._row_by_row(node)

    def _set(self, node: fx.Node, reads: Sequence[Placement], *gives: Placement | None, **known: Any) -> bool:
        """Note an option; rows of its results are looked at further on, but not those that are among tokens again."""
        self.options[node] = Option(tuple(reads), gives, **known)
        if any(isinstance(each, OwnOrder) for each in gives):
            self.placed[node] = gives[0] if isinstance(node.meta["val"], torch.Tensor) else gives
        return True

    def _taken(self, node: fx.Node) -> bool:
        source, index = _args(node)
        placement = self.placed[source][index]
        if isinstance(placement, OwnOrder):
            self.placed[node] = placement
        if source is self.sort:
            self.keys |= {node} if index == 0 else set()
            self.numbers |= {node: 1} if index == 1 else {}
        elif _args(source)[0] in self.numbers:  # their order was sorted
            self.numbers |= {node: _INVERSE} if index == 1 else {}
            return index == 1 or not node.users
        return True

    # The order

    def _by_number(self, node: fx.Node, name: str) -> bool:
        """Ops that read the order, or its inverse."""
        first = _args(node)[0]
        if first in self.numbers and len(node.all_input_nodes) == 1:
            return self._renumbered(node, name, self.numbers[first])
        operands = _by_index(node, name)
        if operands is None:
            return False
        target, index, values = operands
        of = self.numbers.get(index)
        if of is None or target in self.numbers or values in self.numbers:
            return False
        if values is None:
            return self._rows_taken(node, target, of)
        return self._rows_put(node, name, target, values, of)

    def _renumbered(self, node: fx.Node, name: str, of: int) -> bool:
        """The tokens of rows; a copy; or where rows are, by sorting their order."""
        val, divisor = node.meta["val"], node.args[1] if len(node.args) > 1 else None
        floors = name == "floor_divide" or node.kwargs.get("rounding_mode") in ("floor", "trunc")
        if name in _SORTS and of == 1 and _sorts_keys(node, self.ranks):
            self.numbers |= {node: _INVERSE} if name == "argsort" else {}
            return self._set(node, [self.own], *[self.own for _ in results(val)])
        if floors and of and type(divisor) is int and divisor > 0:
            self.numbers[node] = of * divisor
        elif (name in _SAME and not val.is_floating_point()) or (name in _REPEATS and _is_repeated(node)):
            self.numbers[node] = of
        return node in self.numbers and self._set(node, [self.own], self.own)

    def _rows_taken(self, node: fx.Node, source: fx.Node, of: int) -> bool:
        if of == _INVERSE:
            return self.placed.get(source) == self.own and self._set(node, [self.own, self.own], S(0))
        if of == 1 and _base(source) is _base(self.given):
            self.keys.add(node)
        return self._has_tokens(source, of) and self._set(node, [S(0), self.own], self.own)

    def _rows_put(self, node: fx.Node, name: str, target: fx.Node, values: fx.Node, of: int) -> bool:
        held, flags = self.placed.get(values), (*node.args, *node.kwargs.values())
        adds = name in ("index_add", "scatter_add") or True in flags
        if values.meta["val"].shape[:1] != (self.size,):
            return False
        reads = [self.own if target in self.placed else S(0), self.own]
        if of == _INVERSE:
            blank = name_of(target.target) in _BLANK
            return held is None and blank and self._set(node, [*reads, S(0)], self.own)
        if held == self.own:
            tokens = self._has_tokens(target, of) and (of == 1 or adds)
            return tokens and self._set(node, [*reads, self.own], S(0))
        if of == 1 and not adds and _counts_up(values) and name_of(target.target) in _BLANK:
            self.numbers[node] = _INVERSE
            return self._set(node, [*reads, S(0)], self.own, from_zero=(2,))
        return False

    def _has_tokens(self, node: fx.Node, each: int) -> bool:
        """Whether a node has a row for each token, or each row in the order of tokens."""
        count = len(node.meta["val"])
        return node not in self.placed and count * each == self.size and count % self.ranks == 0

    # Products and counts

    def _product(self, node: fx.Node) -> bool:
        operands, rows, ends = _tensors(node), dict(rows_of(node)), ends_of(node)
        if any(self.placed.get(each) != self.own.along(dim) for each, dim in rows.items()):
            return False
        if sum(each in self.placed for each in operands) != len(rows) or not self._ends(ends):
            return False
        self.is_grouped = True
        reads = [self.own.along(rows[x]) if x in rows else P if x is ends else R for x in operands]
        gives = [self._given(val, rows) for val in results(node.meta["val"])]
        return self._set(node, reads, *gives)

    def _given(self, val: torch.Tensor, rows: Mapping[fx.Node, int]) -> Placement:
        return P if val.ndim == 3 else self.own.along(next(dim for dim in rows.values()))

    def _ends(self, node: fx.Node) -> bool:
        """Whether ``node`` holds where the rows of each expert end; each rank has the ends of its own then."""
        chain, names = [node], list[str]()
        while node.op == "call_function" and name_of(node.target) in {*_SAME, "cumsum"}:
            names.append(name_of(node.target))
            chain.append(node := _args(node)[0])
        if names.count("cumsum") != 1 or not self._counted(node):
            return False
        self.options |= {each: Option((P,), (P,)) for each in chain[:-1]}
        return True

    def _counted(self, node: fx.Node) -> bool:
        """Whether a node counts the rows of each expert."""
        name, args = name_of(node.target) if node.op == "call_function" else "", _args(node)
        if name == "histc":
            keys, *bounds = args
            last = len(node.meta["val"]) - 1
            reads = [self.placed.get(keys, S(0))]
            by_one = bounds in ([last + 1, 0, last], [last + 1, 0, last + 1])  # in both, bin k counts the number k
            counts = by_one and self._are_keys(keys) and _is_position(_base(self.given))
        elif name == "scatter_add":  # as bincount does; it raises for numbers below zero
            zeros, _, keys, ones = args
            reads = [P, self.placed.get(keys, S(0)), self.placed.get(ones, S(0))]
            counts = has(zeros.target, Trait.ZEROS) and has(ones.target, Trait.ONES) and self._are_keys(keys)
            counts = counts and reads[1] == reads[2]
        else:
            return False
        self.options |= {node: Option(tuple(reads), (P,))} if counts else {}
        self.is_grouped |= counts
        return counts

    def _are_keys(self, node: Any) -> bool:
        """Whether a node holds the keys, sorted or not, and a rank's part of it holds those that the rank sorts."""
        is_given = _base(node) is _base(self.given) and len(node.meta["val"]) % self.ranks == 0
        return node in self.keys or is_given

    # Others

    def _zeros(self, node: fx.Node) -> bool:
        """Zeros, whatever is known of the rows that they are made beside."""
        val = node.meta["val"]
        read = (_by_index(user, name_of(user.target)) for user in node.users if user.op == "call_function")
        has_tokens = any(each is not None and each[1] in self.numbers for each in read)
        if has_tokens and (not val.ndim or len(val) % self.ranks):
            return False
        return self._set(node, [self.placed[_args(node)[0]]], S(0) if has_tokens else R)

    def _row_by_row(self, node: fx.Node) -> bool:
        """An op that gives a row for each row, or adds rows up."""
        rule, operands = rule_of(node.target), _tensors(node)
        for option in rule(call_of(node, self.ranks)) if rule is not None else ():
            reads = zip(operands, option.operands, strict=True)
            if not all(self._is_read(x, p) for x, p in reads) or option.local is not None or option.from_zero:
                continue
            if all(p in (None, P) or type(p) is Shard for p in option.results) and self._are_of_rows(node, option):
                gives = tuple(self.own.along(p.dim) if isinstance(p, Shard) else p for p in option.results)
                own = [self.placed.get(x, p) for x, p in zip(operands, option.operands, strict=True)]
                return self._set(node, own, *gives)
        return False

    def _is_read(self, node: fx.Node, placement: Placement) -> bool:
        """Whether an op may read an operand so: rows split, and anything else whole, or zeros as a sum."""
        if node in self.placed:
            return placement == S(self.placed[node].dim)
        return placement == R or (placement == P and has(node.target, Trait.ZEROS))

    def _are_of_rows(self, node: fx.Node, option: Option) -> bool:
        """Whether the split dims of all results have as many rows."""
        placed = zip(results(node.meta["val"]), option.results, strict=True)
        return all(val.shape[p.dim] == self.size for val, p in placed if isinstance(p, Shard))


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [leaf for leaf in leaves(node) if isinstance(leaf.meta.get("val"), torch.Tensor)]


def _by_index(node: fx.Node, name: str) -> tuple[Any, Any, Any] | None:
    """(what is read or written, by which numbers of rows, what is written) of an op on rows of dim 0."""
    args = _args(node)
    if name in ("index", "index_put"):
        index, *others = args[1]
        is_flat = not others and index.meta["val"].ndim == 1
        return (args[0], index, args[2] if name == "index_put" else None) if is_flat else None
    if name in ("index_select", "index_add") and args[1] == 0 and not node.kwargs:
        return args[0], args[2], args[3] if name == "index_add" else None
    if name in ("gather", "scatter_add") and args[1] == 0 and not node.kwargs and _has_repeats(args[2]):
        return args[0], args[2], args[3] if name == "scatter_add" else None
    return None


def _is_repeated(node: fx.Node) -> bool:
    """Whether a node has one number a row, or the one that its operand has in each of its columns."""
    before, after = _args(node)[0].meta["val"], node.meta["val"]
    one_each = len(after) == len(before) == before.numel()
    return one_each and (name_of(node.target) != "expand" or after.ndim == before.ndim)


def _has_repeats(index: fx.Node) -> bool:
    """Whether an index has one number for all columns of a row: it was expanded."""
    return index.meta["val"].ndim == 2 and name_of(index.target) in _REPEATS


def _counts_up(node: fx.Node) -> bool:
    """Whether a node holds 0, 1, 2, ..."""
    size = len(node.meta["val"])
    return name_of(node.target) == "arange" and node.args in ((size,), (0, size), (0, size, 1))


def _is_position(node: fx.Node) -> bool:
    """Whether a node holds positions, such as the best experts of each token: none is below zero."""
    source, *index = _args(node) or (node,)
    return node.target is getitem and name_of(source.target) in {*_SORTS, "topk"} and index == [1]


def _base(node: Any) -> Any:
    """The node that holds the same numbers, in another shape or dtype."""
    return base(node, {*_SAME, "view"})
