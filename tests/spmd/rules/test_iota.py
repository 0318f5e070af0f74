"""What is known of counts 0, 1, 2, ... is true, and what cannot be known is unknown, through views and copies."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from passes.ir.ops import find
from spmd.rules import Info, OpCall, iota_dim_of

from .engine import iota_dim
from .samples import samples

VIEWS = "view reshape expand permute transpose.int unsqueeze squeeze squeeze.dim t clone _to_copy slice.Tensor alias"


def known(name: str, x: torch.Tensor | None, fact: int | None, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """(the result of an op, what is known of it), where ``fact`` is known of ``x``."""
    op: Any = find(name)
    given = (Info(tuple(x.shape), x.dtype, fact),) if x is not None else ()
    result = op(*([x] if x is not None else []), *args, **kwargs)
    results = (Info(tuple(result.shape), result.dtype),)
    return result, iota_dim_of(OpCall(op, (*given, *args), kwargs, given, results, 2))


def made(*args: Any, name: str = "arange", **kwargs: Any) -> tuple[torch.Tensor, Any]:
    return known(name, None, None, *args, **kwargs)


def _arguments(name: str, x: torch.Tensor, draw: random.Random) -> tuple[Any, ...]:
    """Arguments with which an op can be called on ``x``."""
    d, shape = draw.randrange(max(x.ndim, 1)), list(x.shape)
    if name in ("view", "reshape"):
        n = x.numel()
        cut = draw.choice([k for k in range(1, n + 1) if n % k == 0] or [0])
        return (draw.choice([[n], [cut, n // max(cut, 1)], [1, n, 1], [*shape[:1], 1, *shape[1:]] if x.ndim else [1]]),)
    if name == "expand":
        return ([draw.randint(0, 3), *[draw.choice([2, 5]) if n == 1 else n for n in shape]],)
    if name == "permute":
        return (draw.sample(range(x.ndim), x.ndim),)
    if name == "transpose.int":
        return d, draw.randrange(max(x.ndim, 1))
    if name == "slice.Tensor":
        return d, draw.choice([0, 0, 1]), draw.choice([3, 9223372036854775807]), draw.choice([1, 1, 2])
    return (d,) if name in ("unsqueeze", "squeeze.dim") else ()


def _possible(name: str, x: torch.Tensor) -> bool:
    return not (name == "t" and x.ndim > 2) and not (name == "slice.Tensor" and x.ndim == 0) and x.ndim < 6


@pytest.mark.parametrize("seed", range(200))
def test_facts_are_true_through_chains_of_views(seed: int) -> None:
    draw = random.Random(seed)
    value, fact = made(draw.choice([0, 1, 2, 9, 12]))
    for _ in range(4):
        name = draw.choice(VIEWS.split())
        if not _possible(name, value):
            continue
        args = _arguments(name, value, draw)
        kwargs = {"dtype": draw.choice([torch.int32, torch.float64])} if name == "_to_copy" else {}
        if name == "view":
            value = value.contiguous()
        value, fact = known(name, value, fact, *args, **kwargs)
        assert fact is None or (not value.dtype.is_floating_point and _counts_along(value, fact)), (name, args)


def _counts_along(x: torch.Tensor, dim: int) -> bool:
    rows = torch.arange(x.shape[dim]).view(-1, *[1] * (x.ndim - dim - 1))
    return bool(x.shape[dim] > 1 and x.long().equal(rows.expand_as(x)))


def test_what_is_known() -> None:
    nine, fact = made(9)
    assert fact == 0
    assert known("view", nine, 0, [3, 3])[1] is None
    assert known("view", nine, 0, [1, 9, 1])[1] == 1
    column, fact = known("unsqueeze", nine, 0, -1)
    grid, fact = known("expand", column, fact, [9, 4])
    assert fact == 0 and known("reshape", grid, fact, [9, 2, 2])[1] == 0
    assert known("reshape", grid, fact, [36])[1] is None
    assert known("slice.Tensor", grid, fact, 0, 1, 9)[1] is None


def test_one_number_that_is_repeated_counts_nothing() -> None:
    one, fact = made(1)
    assert known("expand", one, fact, [5])[1] is None
    assert known("expand", one, 0, [5])[1] is None


def test_a_dtype_that_is_too_small_counts_nothing() -> None:
    many, fact = made(300)
    assert known("_to_copy", many, fact, dtype=torch.int16)[1] == 0
    assert known("_to_copy", many, fact, dtype=torch.int8)[1] is None
    assert known("_to_copy", many, fact, dtype=torch.bool)[1] is None
    assert made(9, dtype=torch.float64)[1] is None
    assert made(1, 9, name="arange.start")[1] is None
    assert made(0, 9, 2, name="arange.start_step")[1] is None


def test_no_op_makes_facts_raise() -> None:
    """Every sample's call, with every dim of every operand of integers known to count."""
    for sample in samples():
        flat = torch.utils._pytree.tree_leaves((sample.args, sample.kwargs))
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        results = sample.op(*sample.args, **sample.kwargs)
        of = results if isinstance(results, list | tuple) else [results]
        infos = tuple(Info(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else None for r in of)
        operands = tuple(Info(tuple(t.shape), t.dtype, 0 if t.ndim else None) for t in tensors)
        places = iter(operands)
        args = torch.utils._pytree.tree_map_only(torch.Tensor, lambda _, places=places: next(places), sample.args)
        iota_dim_of(OpCall(sample.op, tuple(args), sample.kwargs, operands, infos, 2))
    assert iota_dim(torch.arange(9).view(3, 3)) is None
