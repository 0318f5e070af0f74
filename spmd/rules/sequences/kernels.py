"""The attention kernel of a call, on a rank's queries and some keys; how results of several are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from operator import getitem
from typing import Any, NamedTuple

import torch

from passes.ir.ops import aten as listed

from ..base import Info, OpCall, Run, parameters
from .bands import Band

aten = torch.ops.aten
NEVER = 1e30  # exp(x - NEVER) is zero for every score x
_PADS = {*listed("_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward")}
_PADDED_TO = 32  # rows of the log-sum-exp of these kernels
ALIGNED_TO = 16  # elements of a bias, at which kernels of a GPU read it
MASKS = ("attn_mask", "attn_bias")
SAVED = ("query", "key", "value", "out", "logsumexp")
ON_CPU = {*listed("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward")}
_FEWEST = 64  # rows of keys for a kernel of a GPU: some take no single one, or are slow with odd numbers


class Keys(NamedTuple):
    """Keys and values of some rows.

    ``name``: which rows, in words that are the same on all ranks; ``causal``: those of the queries; ``seen``: whether
    this rank's queries see them, where those of some rank do not; ``mask``: of these keys, where it is not the call's.
    """

    key: Any
    value: Any
    name: str
    causal: bool = False
    seen: bool | None = None
    mask: Any = None


@dataclass
class Kernel:
    """The kernel of a call, on this rank's queries and any keys.

    ``args``: the call's own, on this rank. ``more``: what the kernel gives besides output and log-sum-exp, for the
    first keys.
    """

    run: Run
    call: OpCall
    args: tuple[Any, ...]
    more: list[Any] = field(default_factory=list)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by position, by name."""
        named = parameters(self.call.target)
        defaults = {name: default for name, (position, default) in named.items() if position is not None}
        return defaults | dict(zip(named, self.args, strict=False))

    @property
    def mask(self) -> Any:
        """The mask, or bias, on this rank; None if there is none."""
        given = self.given | self.run.kwargs
        return next((given[name] for name in MASKS if given.get(name) is not None), None)

    def operands(self, *names: str) -> list[Any]:
        """Arguments by name."""
        return [self.given[name] for name in names]

    def _made(self, numbers: str = "", **others: Any) -> Any:
        """The results of the op, with other arguments where it has some of these names."""
        args = tuple(others.get(name, value) for name, value in self.given.items())
        kwargs = {name: others.get(name, value) for name, value in self.run.kwargs.items()}
        return self.run(self.call.target, args, kwargs, numbers)

    def _of(self, keys: Keys) -> dict[str, Any]:
        """The arguments of the op for some keys."""
        masks = {} if keys.mask is None else {"attn_mask": keys.mask, "attn_bias": keys.mask}
        return {"key": keys.key, "value": keys.value, "is_causal": keys.causal} | masks

    def forward(self, query: Any, keys: Keys) -> tuple[Any, Any]:
        """The output and the log-sum-exp, a number for each row, in the dtype of the latter."""
        run, results = self.run, self.call.results
        assert results[0] is not None and results[1] is not None
        made = self._made(query=query, **self._of(keys), compute_log_sumexp=True)
        out, logsumexp, *more = (run(getitem, (made, k)) for k in range(len(results)))
        self.more = self.more or more
        if self.call.target in _PADS:
            logsumexp = run.rows(logsumexp, 2, 0, run.shape(query)[2], f"rows of queries, {keys.name}")
        if results[1].ndim == 4:
            logsumexp = run(aten.squeeze.dim, (logsumexp, -1))
        if keys.seen is not None:
            logsumexp = run(aten.sub.Scalar, (logsumexp, 0.0 if keys.seen else NEVER), numbers=keys.name)
        if results[0].dtype != results[1].dtype:
            out = run(aten._to_copy.default, (out,), {"dtype": results[1].dtype})
        return out, logsumexp

    def backward(self, grad: Any, query: Any, keys: Keys, out: Any, logsumexp: Any) -> list[Any]:
        """The gradients of query, key and value, and of a bias."""
        run, rows = self.run, self.run.shape(query)[2]
        logsumexp = run(aten.contiguous.default, (logsumexp,))  # kernels read rows that were cut from others wrongly
        if keys.seen is not None:
            logsumexp = run(aten.add.Scalar, (logsumexp, 0.0 if keys.seen else NEVER), numbers=keys.name)
        if self.call.target in _PADS:
            logsumexp = run(aten.constant_pad_nd.default, (logsumexp, [0, -rows % _PADDED_TO], NEVER))
            out = self._in_own_layout(out)
        of_queries = {"grad_out": grad, "grad_out_": grad, "query": query, "out": out, "logsumexp": logsumexp}
        made = self._made(keys.name, **of_queries, **self._of(keys), max_q=rows, max_k=run.shape(keys.key)[2])
        return [run(getitem, (made, k)) for k in range(len(self.call.results))]

    def _in_own_layout(self, out: Any) -> Any:
        """The output as the kernel gives it, heads within rows: it reads that layout, whatever the strides are."""
        swapped = self.run(aten.transpose.int, (out, 1, 2))
        return self.run(aten.transpose.int, (self.run(aten.contiguous.default, (swapped,)), 1, 2))

    def merged(self, first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
        """The output and the log-sum-exp over the keys of both."""
        run, (out, logsumexp), (other, others) = self.run, first, second
        weight = run(aten.sigmoid.default, (run(aten.sub.Tensor, (others, logsumexp)),))
        out = run(aten.lerp.Tensor, (out, other, run(aten.unsqueeze.default, (weight, -1))))
        return out, run(aten.logaddexp.default, (logsumexp, others))

    def results(self, out: Any, logsumexp: Any) -> tuple[Any, ...]:
        """All that the kernel gives, in its dtypes and layout."""
        run, (info, sums) = self.run, self.call.results[:2]
        assert info is not None and sums is not None
        if info.dtype != sums.dtype:
            out = run(aten._to_copy.default, (out,), {"dtype": info.dtype})
        if sums.ndim == 4:
            logsumexp = run(aten.unsqueeze.default, (logsumexp, -1))
        if not sums.shape[2]:  # nobody asked for it
            logsumexp = run(aten.slice.Tensor, (logsumexp, 2, 0, 0))
        return out, logsumexp, *self.more


def fewest(call: OpCall, rows: int) -> int:
    """The number of keys, of so many rows, that a kernel computes with where a rank needs none."""
    return 1 if call.target in ON_CPU else min(_FEWEST, rows)


def grad_of(call: OpCall) -> str:
    """The name of the gradient of the output."""
    return next(name for name in parameters(call.target) if name.startswith("grad_out"))


def joined(run: Run, found: Sequence[Any]) -> Any:
    """Rows of dim 2, one after the other."""
    return found[0] if len(found) == 1 else run(aten.cat.default, (list(found), 2))


def padded(run: Run, rows: Any, before: int, after: int) -> Any:
    """``rows`` of dim 2, with rows of zeros around them."""
    return run(aten.constant_pad_nd.default, (rows, [0, 0, before, after]))


def added(run: Run, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """The sums of pairs."""
    return [run(aten.add.Tensor, pair) for pair in zip(first, second, strict=True)]


def finds_gradient_of_mask(call: OpCall) -> bool:
    """Whether a call is the backward of attention that also gives the gradient of a bias."""
    return call.arg("logsumexp") is not None and any(call.results[3:])


def band_of(call: OpCall) -> Band | None:
    """The band of keys around each query that the mask of a call shows."""
    mask = next((mask for mask in map(call.arg, MASKS) if isinstance(mask, Info)), None)
    if mask is None or not isinstance(found := mask.positions, Band) or (found.row, found.column) != (-2, -1):
        return None
    hides = mask.dtype is torch.bool if found.outside is False else found.outside == -inf  # a bias of 0 hides nothing
    return found if hides else None
