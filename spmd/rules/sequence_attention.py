"""Attention on ranks that each have a part of the queries' rows.

A causal mask counts rows of the whole, but kernels count from the first row that they get. So a rank computes twice:
with the keys before its rows, all of which its queries see, and with those of its own rows, by a causal kernel. Both
results are merged by their log-sum-exps. Backward needs no merge: given the log-sum-exp of all keys, a kernel finds the
gradients that its keys contribute.

In a ring, a rank has the keys of one rank at a time and passes them on (Liu et al., "Ring Attention with Blockwise
Transformers for Near-Infinite Context", 2023); what its queries do not see is not computed.

All ranks run the same ops. Keys that a rank does not need are cut down to one row, whose weight is zero.
"""

from __future__ import annotations

from math import prod
from operator import getitem
from typing import Any, NamedTuple

import torch

from passes import Kind

from ..placements import chunk
from .base import OpCall, Parts, Run, Sent, parameters

aten = torch.ops.aten
_NEVER = 1e30  # exp(x - _NEVER) is zero for every score x


class Keys(NamedTuple):
    """Keys and values of some rows.

    ``name``: which rows, in words that are the same on all ranks; ``causal``: those of the queries; ``seen``: whether
    this rank's queries see them, where those of some rank do not.
    """

    key: Any
    value: Any
    name: str
    causal: bool = False
    seen: bool | None = None


class Kernel(NamedTuple):
    """The kernel of a call, on this rank's queries and any keys."""

    run: Run
    call: OpCall

    @property
    def kwargs(self) -> dict[str, Any]:
        """The scale, if it is given."""
        scale = self.call.arg("scale")
        return {} if scale is None else {"scale": scale}

    def forward(self, query: Any, keys: Keys) -> tuple[Any, Any]:
        """The output and the log-sum-exp, in the dtype of the latter."""
        run, results = self.run, self.call.results
        made = run(self.call.target, (query, keys.key, keys.value, 0.0, keys.causal), self.kwargs)
        out, logsumexp = run(getitem, (made, 0)), run(getitem, (made, 1))
        if keys.seen is not None:
            logsumexp = run(aten.sub.Scalar, (logsumexp, 0.0 if keys.seen else _NEVER), numbers=keys.name)
        assert results[0] is not None and results[1] is not None
        if results[0].dtype != results[1].dtype:
            out = run(aten._to_copy.default, (out,), {"dtype": results[1].dtype})
        return out, logsumexp

    def backward(self, grad: Any, query: Any, keys: Keys, out: Any, logsumexp: Any) -> list[Any]:
        """The gradients of query, key and value."""
        run = self.run
        if keys.seen is not None:
            logsumexp = run(aten.add.Scalar, (logsumexp, 0.0 if keys.seen else _NEVER), numbers=keys.name)
        args = (grad, query, keys.key, keys.value, out, logsumexp, 0.0, keys.causal)
        made = run(self.call.target, args, self.kwargs)
        return [run(getitem, (made, k)) for k in range(3)]

    def merged(self, first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
        """The output and the log-sum-exp over the keys of both."""
        run, (out, logsumexp), (other, others) = self.run, first, second
        weight = run(aten.sigmoid.default, (run(aten.sub.Tensor, (others, logsumexp)),))
        out = run(aten.lerp.Tensor, (out, other, run(aten.unsqueeze.default, (weight, -1))))
        return out, run(aten.logaddexp.default, (logsumexp, others))

    def rounded(self, out: Any) -> Any:
        """An output in the dtype of the call's."""
        info, logsumexp = self.call.results[:2]
        assert info is not None and logsumexp is not None
        return out if info.dtype == logsumexp.dtype else self.run(aten._to_copy.default, (out,), {"dtype": info.dtype})


# Gathered keys


def gathered(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Causal attention of a rank's rows to all keys."""
    query, kernel = args[0], Kernel(run, call)
    before, own = _around(run, args[1], args[2], parts[0])
    out, logsumexp = kernel.merged(kernel.forward(query, own), kernel.forward(query, before))
    return kernel.rounded(out), logsumexp


def gathered_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradients of a rank's queries, and what these add to the gradients of all keys."""
    grad, query, key, value, out, logsumexp = args[:6]
    part, kernel, length = parts[0], Kernel(run, call), call.arg("key").shape[2]
    assert part is not None
    before, own = _around(run, key, value, part)
    of_before = kernel.backward(grad, query, before, out, logsumexp)
    of_own = kernel.backward(grad, query, own, out, logsumexp)
    start, end = part.start[2], part.start[2] + part.shape[2]
    added = [run(aten.add.Tensor, (of_own[0], of_before[0]))]
    for own_rows, rows_before in zip(of_own[1:], of_before[1:], strict=True):
        padded = _padded(run, own_rows, start, length - end), _padded(run, rows_before, 0, length - max(start, 1))
        added.append(run(aten.add.Tensor, padded))
    return tuple(added)


def _around(run: Run, key: Any, value: Any, part: Any) -> tuple[Keys, Keys]:
    """The keys before the rows of ``part``, and those of these rows."""
    start, rows = part.start[2], part.shape[2]
    before = [run.rows(x, 2, 0, max(start, 1), "before") for x in (key, value)]
    own = [run.rows(x, 2, start, start + rows, "own") for x in (key, value)]
    return Keys(before[0], before[1], "before", seen=start > 0), Keys(own[0], own[1], "own", causal=True)


def _padded(run: Run, rows: Any, before: int, after: int) -> Any:
    """``rows`` of dim 2, with rows of zeros around them."""
    return run(aten.constant_pad_nd.default, (rows, [0, 0, before, after]))


# Keys that pass around


def ring(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Attention of a rank's rows to the keys of one rank after the other."""
    query, kernel, blocks = args[0], Kernel(run, call), Blocks.of(run, call, parts)
    found: tuple[Any, Any] | None = None
    passing = list(args[1:3])
    for step in range(run.size):
        held, passing = passing, blocks.passed(passing, step) if step < run.size - 1 else []
        part = kernel.forward(query, blocks.keys(held, step))
        found = part if found is None else kernel.merged(found, part)
    assert found is not None
    return kernel.rounded(found[0]), found[1]


def ring_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradients of a rank's rows; those of keys follow the keys, and come home at the end."""
    grad, query, *passing, out, logsumexp = args[:6]
    kernel, blocks = Kernel(run, call), Blocks.of(run, call, parts)
    sums: list[Any] = []
    following: list[Any] = []
    for step in range(run.size):
        held, passing = passing, blocks.passed(passing, step) if step < run.size - 1 else []
        of_query, *of_keys = kernel.backward(grad, query, blocks.keys(held, step), out, logsumexp)
        if step == 0:
            sums = [of_query, *of_keys]
            continue
        sums[0] = run(aten.add.Tensor, (sums[0], of_query))
        of_keys = [blocks.completed(each, step) for each in of_keys]
        following = _added(run, following, of_keys) if following else of_keys
        following = blocks.passed(following, step)
    return sums[0], *_added(run, sums[1:], following)


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

    @classmethod
    def of(cls, run: Run | None, call: OpCall, parts: Parts) -> Blocks:
        """The blocks of a call whose keys are split; ``parts``: of its operands."""
        at = parameters(call.target)["key"][0]
        assert at is not None
        held = [part for part in parts[at : at + 2] if part is not None]
        ranks = run.size if run is not None else call.size
        rows = [chunk(call.arg("key").shape[2], ranks, k) for k in range(ranks)]
        rank = next(k for k, (start, _) in enumerate(rows) if start == held[0].start[2])
        return cls(run, call, rank, [length for _, length in rows], [part.shape for part in held])

    def owner(self, step: int) -> int:
        """The rank whose rows this rank holds at a step."""
        return (self.rank - step) % len(self.lengths)

    def shapes_of(self, owner: int) -> list[list[int]]:
        """The shapes of a rank's key and value."""
        return [[*shape[:2], self.lengths[owner], *shape[3:]] for shape in self.shapes]

    def elements(self, owner: int) -> int:
        """The elements of a rank's key and value together."""
        return sum(map(prod, self.shapes_of(owner)))

    def sent(self, step: int) -> Sent:
        """What a rank passes on after a step."""
        return Sent(Kind.ALL_TO_ALL, self.elements(self.owner(step)) * self.call.arg("key").dtype.itemsize)

    def keys(self, held: Any, step: int) -> Keys:
        """The keys of a step, none of which is computed with where the queries do not see them."""
        key, value = held
        name, causal = f"{step} ranks before", self.call.arg("is_causal")
        if step == 0 or not causal:
            return Keys(key, value, name, causal=step == 0 and causal)
        seen = self.owner(step) < self.rank
        rows = self.lengths[self.owner(step)] if seen else 1
        return Keys(self.run.rows(key, 2, 0, rows, name), self.run.rows(value, 2, 0, rows, name), name, seen=seen)

    def completed(self, rows: Any, step: int) -> Any:
        """The gradient of all rows of a step's keys, from that of those that were computed with."""
        if not self.call.arg("is_causal"):
            return rows
        owner = self.owner(step)
        return _padded(self.run, rows, 0, 0 if owner < self.rank else self.lengths[owner] - 1)

    def passed(self, pair: Any, step: int) -> list[Any]:
        """What this rank receives from the rank before it, for the pair that it passes on after a step."""
        run, ranks = self.run, range(len(self.lengths))
        owner, received = self.owner(step), self.owner(step + 1)
        flat = run(aten.cat.default, ([run(aten.reshape.default, (x, [-1])) for x in pair],))
        to_next = [self.elements(owner) * (k == (self.rank + 1) % len(ranks)) for k in ranks]
        from_previous = [self.elements(received) * (k == (self.rank - 1) % len(ranks)) for k in ranks]
        flat = run.all_to_all(flat, from_previous, to_next, str(self.call.target))  # backward does not keep them
        found, start = [], 0
        for shape in self.shapes_of(received):
            end = start + prod(shape)
            found.append(run(aten.view.default, (run(aten.slice.Tensor, (flat, 0, start, end)), shape)))
            start = end
        return found


def _added(run: Run, first: list[Any], second: list[Any]) -> list[Any]:
    return [run(aten.add.Tensor, pair) for pair in zip(first, second, strict=True)]
