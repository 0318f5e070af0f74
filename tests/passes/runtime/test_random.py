"""Random ops as functions of a seed: their dependencies and their distributions."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from passes import SpmdError
from passes.runtime.random import BY_POSITION, draw, draw_from_tensor

aten = torch.ops.aten
F64 = torch.float64


def zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=F64)


# By name: op, its arguments for a region of a shape, expected mean and variance of its numbers.
OPS: dict[str, tuple[Any, Any, float, float]] = {
    "rand": (aten.rand.default, lambda s: ((list(s),), {"dtype": F64}), 1 / 2, 1 / 12),
    "randn": (aten.randn.default, lambda s: ((list(s),), {"dtype": F64}), 0, 1),
    "randint": (aten.randint.default, lambda s: ((7, list(s)), {}), 3, 4),
    "randint low": (aten.randint.low, lambda s: ((3, 10, list(s)), {"dtype": torch.int32}), 6, 4),
    "rand_like": (aten.rand_like.default, lambda s: ((zeros(s),), {}), 1 / 2, 1 / 12),
    "randn_like": (aten.randn_like.default, lambda s: ((zeros(s),), {"dtype": torch.float32}), 0, 1),
    "randint_like": (aten.randint_like.default, lambda s: ((zeros(s), 7), {}), 3, 4),
    "randint_like low": (aten.randint_like.low_dtype, lambda s: ((zeros(s), 3, 10), {}), 6, 4),
    "uniform": (aten.uniform.default, lambda s: ((zeros(s), -1.0, 3.0), {}), 1, 16 / 12),
    "normal": (aten.normal_functional.default, lambda s: ((zeros(s), 2.0, 3.0), {}), 2, 9),
    "bernoulli": (aten.bernoulli.p, lambda s: ((zeros(s), 0.3), {}), 0.3, 0.21),
    "bernoulli of": (aten.bernoulli.default, lambda s: ((zeros(s) + 0.3,), {}), 0.3, 0.21),
    "exponential": (aten.exponential.default, lambda s: ((zeros(s), 2.0), {}), 1 / 2, 1 / 4),
    "geometric": (aten.geometric.default, lambda s: ((zeros(s), 0.4), {}), 2.5, 0.6 / 0.16),
    "log_normal": (aten.log_normal.default, lambda s: ((zeros(s), 0.0, 0.25), {}), 1.031743, 0.068654),
    "random to": (aten.random.to, lambda s: ((zeros(s), 7), {}), 3, 4),
    "random from": (getattr(aten.random, "from"), lambda s: ((zeros(s), 3, 10), {}), 6, 4),
    "native_dropout": (aten.native_dropout.default, lambda s: ((zeros(s) + 1, 0.2, True), {}), 1, 0.25),
}
BOTH = [0, BY_POSITION]


def drawn(name: str, seed: int, shape: tuple[int, ...], starts: tuple[int, ...] = (), whole: Any = None) -> Tensor:
    op, arguments, _, _ = OPS[name]
    region = tuple(zip(starts or (0,) * len(shape), shape, whole or shape, strict=True))
    args, kwargs = arguments(shape)
    result = draw(op, seed, 4, region, *args, **kwargs)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", OPS)
def test_mean_and_variance(name: str, kind: int) -> None:
    mean, variance = OPS[name][2:]
    found = drawn(name, 11 + kind, (300, 400)).double()
    margin = 6 * math.sqrt(variance / found.numel())
    assert abs(found.mean().item() - mean) < margin
    assert abs(found.var().item() / variance - 1) < 0.05


@pytest.mark.parametrize("name", OPS)
def test_by_position_a_region_gets_its_numbers_of_the_whole(name: str) -> None:
    whole = drawn(name, BY_POSITION + 5, (7, 6))
    for dim, cuts in ((0, [0, 4, 7]), (1, [0, 1, 1, 6])):
        parts = []
        for start, end in pairwise(cuts):
            shape, starts = [7, 6], [0, 0]
            shape[dim], starts[dim] = end - start, start
            parts.append(drawn(name, BY_POSITION + 5, tuple(shape), tuple(starts), (7, 6)))
        assert torch.equal(torch.cat(parts, dim), whole)
    assert whole.dtype == drawn(name, 5, (7, 6)).dtype


@pytest.mark.parametrize("name", OPS)
def test_by_position_a_dim_may_be_given_as_factors(name: str) -> None:
    op, arguments, _, _ = OPS[name]
    whole = drawn(name, BY_POSITION + 5, (6, 5))
    args, kwargs = arguments((3, 5))
    part = draw(op, BY_POSITION + 5, 4, ((0, 3, 3), (1, 1, 2), (0, 5, 5)), *args, **kwargs)
    assert torch.equal(part[0] if isinstance(part, tuple) else part, whole[1::2])


@pytest.mark.parametrize("kind", BOTH)
def test_a_draw_depends_on_seed_number_and_region(kind: int) -> None:
    """It does not depend on the default generator, and leaves that as it was."""
    state = torch.get_rng_state()
    first = draw(aten.rand.default, 1 + kind, 2, ((0, 4, 8),), [4])
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(first, draw(aten.rand.default, 1 + kind, 2, ((0, 4, 8),), [4]))
    for seed, number, start in ((2, 2, 0), (1, 3, 0), (1, 2, 4)):
        assert not torch.equal(first, draw(aten.rand.default, seed + kind, number, ((start, 4, 8),), [4]))


def test_a_seed_that_is_a_tensor_gives_the_same_numbers_by_position() -> None:
    """What runs on an accelerator, where the host cannot read the seed."""
    region = ((2, 3, 8), (0, 5, 5))
    for seed in (BY_POSITION + 5, BY_POSITION + (1 << 61) + 12345):
        expected = draw(aten.rand.default, seed, 4, region, [3, 5])
        assert torch.equal(draw_from_tensor(aten.rand.default, torch.tensor(seed), 4, region, [3, 5]), expected)
    with pytest.raises(SpmdError, match=r"aten\.poisson\.default draws with a kernel of its own"):
        draw_from_tensor(aten.poisson.default, torch.tensor(5), 4, ((0, 4, 4),), torch.ones(4))


def test_by_position_numbers_cover_the_range_of_the_dtype() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        unit = draw(aten.rand.default, BY_POSITION, 0, ((0, 50_000, 50_000),), [50_000], dtype=dtype)
        assert unit.dtype == dtype and unit.min() >= 0 and unit.max() < 1
    anything = draw(aten.random.default, BY_POSITION, 0, ((0, 9999, 9999),), torch.zeros(9999, dtype=torch.uint8))
    assert anything.min() == 0 and anything.max() == 255
    median = draw(aten.cauchy.default, BY_POSITION, 0, ((0, 9999, 9999),), torch.zeros(9999), 3.0, 2.0).median()
    assert abs(median - 3) < 0.2


def test_by_position_like_ops_keep_the_strides() -> None:
    x = torch.zeros(3, 4).t()
    assert draw(aten.rand_like.default, BY_POSITION, 0, ((0, 4, 4), (0, 3, 3)), x).stride() == x.stride()


def test_dropout_of_everything_and_of_nothing() -> None:
    x = torch.ones(4, 4)
    for p, value in ((1.0, 0.0), (0.0, 1.0)):
        out, _ = draw(aten.native_dropout.default, BY_POSITION, 0, ((0, 4, 4), (0, 4, 4)), x, p, True)
        assert torch.equal(out, value * x)
    out, mask = draw(aten.native_dropout.default, BY_POSITION, 0, ((0, 4, 4), (0, 4, 4)), x, 0.5, False)
    assert torch.equal(out, x) and mask.all()


def test_an_op_without_numbers_by_position_is_refused_where_it_is_split() -> None:
    rates = torch.full((4,), 3.0)
    draw(aten.poisson.default, BY_POSITION, 0, ((0, 4, 4),), rates)
    with pytest.raises(SpmdError, match=r"invariant=True, but aten\.poisson\.default"):
        draw(aten.poisson.default, BY_POSITION, 0, ((4, 4, 8),), rates)
