"""Peak memory of a program whose backward computes values again, by the lives of its values, without rewriting it.

What ``Recompute`` would make is run on a clock: each node of the graph is a tick, and so is each op that runs again,
before the node that reads it first. As in a final program, values whose ops write into given memory share an arena that
stays, and others are allocated beside it: the most of both counts. State is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from ..analysis.aliases import escaping
from ..analysis.out_variants import out_variant
from ..ir.ops import Trait, has
from ..ir.program import Program
from ..ir.roles import Phase
from .pieces import Pieces, origin_of
from .recomputable import Recomputable


@dataclass(frozen=True)
class Lives:
    """The memory use of a program under some recomputation.

    ``peak``: the most bytes. ``again``: the ops that run twice. ``idle``: by op of forward, the bytes of it that wait
    for backward while most is in use.
    """

    peak: int
    again: tuple[fx.Node, ...]
    idle: dict[fx.Node, int]


@dataclass(eq=False)
class _Value:
    """A piece of memory with its first and last tick, and the last one in forward and the first one after it."""

    size: int
    planned: bool  # whether it can lie in an arena
    first: int
    last: int
    until: int = 0
    since: int = 0


class RecomputedLives:
    """The values of one program on one device; ``found``: what it can compute again."""

    def __init__(self, program: Program, device: torch.device, found: Recomputable) -> None:
        self.found, self.nodes = found, list(program.graph.nodes)
        pieces = Pieces(program.graph)
        self.returned = escaping(program.graph, pieces.found)
        self.made: dict[fx.Node, list[tuple[fx.Node, int]]] = {}  # by op: its pieces, and their bytes
        for piece in pieces.all:
            if not piece.is_state and piece.space.device == device:
                self.made.setdefault(origin_of(piece.node), []).append((piece.node, piece.size))
        self.read = {
            node: tuple({piece: None for operand in node.all_input_nodes for piece in pieces.found[operand]})
            for node in self.nodes
        }
        self.origin = {piece: origin_of(piece) for each in self.read.values() for piece in each}
        self.later = {node for node in self.nodes if node.meta.get("phase") in (Phase.BACKWARD, Phase.UPDATE)}
        planned = (each for op, made in self.made.items() if out_variant(op) is not None for each in made)
        self.planned = {piece: size for piece, size in planned if piece not in self.returned}
        self.over = {piece: over for node in self.made for piece, over in self._over(node)}

    def without(self, dropped: Iterable[fx.Node], offloaded: Iterable[fx.Node] = ()) -> Lives:
        """The lives if forward keeps the results of ``dropped`` no longer than it reads them.

        Those of ``offloaded`` neither: they come back from memory that does not count.
        """
        return _Clock(self, {*dropped, *offloaded}, set(offloaded)).run()

    def _over(self, node: fx.Node) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
        """By piece of a kernel's that may be written over operands: the pieces of those."""
        if has(node.target, Trait.POINTWISE_KERNEL):
            for piece, size in self.made[node]:
                if piece in self.planned:
                    yield piece, [each for each in self.read[node] if self.planned.get(each) == size]


class _Clock:
    """One run of a program, with some results dropped after forward."""

    def __init__(self, lives: RecomputedLives, dropped: set[fx.Node], offloaded: set[fx.Node]) -> None:
        self._lives, self._dropped, self._offloaded = lives, dropped, offloaded
        self._now = 0
        self._values: dict[fx.Node, _Value] = {}  # by piece
        self._repeated: dict[fx.Node, _Value] = {}
        self._again: dict[fx.Node, None] = {}
        self._gone: dict[fx.Node, bool] = {}
        self._pairs: list[tuple[_Value, _Value]] = []  # a result, and an operand that it may be written over

    def run(self) -> Lives:
        """Run all nodes, and look at what lives when."""
        for node in self._lives.nodes:
            later = node in self._lives.later
            if later:
                self._provide(node)
            self._step(node, self._values, later)
        for piece in self._lives.returned & self._values.keys():
            self._values[piece].last = self._now
        for result, operand in self._pairs:
            if operand.last == result.first < result.last:
                result.first += 1
        return self._summary()

    def _provide(self, node: fx.Node) -> None:
        """Run again what a node lacks, operands first; without recursion: chains are long."""
        pending = self._lacking(node)
        while pending:
            op = pending[-1]
            lacking = [] if op in self._offloaded else self._lacking(op)
            pending += lacking
            if not lacking:
                pending.pop()
                if op not in self._again:
                    self._again[op] = None
                    self._step(op, self._repeated, later=True)

    def _lacking(self, node: fx.Node) -> list[fx.Node]:
        """The ops whose results a node reads after forward, gone and not made again."""
        origins = (self._lives.origin[piece] for piece in self._lives.read[node])
        return [op for op in origins if op not in self._again and self._is_gone(op)]

    def _is_gone(self, op: fx.Node) -> bool:
        if op not in self._gone:
            self._gone[op] = self._lives.found.is_gone(op, self._dropped)
        return self._gone[op]

    def _step(self, node: fx.Node, made: dict[fx.Node, _Value], later: bool) -> None:
        """One tick: read operands, make results."""
        self._now += 1
        comes_back = made is self._repeated and node in self._offloaded
        for piece in () if comes_back else self._lives.read[node]:
            if (value := self._value(piece, later)) is not None:
                value.last = self._now
                if not later:
                    value.until = self._now
                elif not value.since:
                    value.since = self._now
        for piece, size in self._lives.made.get(node, ()):
            value = made[piece] = _Value(size, piece in self._lives.planned, self._now, self._now, self._now)
            for operand in () if comes_back else self._lives.over.get(piece, ()):
                if (read := self._value(operand, later)) is not None:
                    self._pairs.append((value, read))

    def _value(self, piece: fx.Node, later: bool) -> _Value | None:
        """The value that readers of a piece get: the one that forward made, or the recomputed one."""
        if later and self._is_gone(self._lives.origin[piece]):
            return self._repeated.get(piece)
        return self._values.get(piece)

    def _summary(self) -> Lives:
        values = [*self._values.values(), *self._repeated.values()]
        most = [_most([value for value in values if value.planned == planned], self._now) for planned in (True, False)]
        at = {planned: tick for planned, (_, tick) in zip((True, False), most, strict=True)}
        idle: dict[fx.Node, int] = {}
        for op in self._lives.found.kept:
            waiting = (self._values[piece] for piece, _ in self._lives.made.get(op, ()))
            idle[op] = sum(value.size for value in waiting if value.until < at[value.planned] < value.since)
        again = tuple(op for op in self._again if op not in self._offloaded)
        return Lives(sum(size for size, _ in most), again, idle)


def _most(values: list[_Value], end: int) -> tuple[int, int]:
    """The most bytes that live at once, and the first tick at which they do."""
    changes = [0] * (end + 2)
    for value in values:
        changes[value.first] += value.size
        changes[value.last + 1] -= value.size
    used = list(accumulate(changes))
    size = max(used)
    return size, used.index(size)
