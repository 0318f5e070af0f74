"""Attention on ranks that each have a part of the queries' rows.

A causal mask counts rows of the whole, but kernels count from the first row that they get. So a rank computes twice:
with the keys before its rows, all of which its queries see, and with those of its own rows, by a causal kernel. Both
results are merged by their log-sum-exps. Backward needs no merge: given the log-sum-exp of all keys, a kernel finds the
gradients that its keys contribute.

In a ring, a rank has the keys of one rank at a time and passes them on (Liu et al., "Ring Attention with Blockwise
Transformers for Near-Infinite Context", 2023); what its queries do not see is not computed.

Where rows are mirrored, each rank has an early and a late run of queries, and all compute equally much.

All ranks run the same ops. Keys that a rank does not need are cut down to one row, whose weight is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import getitem
from typing import Any, NamedTuple

import torch

from passes import Kind

from ..placements import chunk, mirrored_pieces
from .base import LocalPart, OpCall, Parts, Run, Sent, parameters

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
        logsumexp = run(aten.contiguous.default, (logsumexp,))  # kernels read rows that were cut from others wrongly
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
    query, key, value = args[:3]
    kernel, found = Kernel(run, call), []
    for rows in _runs(run, call, parts[0]):
        part = rows.of_queries(run, query)
        before, own = rows.keys(run, key, value)
        found.append(kernel.merged(kernel.forward(part, own), kernel.forward(part, before)))
    out, logsumexp = (_joined(run, each) for each in zip(*found, strict=True))
    return kernel.rounded(out), logsumexp


def gathered_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradients of a rank's queries, and what these add to the gradients of all keys."""
    grad, query, key, value, out, logsumexp = args[:6]
    kernel, of_queries, length = Kernel(run, call), list[Any](), call.arg("key").shape[2]
    of_keys: list[Any] = []
    for rows in _runs(run, call, parts[0]):
        grads, queries, outs = (rows.of_queries(run, each) for each in (grad, query, out))
        sums = rows.of_queries(run, logsumexp)
        before, own = rows.keys(run, key, value)
        of_before = kernel.backward(grads, queries, before, outs, sums)
        of_own = kernel.backward(grads, queries, own, outs, sums)
        of_queries.append(run(aten.add.Tensor, (of_own[0], of_before[0])))
        end = rows.start + rows.length
        for each, start, stop in ((of_own[1:], rows.start, end), (of_before[1:], 0, max(rows.start, 1))):
            padded = [_padded(run, grad_of_rows, start, length - stop) for grad_of_rows in each]
            of_keys = _added(run, of_keys, padded) if of_keys else padded
    return _joined(run, of_queries), *of_keys


class Rows(NamedTuple):
    """Rows of queries that follow one another: the ``nth`` run of the ``runs`` that a rank has."""

    start: int
    length: int
    nth: int = 0
    runs: int = 1

    def of_queries(self, run: Run, tensor: Any) -> Any:
        """These rows of a rank's part."""
        start = self.nth * self.length
        return tensor if self.runs == 1 else run(aten.slice.Tensor, (tensor, 2, start, start + self.length))

    def keys(self, run: Run, key: Any, value: Any) -> tuple[Keys, Keys]:
        """The keys before these rows, and those of these rows."""
        end, names = max(self.start, 1), (f"before run {self.nth}", f"of run {self.nth}")
        before = [run.rows(x, 2, 0, end, names[0]) for x in (key, value)]
        own = [run.rows(x, 2, self.start, self.start + self.length, names[1]) for x in (key, value)]
        seen = self.start > 0 if self.nth == 0 else None
        return Keys(before[0], before[1], names[0], seen=seen), Keys(own[0], own[1], names[1], causal=True)


def _runs(run: Run, call: OpCall, part: LocalPart | None) -> list[Rows]:
    """The runs of rows of this rank's queries."""
    assert part is not None
    if not part.mirrored:
        return [Rows(part.start[2], part.shape[2])]
    length = part.shape[2] // 2
    return [Rows(k * length, length, n, 2) for n, k in enumerate(mirrored_pieces(run.rank, run.size))]


def _joined(run: Run, found: Sequence[Any]) -> Any:
    return found[0] if len(found) == 1 else run(aten.cat.default, (list(found), 2))


def _padded(run: Run, rows: Any, before: int, after: int) -> Any:
    """``rows`` of dim 2, with rows of zeros around them."""
    return run(aten.constant_pad_nd.default, (rows, [0, 0, before, after]))


def _added(run: Run, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [run(aten.add.Tensor, pair) for pair in zip(first, second, strict=True)]


# Keys that pass around


def ring(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Attention of a rank's rows to the keys of one rank after the other."""
    query, kernel, blocks = args[0], Kernel(run, call), Blocks.of(run, call, parts)
    found: tuple[Any, Any] | None = None
    passing = list(args[1:3])
    for step in range(run.size):
        held, passing = passing, blocks.passed(passing, step) if step < run.size - 1 else []
        part = kernel.forward(blocks.of_queries(query, step), blocks.keys(held, step))
        found = part if found is None else kernel.merged(found, blocks.with_all_queries(part, step))
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
        grads, queries, outs, of_rows = (blocks.of_queries(x, step) for x in (grad, query, out, logsumexp))
        of_query, *of_keys = kernel.backward(grads, queries, blocks.keys(held, step), outs, of_rows)
        if step == 0:
            sums = [of_query, *of_keys]
            continue
        sums[0] = run(aten.add.Tensor, (sums[0], blocks.with_all_rows(of_query, step)))
        of_keys = [blocks.with_all_keys(each, step) for each in of_keys]
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
    mirrored: bool

    @classmethod
    def of(cls, run: Run | None, call: OpCall, parts: Parts) -> Blocks:
        """The blocks of a call whose keys are split; ``parts``: of its operands."""
        at = parameters(call.target)["key"][0]
        assert at is not None
        held = [part for part in parts[at : at + 2] if part is not None]
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
        return (0, rows, True) if owner < self.rank else (0, 1, False)

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
        return _padded(self.run, grad, 0, after) if self.is_cut(step) else grad

    def with_all_rows(self, grad: Any, step: int) -> Any:
        """The gradient of all queries, from that of those that see keys of this step."""
        cut = self.is_cut(step) and self.mirrored
        return _padded(self.run, grad, self.seen(step)[0], 0) if cut else grad

    def with_all_queries(self, part: tuple[Any, Any], step: int) -> tuple[Any, Any]:
        """An output and log-sum-exp with all rows: those without keys weigh nothing."""
        if not (self.is_cut(step) and self.mirrored):
            return part
        before = self.seen(step)[0]
        return self.with_all_rows(part[0], step), self.run(
            aten.constant_pad_nd.default, (part[1], [before, 0], -_NEVER)
        )

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
