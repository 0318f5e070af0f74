"""The attention kernels of GPUs on the CPU: the signatures, layouts and demands of torch's, computed from scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FLASH, EFFICIENT, CUDNN = (f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn"))


@contextmanager
def kernels_of_gpus() -> Iterator[None]:
    """Let the kernels run on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, made in {FLASH: flash, EFFICIENT: efficient, CUDNN: cudnn}.items():
            library.impl(name, made, "CPU")
        for name, made in {FLASH: flash_backward, EFFICIENT: efficient_backward, CUDNN: cudnn_backward}.items():
            library.impl(f"{name}_backward", made, "CPU")
        yield
    finally:
        library._destroy()


def flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert not dropout and not debug
    out, sums = _computed(query, key, value, None, causal, scale)
    return out, sums, None, None, query.shape[2], key.shape[2], _state(2), _state(), query.new_empty(0)


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Rows of the log-sum-exp are padded to a multiple of 32, by infinity; heads lie within rows of the output."""
    assert not dropout
    out, found = _computed(query, key, value, bias, causal, scale)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    padded = torch.nn.functional.pad(found, (0, -found.shape[2] % 32), value=torch.inf)
    return out, padded if sums else padded[..., :0], _state(), _state()


def cudnn(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0,
    causal: bool = False, debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The log-sum-exp has a dim more; there is none for a single key."""
    assert not dropout and not debug and key.shape[2] > 1
    out, found = _computed(query, key, value, bias, causal, scale)
    found = found.unsqueeze(-1) if sums else found.new_empty(0)
    return out, found, None, None, query.shape[2], key.shape[2], _state(), _state(), None


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, _: Any, __: Any,
    max_q: int, max_k: int, dropout: float, causal: bool, *state: Tensor, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    return _gradients(grad, query, key, value, None, out, sums, causal, scale)[:3]


def efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor,
    seed: Tensor, offset: Tensor, dropout: float, needed: list[bool], causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert sums.shape[2] == -(-query.shape[2] // 32) * 32 and sums.is_contiguous()
    # Seen on an H100 in bf16: the kernel takes heads to lie within rows, and read beyond the end of another layout.
    assert out.stride()[1:] == (out.shape[3], out.shape[1] * out.shape[3], 1)
    sums = sums[..., : query.shape[2]].contiguous()
    *found, of_bias = _gradients(grad, query, key, value, bias, out, sums, causal, scale)
    return *found, of_bias if needed[3] else None


def cudnn_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, _: Any, __: Any, max_q: int, max_k: int, dropout: float, causal: bool,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert (max_q, max_k) == (query.shape[2], key.shape[2]) and key.shape[2] > 1
    return _gradients(grad, query, key, value, bias, out, sums.squeeze(-1), causal, scale)[:3]


def _state(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    found = query @ _as_many(key, query).mT * (scale or query.shape[-1] ** -0.5)
    found = found if bias is None else found + bias
    if causal:
        assert query.shape[2] == key.shape[2], "kernels differ in which corner they count from"
        found = found.masked_fill(torch.ones(found.shape[2:]).tril().logical_not(), -torch.inf)
    return found


def _as_many(key: Tensor, query: Tensor) -> Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def _computed(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    scores = _scores(*(x.to(_wide(x)) for x in (query, key)), bias, causal, scale)
    out = scores.softmax(-1) @ _as_many(value, query).to(scores.dtype)
    return out.to(query.dtype), scores.logsumexp(-1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor,
    causal: bool, scale: float | None,
) -> list[Tensor]:  # fmt: skip
    """Those of query, key, value and bias, by the log-sum-exp of all keys, of which these may be some."""
    assert sums.is_contiguous() and grad.stride(-1) == 1
    wide, heads = _wide(query), key.shape[1]
    grad, query, keys, values, out = (x.to(wide) for x in (grad, query, key, value, out))
    weights = (_scores(query, keys, bias, causal, scale) - sums.unsqueeze(-1)).exp()
    of_scores = weights * (grad @ _as_many(values, query).mT - (grad * out).sum(-1, keepdim=True))
    factor = scale or query.shape[-1] ** -0.5
    of_query, of_key, of_value = (
        of_scores @ _as_many(keys, query) * factor,
        of_scores.mT @ query * factor,
        weights.mT @ grad,
    )
    of_key, of_value = (x.unflatten(1, (heads, -1)).sum(2) for x in (of_key, of_value))
    found = [of_query, of_key, of_value]
    of_bias = of_scores if bias is None else of_scores.sum_to_size(bias.shape)
    return [*(x.to(key.dtype) for x in found), of_bias]
