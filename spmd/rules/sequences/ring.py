"""Attention to keys that pass around a ring: a rank has those of one rank at a time, and passes them on.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. What a rank's queries do not
see is not computed.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from passes import Kind

from ...placements import chunk
from ..base import Info, OpCall, Parts, Run, Sent
from ..einsum_labels import arguments
from .kernels import NEVER, SAVED, Kernel, Keys, added, fewest, grad_of, padded

aten = torch.ops.aten


def ring(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Attention of a rank's rows to the keys of one rank after the other."""
    kernel, blocks = Kernel(run, call, args), Blocks.of(run, call, parts)
    query, *passing = kernel.operands("query", "key", "value")
    found: tuple[Any, Any] | None = None
    for step in range(run.size):
        held, passing = passing, blocks.passed(passing, step) if step < run.size - 1 else []
        part = kernel.forward(blocks.of_queries(query, step), blocks.keys(held, step))
        found = part if found is None else kernel.merged(found, blocks.with_all_queries(part, step))
    assert found is not None
    return kernel.results(*found)


def ring_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradients of a rank's rows; those of keys follow the keys, and come home at the end."""
    kernel, blocks = Kernel(run, call, args), Blocks.of(run, call, parts)
    grad, query, *passing, out, logsumexp = kernel.operands(grad_of(call), *SAVED)
    sums: list[Any] = []
    following: list[Any] = []
    for step in range(run.size):
        held, passing = passing, blocks.passed(passing, step) if step < run.size - 1 else []
        grads, queries, outs, of_rows = (blocks.of_queries(x, step) for x in (grad, query, out, logsumexp))
        of_query, *of_keys = kernel.backward(grads, queries, blocks.keys(held, step), outs, of_rows)
        if step == 0:
            sums = [of_query, *of_keys]
            continue
        of_keys = of_keys[:2]
        sums[0] = run(aten.add.Tensor, (sums[0], blocks.with_all_rows(of_query, step)))
        of_keys = [blocks.with_all_keys(each, step) for each in of_keys]
        following = added(run, following, of_keys) if following else of_keys
        following = blocks.passed(following, step)
    return sums[0], *added(run, sums[1:3], following), *sums[3:]


def ring_sends(call: OpCall, parts: Parts, results: Parts) -> list[Sent]:
    """The keys and values that a rank passes on, one rank's after the other."""
    blocks = Blocks.of(None, call, parts)
    return [blocks.sent(step) for step in range(call.size - 1)]


def ring_backward_sends(call: OpCall, parts: Parts, results: Parts) -> list[Sent]:
    """Keys and values, and the gradients that follow them."""
    blocks = Blocks.of(None, call, parts)
    steps = [(step < call.size - 1, step > 0) for step in range(call.size)]
    return [blocks.sent(step) for step, each in enumerate(steps) for sends in each if sends]


class Blocks(NamedTuple):
    """The rows of keys that each rank has at first, in order; at each step a rank holds those of the rank before."""

    run: Any
    call: OpCall
    rank: int
    lengths: list[int]
    shapes: list[tuple[int, ...]]  # of this rank's key and value
    mirrored: bool

    @classmethod
    def of(cls, run: Run | None, call: OpCall, parts: Parts) -> Blocks:
        """The blocks of a call whose keys are split; ``parts``: of its operands."""
        tensors = [name for name, value in arguments(call) if isinstance(value, Info)]
        held = [part for name, part in zip(tensors, parts, strict=True) if name in ("key", "value") and part]
        ranks = run.size if run is not None else call.size
        rows = [chunk(call.arg("key").shape[2], ranks, k) for k in range(ranks)]
        by_start = (k for k, (start, _) in enumerate(rows) if start == held[0].start[2])
        rank = run.rank if run is not None else next(by_start)
        return cls(run, call, rank, [n for _, n in rows], [part.shape for part in held], held[0].mirrored)

    def owner(self, step: int) -> int:
        """The rank whose rows this rank holds at a step."""
        return (self.rank - step) % len(self.lengths)

    def seen(self, step: int) -> tuple[int, int, bool | None]:
        """(first row of the queries that see keys of this step, number of keys that they see, whether some do).

        Of mirrored rows, all queries see the early keys of ranks before, and late queries all keys of ranks behind.
        """
        owner, rows = self.owner(step), self.lengths[self.owner(step)]
        if step == 0 or not self.call.arg("is_causal"):
            return 0, rows, None
        if self.mirrored:
            return (0, rows // 2, None) if owner < self.rank else (rows // 2, rows, None)
        return (0, rows, True) if owner < self.rank else (0, fewest(self.call, rows), False)

    def is_cut(self, step: int) -> bool:
        """Whether some rank computes a step with a part of its queries or keys."""
        return step > 0 and bool(self.call.arg("is_causal"))

    def of_queries(self, tensor: Any, step: int) -> Any:
        """The rows of the queries that see keys of this step."""
        if not (self.is_cut(step) and self.mirrored):
            return tensor
        return self.run.rows(tensor, 2, self.seen(step)[0], self.lengths[0], f"queries of step {step}")

    def keys(self, held: Any, step: int) -> Keys:
        """The keys of a step that queries see."""
        (key, value), name = held, f"keys of step {step}"
        if not self.is_cut(step):
            return Keys(key, value, name, causal=bool(self.call.arg("is_causal")))
        _, rows, seen = self.seen(step)
        return Keys(self.run.rows(key, 2, 0, rows, name), self.run.rows(value, 2, 0, rows, name), name, seen=seen)

    def with_all_keys(self, grad: Any, step: int) -> Any:
        """The gradient of all keys of a step, from that of those that were computed with."""
        after = self.lengths[self.owner(step)] - self.seen(step)[1]
        return padded(self.run, grad, 0, after) if self.is_cut(step) else grad

    def with_all_rows(self, grad: Any, step: int) -> Any:
        """The gradient of all queries, from that of those that see keys of this step."""
        cut = self.is_cut(step) and self.mirrored
        return padded(self.run, grad, self.seen(step)[0], 0) if cut else grad

    def with_all_queries(self, part: tuple[Any, Any], step: int) -> tuple[Any, Any]:
        """An output and log-sum-exp with all rows: those without keys weigh nothing."""
        if not (self.is_cut(step) and self.mirrored):
            return part
        before = self.seen(step)[0]
        return self.with_all_rows(part[0], step), self.run(aten.constant_pad_nd.default, (part[1], [before, 0], -NEVER))

    def shapes_of(self, owner: int) -> list[list[int]]:
        """The shapes of a rank's key and value."""
        return [[*shape[:2], self.lengths[owner], *shape[3:]] for shape in self.shapes]

    def elements(self, owner: int) -> int:
        """The elements of a rank's key and value together."""
        return sum(map(prod, self.shapes_of(owner)))

    def sent(self, step: int) -> Sent:
        """What a rank passes on after a step."""
        return Sent(Kind.ALL_TO_ALL, self.elements(self.owner(step)) * self.call.arg("key").dtype.itemsize)

    def passed(self, pair: Any, step: int) -> list[Any]:
        """What this rank receives from the rank before it, for the pair that it passes on after a step."""
        run, ranks = self.run, range(len(self.lengths))
        owner, received = self.owner(step), self.owner(step + 1)
        only = str(self.call.target)  # backward passes keys around again, instead of keeping what forward had
        flat = run(aten.cat.default, ([run(aten.reshape.default, (x, [-1]), numbers=only) for x in pair],))
        to_next = [self.elements(owner) * (k == (self.rank + 1) % len(ranks)) for k in ranks]
        from_previous = [self.elements(received) * (k == (self.rank - 1) % len(ranks)) for k in ranks]
        flat = run.all_to_all(flat, from_previous, to_next)
        found, start = [], 0
        for shape in self.shapes_of(received):
            end = start + prod(shape)
            found.append(run(aten.view.default, (run(aten.slice.Tensor, (flat, 0, start, end)), shape)))
            start = end
        return found
