"""Attention of a rank's rows to keys that are gathered: to those that the rows may see."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...placements import mirrored_pieces
from ..base import LocalPart, OpCall, Parts, Run
from .kernels import (
    ALIGNED_TO,
    ON_CPU,
    SAVED,
    Kernel,
    Keys,
    added,
    band_of,
    fewest,
    finds_gradient_of_mask,
    grad_of,
    joined,
    padded,
)

aten = torch.ops.aten


def gathered(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Attention of a rank's rows to the keys that they may see."""
    kernel, found = Kernel(run, call, args), []
    query, key, value = kernel.operands("query", "key", "value")
    if not call.arg("is_causal"):
        return kernel.results(*kernel.forward(query, Window.of(kernel, parts[0]).keys(kernel)))
    for rows in _runs(run, call, parts[0]):
        part = rows.of_queries(run, query)
        before, own = rows.keys(run, key, value)
        found.append(kernel.merged(kernel.forward(part, own), kernel.forward(part, before)))
    return kernel.results(*(joined(run, each) for each in zip(*found, strict=True)))


def gathered_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The gradients of a rank's queries, and what these add to the gradients of all keys."""
    kernel, of_queries, length = Kernel(run, call, args), list[Any](), call.arg("key").shape[2]
    grad, query, key, value, out, logsumexp = kernel.operands(grad_of(call), *SAVED)
    if not call.arg("is_causal"):
        window = Window.of(kernel, parts[0])
        of_query, *grads = kernel.backward(grad, query, window.keys(kernel), out, logsumexp)
        whole = [padded(run, each, window.first, length - window.end) for each in grads[:2]]
        return of_query, *whole, *grads[2:]
    of_keys: list[Any] = []
    for rows in _runs(run, call, parts[0]):
        grads, queries, outs = (rows.of_queries(run, each) for each in (grad, query, out))
        sums = rows.of_queries(run, logsumexp)
        before, own = rows.keys(run, key, value)
        of_before, of_own = (kernel.backward(grads, queries, keys, outs, sums) for keys in (before, own))
        of_queries.append(run(aten.add.Tensor, (of_own[0], of_before[0])))
        end = rows.start + rows.length
        for each, start, stop in ((of_own[1:3], rows.start, end), (of_before[1:3], 0, rows.before)):
            whole = [padded(run, grad_of_rows, start, length - stop) for grad_of_rows in each]
            of_keys = added(run, of_keys, whole) if of_keys else whole
    return joined(run, of_queries), *of_keys, *of_own[3:]


def to_all_keys(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Attention of a rank's rows, whichever they are, to all keys."""
    kernel = Kernel(run, call, args)
    return kernel.results(*kernel.forward(kernel.given["query"], Window.all_of(call).keys(kernel)))


def to_all_keys_backward(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Its gradients."""
    kernel = Kernel(run, call, args)
    grad, query, _, _, out, logsumexp = kernel.operands(grad_of(call), *SAVED)
    return tuple(kernel.backward(grad, query, Window.all_of(call).keys(kernel), out, logsumexp))


def hides_by_position(call: OpCall) -> bool:
    """Whether a mask is known to hide keys by their distance from the query, and has no gradient."""
    return band_of(call) is not None and not finds_gradient_of_mask(call)


class Window(NamedTuple):
    """The keys that a rank's rows may see: those from ``first`` to ``end``."""

    first: int
    end: int
    is_cut: bool = True

    @classmethod
    def of(cls, kernel: Kernel, part: LocalPart | None) -> Window:
        """The keys that are in the band of the mask of some row."""
        call, band = kernel.call, band_of(kernel.call)
        assert part is not None
        if band is None or part.mirrored:
            return cls.all_of(call)
        start, length = part.start[2], call.arg("key").shape[2]
        least = fewest(call, length)
        first = int(min(max(start + band.low, 0), length - least))
        first -= 0 if call.target in ON_CPU else first % ALIGNED_TO
        return cls(first, int(max(min(start + part.shape[2] + band.high, length), first + least)))

    @classmethod
    def all_of(cls, call: OpCall) -> Window:
        """All keys of a call."""
        return cls(0, call.arg("key").shape[2], False)

    def keys(self, kernel: Kernel) -> Keys:
        """The keys, with what the mask says of them."""
        key, value = kernel.operands("key", "value")
        if not self.is_cut:
            return Keys(key, value, "of all")
        name, mask = "that rows may see", kernel.mask
        cut = [(key, 2), (value, 2), (mask, len(kernel.run.shape(mask)) - 1)]
        key, value, mask = (kernel.run.rows(x, dim, self.first, self.end, name) for x, dim in cut)
        return Keys(key, value, name, mask=mask)


class Rows(NamedTuple):
    """Rows of queries that follow one another: the ``nth`` run of the ``runs`` that a rank has.

    ``before``: the number of keys before them, or, if there are none, of those to compute with all the same.
    """

    start: int
    length: int
    before: int
    nth: int = 0
    runs: int = 1

    def of_queries(self, run: Run, tensor: Any) -> Any:
        """These rows of a rank's part."""
        start = self.nth * self.length
        return tensor if self.runs == 1 else run(aten.slice.Tensor, (tensor, 2, start, start + self.length))

    def keys(self, run: Run, key: Any, value: Any) -> tuple[Keys, Keys]:
        """The keys before these rows, and those of these rows."""
        names = f"before run {self.nth}", f"of run {self.nth}"
        before = [run.rows(x, 2, 0, self.before, names[0]) for x in (key, value)]
        own = [run.rows(x, 2, self.start, self.start + self.length, names[1]) for x in (key, value)]
        seen = self.start > 0 if self.nth == 0 else None
        return Keys(before[0], before[1], names[0], seen=seen), Keys(own[0], own[1], names[1], causal=True)


def _runs(run: Run, call: OpCall, part: LocalPart | None) -> list[Rows]:
    """The runs of rows of this rank's queries."""
    assert part is not None
    least = fewest(call, call.arg("key").shape[2])
    if not part.mirrored:
        return [Rows(part.start[2], part.shape[2], part.start[2] or least)]
    length = part.shape[2] // 2
    pieces = enumerate(mirrored_pieces(run.rank, run.size))
    return [Rows(k * length, length, k * length or least, n, 2) for n, k in pieces]
