"""Attention to keys that pass around a ring: a rank has those of one rank at a time, and passes them on.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. What a rank's queries do not
see is not computed.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf, prod
from typing import Any, NamedTuple

import torch

from passes import Kind

from ...placements import chunk, mirrored_pieces
from ..base import Info, OpCall, Parts, Run, Sent
from ..einsum_labels import arguments
from .kernels import ALIGNED_TO, MASKS, NEVER, ON_CPU, SAVED, Kernel, Keys, added, band_of, fewest, grad_of, padded

aten = torch.ops.aten


def ring(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Attention of a rank's rows to the keys of one rank after the other."""
    kernel = Kernel(run, call, args)
    blocks = Blocks.of(run, call, parts, kernel.mask)
    query, *passing = kernel.operands("query", "key", "value")
    found: tuple[Any, Any] | None = None
    for step, after in pairwise([*blocks.steps, run.size]):
        held, passing = passing, blocks.passed(passing, step, after) if after < run.size else []
        keys = blocks.keys(held, step)
        part = _without_hidden(run, kernel.forward(blocks.of_queries(query, step), keys), keys.mask)
        found = part if found is None else kernel.merged(found, blocks.with_all_queries(part, step))
    assert found is not None
    return kernel.results(*found)


def ring_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradients of a rank's rows; those of keys follow the keys, and come home at the end."""
    kernel = Kernel(run, call, args)
    blocks = Blocks.of(run, call, parts, kernel.mask)
    grad, query, *passing, out, logsumexp = kernel.operands(grad_of(call), *SAVED)
    sums: list[Any] = []
    following: list[Any] = []
    for step, after in pairwise([*blocks.steps, run.size]):
        held, passing = passing, blocks.passed(passing, step, after) if after < run.size else []
        grads, queries, outs, of_rows = (blocks.of_queries(x, step) for x in (grad, query, out, logsumexp))
        of_query, *of_keys = kernel.backward(grads, queries, blocks.keys(held, step), outs, of_rows)
        if step == 0:
            sums = [of_query, *of_keys]
            continue
        of_keys = of_keys[:2]
        sums[0] = run(aten.add.Tensor, (sums[0], blocks.with_all_rows(of_query, step)))
        of_keys = [blocks.with_all_keys(each, step) for each in of_keys]
        following = added(run, following, of_keys) if following else of_keys
        following = blocks.passed(following, step, after)
    of_keys = added(run, sums[1:3], following) if following else sums[1:3]
    return sums[0], *of_keys, *sums[3:]


def _without_hidden(run: Run, part: tuple[Any, Any], mask: Any) -> tuple[Any, Any]:
    """An output and log-sum-exp where rows of which a mask hides all keys weigh nothing, whatever a kernel gives."""
    if mask is None:
        return part
    hidden = run(aten.eq.Scalar, (run(aten.amax.default, (mask, [-1])), -inf))
    out = run(aten.masked_fill.Scalar, (part[0], run(aten.unsqueeze.default, (hidden, -1)), 0.0))
    return out, run(aten.masked_fill.Scalar, (part[1], hidden, -NEVER))


def ring_sends(call: OpCall, parts: Parts, results: Parts) -> list[Sent]:
    """The keys and values that a rank passes on, one rank's after the other."""
    blocks = Blocks.of(None, call, parts)
    return [blocks.sent(step) for step in blocks.steps[:-1]]


def ring_backward_sends(call: OpCall, parts: Parts, results: Parts) -> list[Sent]:
    """Keys and values, and the gradients that follow them."""
    blocks = Blocks.of(None, call, parts)
    steps = [(step, step < blocks.steps[-1], step > 0) for step in blocks.steps]
    return [blocks.sent(step) for step, *each in steps for sends in each if sends]


def reads_masks(call: OpCall) -> bool:
    """Whether the mask of a call, if it has one, can be cut into the columns of each rank's keys."""
    masks = [mask for mask in map(call.arg, MASKS) if isinstance(mask, Info)]
    rows = call.arg("key").shape[2]
    fits = call.target in ON_CPU or rows % (ALIGNED_TO * call.size) == 0
    return all(fits and mask.dtype.is_floating_point and mask.shape[-1] == rows for mask in masks)


class Blocks(NamedTuple):
    """The rows of keys that each rank has at first, in order; at each step a rank holds those of the rank before.

    Steps at which no rank's rows may see the keys that it would hold are left out.
    """

    run: Any
    call: OpCall
    rank: int
    lengths: list[int]
    shapes: list[tuple[int, ...]]  # of this rank's key and value
    mirrored: bool
    mask: Any = None

    @classmethod
    def of(cls, run: Run | None, call: OpCall, parts: Parts, mask: Any = None) -> Blocks:
        """The blocks of a call whose keys are split; ``parts``: of its operands."""
        tensors = [name for name, value in arguments(call) if isinstance(value, Info)]
        held = [part for name, part in zip(tensors, parts, strict=True) if name in ("key", "value") and part]
        ranks = run.size if run is not None else call.size
        rows = [chunk(call.arg("key").shape[2], ranks, k) for k in range(ranks)]
        by_start = (k for k, (start, _) in enumerate(rows) if start == held[0].start[2])
        rank = run.rank if run is not None else next(by_start)
        return cls(run, call, rank, [n for _, n in rows], [part.shape for part in held], held[0].mirrored, mask)

    def owner(self, step: int) -> int:
        """The rank whose rows this rank holds at a step."""
        return (self.rank - step) % len(self.lengths)

    @property
    def steps(self) -> list[int]:
        """The steps, in order; the first one is that of each rank's own keys."""
        ranks = range(len(self.lengths))
        return [step for step in ranks if step == 0 or any(self._sees(k, (k - step) % len(ranks)) for k in ranks)]

    def _sees(self, rank: int, owner: int) -> bool:
        """Whether the mask may let rows of one rank see keys of another."""
        band = band_of(self.call)
        if band is None or self.mirrored:
            return True
        ranks = len(self.lengths)
        first, rows = chunk(self.call.arg("query").shape[2], ranks, rank)
        start, length = chunk(self.call.arg("key").shape[2], ranks, owner)
        return start + length - 1 - first >= band.low and start - (first + rows - 1) <= band.high

    def seen(self, step: int) -> tuple[int, int, bool | None]:
        """(first row of the queries that see keys of this step, number of keys that they see, whether some do).

        Of mirrored rows, all queries see the early keys of ranks before, and late queries all keys of ranks behind.
        """
        owner, rows = self.owner(step), self.lengths[self.owner(step)]
        if not self.is_cut(step):
            return 0, rows, None
        if not self.call.arg("is_causal"):
            sees = self._sees(self.rank, owner)
            return 0, rows if sees else fewest(self.call, rows), sees
        if self.mirrored:
            return (0, rows // 2, None) if owner < self.rank else (rows // 2, rows, None)
        return (0, rows, True) if owner < self.rank else (0, fewest(self.call, rows), False)

    def is_cut(self, step: int) -> bool:
        """Whether some rank computes a step with a part of its queries or keys."""
        return step > 0 and (bool(self.call.arg("is_causal")) or (band_of(self.call) is not None and not self.mirrored))

    def of_queries(self, tensor: Any, step: int) -> Any:
        """The rows of the queries that see keys of this step."""
        if not (self.is_cut(step) and self.mirrored):
            return tensor
        return self.run.rows(tensor, 2, self.seen(step)[0], self.lengths[0], f"queries of step {step}")

    def keys(self, held: Any, step: int) -> Keys:
        """The keys of a step that queries see."""
        (key, value), name = held, f"keys of step {step}"
        _, rows, seen = self.seen(step)
        mask = self._mask(step, rows, name)
        if not self.is_cut(step):
            return Keys(key, value, name, causal=bool(self.call.arg("is_causal")), mask=mask)
        cut = [self.run.rows(x, 2, 0, rows, name) for x in (key, value)]
        return Keys(cut[0], cut[1], name, seen=seen, mask=mask)

    def _mask(self, step: int, rows: int, name: str) -> Any:
        """The columns of the call's mask for the first keys of a step."""
        if self.mask is None:
            return None
        owner, dim, length = self.owner(step), len(self.run.shape(self.mask)) - 1, self.call.arg("key").shape[2]
        if not self.mirrored:
            start = chunk(length, len(self.lengths), owner)[0]
            return self.run.rows(self.mask, dim, start, start + rows, name)
        half = rows // 2
        starts = [k * half for k in mirrored_pieces(owner, len(self.lengths))]
        pieces = [self.run.rows(self.mask, dim, start, start + half, f"{name}, {n}") for n, start in enumerate(starts)]
        return self.run(aten.cat.default, (pieces, dim))

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
        """The message in which a rank passes keys on after a step."""
        return Sent(Kind.ALL_TO_ALL, self.elements(self.owner(step)) * self.call.arg("key").dtype.itemsize)

    def passed(self, pair: Any, step: int, after: int) -> list[Any]:
        """Pass a pair on after a step, and receive the one of the next step, ``after``."""
        run, ranks, hop = self.run, range(len(self.lengths)), after - step
        owner, received = self.owner(step), self.owner(after)
        only = str(self.call.target)  # backward passes keys around again, instead of keeping what forward had
        flat = run(aten.cat.default, ([run(aten.reshape.default, (x, [-1]), numbers=only) for x in pair],))
        to_next = [self.elements(owner) * (k == (self.rank + hop) % len(ranks)) for k in ranks]
        from_previous = [self.elements(received) * (k == (self.rank - hop) % len(ranks)) for k in ranks]
        flat = run.all_to_all(flat, from_previous, to_next)
        found, start = [], 0
        for shape in self.shapes_of(received):
            end = start + prod(shape)
            found.append(run(aten.view.default, (run(aten.slice.Tensor, (flat, 0, start, end)), shape)))
            start = end
        return found
