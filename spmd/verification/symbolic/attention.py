"""Attention on symbols, computed from scores: the exponential of a score is a hash, all else sums, products, quotients.

So what is computed for some of the keys at a time, and merged by log-sum-exps, equals what is computed at once. A
log-sum-exp is kept as what it is the logarithm of, and marked: the ops that merge are products and sums of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from passes.ir.schemas import schema

from ..._torch import OpOverload
from .. import symbols
from ..symbols import LOGARITHM, inverse, matmul, minus, number, over, plus, times

_ONE = torch.tensor(number(1))
NEVER = 1e30  # of this difference, the exponential is zero
_INFINITE = torch.tensor(symbols.key("infinite"))
LOWEST = torch.tensor(number(-torch.inf))
"""What a mask adds to the score of a key that it hides."""


def attention(sizes: Any, op: OpOverload, *args: Any, **kwargs: Any) -> list[Any]:
    """The output and the log-sum-exp of each row."""
    given = _Given(op, args, kwargs)
    exponentials, dtype = given.exponentials(), symbols.dtype_of(args[0])
    sums = symbols.total(exponentials, -1)
    out = over(matmul(exponentials, given.of_each_head("value")), sums.unsqueeze(-1))
    wide = torch.promote_types(dtype or torch.float32, torch.float32)
    out = symbols.cast(out, dtype) if dtype is not None and dtype != wide else out
    return [given.as_given(out, dtype), given.as_given(sums, wide, LOGARITHM)]


def attention_backward(sizes: Any, op: OpOverload, *args: Any, **kwargs: Any) -> list[Any]:
    """The gradients of query, key and value, by the log-sum-exp of all keys, of which these may be some."""
    given = _Given(op, args, kwargs)
    grad, query, out, sums = (given.symbols(name) for name in ("grad_out", "query", "out", "logsumexp"))
    marks = symbols.pieces(given.named["logsumexp"])[1]
    if not bool((marks & LOGARITHM).all()):
        raise ValueError("its log-sum-exp is none of attention")
    share = torch.where(sums == _INFINITE, 0, inverse(sums))
    weights = times(given.exponentials(), share.unsqueeze(-1))
    of_weights = matmul(grad, given.of_each_head("value").mT)
    of_scores = times(weights, minus(of_weights, symbols.total(times(grad, out), -1).unsqueeze(-1)))
    of_scores = times(of_scores, given.scale)
    found = [matmul(of_scores, given.of_each_head("key")), matmul(of_scores.mT, query), matmul(weights.mT, grad)]
    heads = given.symbols("key").shape[1]
    found[1:] = [symbols.total(x.unflatten(1, (heads, -1)), 2) for x in found[1:]]
    return [given.as_given(x, symbols.dtype_of(given.named["query"])) for x in found]


class _Given:
    """The arguments of a call, by name."""

    def __init__(self, op: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> None:
        declared = schema(op).arguments
        self.named = {each.name: each.default for each in declared}
        self.named |= dict(zip(self.named, args, strict=False)) | dict(kwargs)
        if self.named["dropout_p"]:
            raise ValueError("it draws numbers")
        pieces = [symbols.pieces(x)[1] for x in symbols.tensors_of(list(self.named.values()))]
        if any(bool((marks & (symbols.PENDING | symbols.DOUBT)).any()) for marks in pieces):
            raise ValueError("it reads values that are not shown, or are still to be reduced")
        width = self.named["query"].shape[-1]
        self.scale = torch.tensor(number(width**-0.5 if self.named["scale"] is None else self.named["scale"]))

    def symbols(self, name: str) -> Tensor:
        """The symbols of an argument."""
        return symbols.pieces(self.named[name])[0]

    def of_each_head(self, name: str) -> Tensor:
        """The symbols of keys or values, one for each head of queries."""
        found, heads = self.symbols(name), self.named["query"].shape[1]
        return found.repeat_interleave(heads // found.shape[1], 1)

    def exponentials(self) -> Tensor:
        """A symbol for the exponential of each score."""
        scores = times(matmul(self.symbols("query"), self.of_each_head("key").mT), self.scale)
        mask = self.named["attn_mask"]
        added = [] if mask is None else [symbols.pieces(mask)[0].expand(scores.shape)]
        found = symbols.hashed(symbols.key("exp of a score", len(added)), scores, *added)
        for each in added:
            found = torch.where(each == LOWEST, 0, found)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return torch.where(causal, found, 0) if self.named["is_causal"] else found

    def as_given(self, found: Tensor, dtype: torch.dtype | None, mark: int = 0) -> Tensor:
        """Elements of a result."""
        return symbols.elements(found, symbols.mark_of(dtype or torch.float32) | mark)


COMPUTED = {
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}
"""The functions that compute attention, by the op's name."""


# Logarithms


def filling(x: Tensor, value: float) -> tuple[Tensor, int]:
    """The symbol, and mark, of a number that fills elements of ``x``: of a logarithm of nearly zero, that of zero."""
    is_zero = merges("add", {"self": x}) and value <= -NEVER
    return (torch.tensor(0), LOGARITHM) if is_zero else (symbols.symbol(value), 0)


def merges(name: str, given: Mapping[str, Any]) -> bool:
    """Whether an op on logarithms is computed by ``merged``."""
    tensors = symbols.tensors_of(list(given.values()))
    if name not in _MERGING or not tensors:
        return False
    return all(x.numel() and bool((symbols.pieces(x)[1] & LOGARITHM).all()) for x in tensors)


def merged(name: str, given: Mapping[str, Any]) -> tuple[Tensor, int]:
    """The symbols of a result that is computed from logarithms, and their mark."""
    first, *others = given.values()
    others = [x if isinstance(x, (int, float)) else symbols.pieces(x)[0] for x in others]
    return _MERGING[name](symbols.pieces(first)[0], *others), 0 if name == "sigmoid" else LOGARITHM


def _less(x: Tensor, y: Any) -> Tensor:
    if isinstance(y, Tensor):
        return over(x, y)
    return _more(x, -y)


def _more(x: Tensor, y: Any) -> Tensor:
    if isinstance(y, Tensor):
        return times(x, y)
    if y != 0 and abs(y) < NEVER:
        raise ValueError("it adds a number to a logarithm")
    return x if y == 0 else torch.full_like(x, 0 if y < 0 else int(_INFINITE))


_MERGING: dict[str, Callable[..., Tensor]] = {
    "sub": _less,
    "add": _more,
    "logaddexp": plus,
    "sigmoid": lambda x: over(x, plus(_ONE, x)),
}
