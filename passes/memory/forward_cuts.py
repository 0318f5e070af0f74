"""Cut forward into parts, so that backward computes it again part by part.

What runs again reads operands that may run again, too. If all results in a chain of blocks are dropped, the whole chain
runs again when backward begins, and nothing is saved. If what crosses some cuts stays kept, each part runs again when
backward comes to it (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from torch import fx

from ..ir.roles import Phase
from .recomputed_lives import RecomputedLives


class ForwardCuts:
    """The forward of one program, cut where the fewest bytes cross."""

    def __init__(self, lives: RecomputedLives) -> None:
        forward = [node for node in lives.nodes if node.meta.get("phase") is Phase.FORWARD]
        self._found, self._spans = lives.found, _spans(forward, lives)
        changes = [0] * (len(forward) + 1)
        for op, (first, last) in self._spans.items():
            size = sum(size for _, size in lives.made[op]) * (1 if op in lives.found.kept else 2)
            changes[first] += size
            changes[last] -= size
        # By position, the bytes that are made until there and read later; those that are not kept count twice, since
        # what makes them would run again as well.
        self._crossing = list(accumulate(changes))
        self._kept = list(accumulate(lives.found.kept.get(node, 0) for node in forward))

    def crossed(self, parts: int) -> frozenset[fx.Node]:
        """The ops whose kept values cross a cut, if forward is cut into ``parts`` that keep about as many bytes."""
        cuts = set(self._cuts(parts))
        spans = ((op, *self._spans[op]) for op in self._found.kept if op in self._spans)
        return frozenset(op for op, first, last in spans if any(first <= cut < last for cut in cuts))

    def _cuts(self, parts: int) -> Iterator[int]:
        """The positions after which forward is cut: around each share of the bytes, where the fewest cross."""
        total = self._kept[-1] if self._kept else 0
        for number in range(1, parts):
            near = [k for k, kept in enumerate(self._kept) if 2 * abs(kept * parts - total * number) <= total]
            if near:
                yield min(near, key=self._crossing.__getitem__)


def _spans(forward: list[fx.Node], lives: RecomputedLives) -> dict[fx.Node, tuple[int, int]]:
    """By op that makes memory, its position in forward, and that of its last reader there."""
    spans = {}
    for k, node in enumerate(forward):
        if node in lives.made:
            spans[node] = (k, k)
        for piece in lives.read[node]:
            if (op := lives.origin[piece]) in spans:
                spans[op] = (spans[op][0], k)
    return spans
