"""Random ops taken apart into simpler ones, which are drawn where their part is needed.

What is left (``poisson``, ``binomial``, ``_standard_gamma``, ``_sample_dirichlet``, sampling with replacement,
``randperm``) takes a number of draws that depends on what was drawn, or relates all elements: it runs whole on every
rank.
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


def before_functionalization() -> dict[Any, Callable[..., Any]]:
    """``random_(low, high)`` is the overload ``from``, which FX cannot write down: ``from`` is a keyword in Python."""
    return {getattr(aten.random_, "from"): _random_from}


def _random_from(x: torch.Tensor, low: int, high: int | None, *, generator: None = None) -> torch.Tensor:
    return x.random_(high - low).add_(low) if high is not None else NotImplemented


def _normal(mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return torch.randn_like(mean.expand(shape), memory_format=torch.contiguous_format) * std + mean


def _multinomial(weights: torch.Tensor, count: int, replacement: bool = False) -> torch.Tensor:
    """The first to arrive, when each waits an exponential time with its weight as the rate."""
    if replacement and count > 1:
        return NotImplemented  # type: ignore[no-any-return]
    race = weights / aten.exponential.default(torch.empty_like(weights))
    chosen: torch.Tensor = race.argmax(-1, keepdim=True) if count == 1 else race.topk(count).indices
    return chosen


def _rrelu(
    x: torch.Tensor, noise: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative numbers are scaled by random slopes, which come back for backward; outside of training by their mean."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise.clone()
    slopes = torch.where(x <= 0, aten.uniform.default(torch.empty_like(x), lower, upper), 1.0)
    return x * slopes, slopes


def _rrelu_backward(
    grad: torch.Tensor, x: torch.Tensor, noise: torch.Tensor, lower: float, upper: float, training: bool, *_: bool
) -> torch.Tensor:
    return grad * noise if training else torch.where(x > 0, grad, grad * ((lower + upper) / 2))
