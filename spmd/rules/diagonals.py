"""Ops on a diagonal of two dims: other dims may be split, and one of the two, whose rows then have their own diagonal.

The rows of a rank start somewhere down the matrix: their diagonal starts as far to the right. So the mask of a
contrastive loss, whose diagonal is filled, stays split by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from .base import LocalPart, OpCall, Option, Parts, Run
from .einsum_labels import WHOLE, Dims, letters, option, options, without, wrap
from .optional_ops import aten
from .registry import rule


@rule(*aten("diagonal", "diagonal_copy"))
def diagonal(call: OpCall) -> list[Option]:
    """All dims but the two of the diagonal, which becomes the last; of those two, one that it runs through."""
    shape = call.arg("self").shape
    whole, rest = _off_diagonal(call, len(shape))
    found = options(call, Dims({"self": whole}, rest, moves=("self",)))
    through = [option(call, {"self": Shard(d)}, Shard(len(rest) - 1)) for d in _split_dims(call, shape, through=True)]
    return found + [replace(each, local=_own_diagonal) for each in through]


@rule(*aten("diagonal_backward"))
def diagonal_backward(call: OpCall) -> list[Option]:
    """All dims of the gradient, which fills a diagonal of zeros; of the two dims, either."""
    shape: list[int] = call.arg("input_sizes")
    whole, rest = _off_diagonal(call, len(shape))
    found = options(call, Dims({"grad_output": rest}, whole, linear=(("grad_output",),)))
    return found + [
        replace(option(call, {"grad_output": _filling(call, shape, d)}, Shard(d)), local=_own_gradient)
        for d in _split_dims(call, shape)
    ]


@rule(*aten("diagonal_scatter"))
def diagonal_scatter(call: OpCall) -> list[Option]:
    """All dims but the two of the diagonal, which is replaced; of the two, either."""
    shape = call.arg("self").shape
    whole, rest = _off_diagonal(call, len(shape))
    found = options(call, Dims({"self": whole, "src": rest}, whole, moves=("self", "src")))
    return found + [
        replace(option(call, {"self": Shard(d), "src": _filling(call, shape, d)}, Shard(d)), local=_own_rows)
        for d in _split_dims(call, shape)
    ]


def _off_diagonal(call: OpCall, ndim: int) -> tuple[str, str]:
    names = without(letters(ndim), *_dims(call, ndim))
    return names, names.replace(WHOLE, "") + WHOLE


def _dims(call: OpCall, ndim: int) -> tuple[int, int]:
    """The dim down which the diagonal runs, and the dim to the right."""
    return wrap(call.arg("dim1"), ndim), wrap(call.arg("dim2"), ndim)


def _split_dims(call: OpCall, shape: Sequence[int], through: bool = False) -> list[int]:
    """Dims of the two that can be split: none of a part, where positions differ; ``through``: if all rows count."""
    if call.of_parts:
        return []
    return [d for d in _dims(call, len(shape)) if not through or _runs_through(call, shape, d)]


def _filling(call: OpCall, shape: Sequence[int], dim: int) -> Replicate | Shard:
    """The placement of what fills the diagonal, where ``dim`` is split: like it, if each row has an element."""
    return Shard(len(shape) - 2) if _runs_through(call, shape, dim) else Replicate()


def _runs_through(call: OpCall, shape: Sequence[int], dim: int) -> bool:
    """Whether the diagonal has an element in every row of ``dim``: it is as long, and starts there."""
    down, right = _dims(call, len(shape))
    offset: int = call.arg("offset", 0)
    length = min(shape[down] + min(offset, 0), shape[right] - max(offset, 0))
    return length == shape[dim] > 0


def _own_diagonal(run: Run, call: OpCall, args: tuple[Any, ...], operands: Parts, results: Parts) -> Any:
    """The diagonal of a rank's part."""
    (part,) = operands
    assert part is not None
    return run(call.target, (args[0], *_shifted(call, part)))


def _own_gradient(run: Run, call: OpCall, args: tuple[Any, ...], operands: Parts, results: Parts) -> Any:
    """A rank's part of the zeros that are filled along a diagonal."""
    (grad,), (part,) = operands, results
    assert grad is not None and part is not None
    own = _elements(run, call, args[0], grad, part, call.arg("input_sizes"))
    return run(call.target, (own, list(part.shape), *_shifted(call, part)))


def _own_rows(run: Run, call: OpCall, args: tuple[Any, ...], operands: Parts, results: Parts) -> Any:
    """A rank's part of a tensor whose diagonal is replaced."""
    part, src = operands
    assert part is not None and src is not None
    own = _elements(run, call, args[1], src, part, call.arg("self").shape)
    return run(call.target, (args[0], own, *_shifted(call, part)))


def _shifted(call: OpCall, part: LocalPart) -> tuple[int, int, int]:
    """Offset and dims of the diagonal, as the part of a tensor has it."""
    down, right = _dims(call, len(part.shape))
    return call.arg("offset", 0) + part.start[down] - part.start[right], down, right


def _elements(run: Run, call: OpCall, filling: Any, has: LocalPart, part: LocalPart, shape: Sequence[int]) -> Any:
    """The elements of the diagonal that lie in ``part``, of those that a rank has."""
    dims, offset = _dims(call, len(shape)), call.arg("offset", 0)
    before = (max(-offset, 0), max(offset, 0))  # rows and columns before the diagonal starts
    first = max(part.start[d] - skipped for d, skipped in zip(dims, before, strict=True))
    last = min(part.start[d] + part.shape[d] - skipped for d, skipped in zip(dims, before, strict=True))
    start, length = has.start[-1], has.shape[-1]
    first, last = (min(max(at - start, 0), length) for at in (first, last))
    (cut,) = aten("slice.Tensor")
    return run(cut, (filling, len(has.shape) - 1, first, max(first, last)))
