"""Decompose random ops into simpler ones, of which each rank draws only its part.

The others (``poisson``, ``binomial``, ``_standard_gamma``, ``_sample_dirichlet``, sampling with replacement,
``randperm``) use a number of draws that depends on values, or relate all elements: every rank runs them whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def random_table() -> dict[Any, Callable[..., Any]]:
    """The decompositions, by op."""
    return {
        aten.normal.Tensor_float: lambda mean, std=1.0: torch.randn_like(mean) * std + mean,
        aten.normal.float_Tensor: lambda mean, std: torch.randn_like(std) * std + mean,
        aten.normal.Tensor_Tensor: _normal,
        aten.normal.float_float: lambda mean, std, size, **made: torch.randn(size, **made) * std + mean,
        aten.bernoulli.Tensor: lambda x, p: aten.bernoulli.default(p.expand_as(x)).to(x.dtype),
        aten.multinomial.default: _multinomial,
        aten.rrelu_with_noise_functional.default: _rrelu,
        aten.rrelu_with_noise_backward.default: _rrelu_backward,
    }


def in_place_random_table() -> dict[Any, Callable[..., Any]]:
    """The decomposition of ``random_(low, high)``: FX cannot print its overload ``from``, a keyword of Python."""
    return {getattr(aten.random_, "from"): _random_from}


def _random_from(x: torch.Tensor, low: int, high: int | None, *, generator: None = None) -> torch.Tensor:
    return x.random_(high - low).add_(low) if high is not None else NotImplemented


def _normal(mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return torch.randn_like(mean.expand(shape), memory_format=torch.contiguous_format) * std + mean


def _multinomial(weights: torch.Tensor, count: int, replacement: bool = False) -> torch.Tensor:
    """Sample by an exponential race: the first to arrive, where each has its weight as the rate."""
    if replacement and count > 1:
        return NotImplemented  # type: ignore[no-any-return]
    race = weights / aten.exponential.default(torch.empty_like(weights))
    chosen: torch.Tensor = race.argmax(-1, keepdim=True) if count == 1 else race.topk(count).indices
    return chosen


def _rrelu(
    x: torch.Tensor, noise: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale negative numbers by random slopes, returned for backward; outside of training by their mean."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise.clone()
    slopes = torch.where(x <= 0, aten.uniform.default(torch.empty_like(x), lower, upper), 1.0)
    return x * slopes, slopes


def _rrelu_backward(
    grad: torch.Tensor, x: torch.Tensor, noise: torch.Tensor, lower: float, upper: float, training: bool, *_: bool
) -> torch.Tensor:
    return grad * noise if training else torch.where(x > 0, grad, grad * ((lower + upper) / 2))
