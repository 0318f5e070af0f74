"""Decompositions at capture, before anything has a placement.

Three reasons: a mean over the batch is a sum divided by the *global* count, and only the sum can be computed per rank;
a loss backward that divides by the number of elements must divide by the global one; and an op without a rule is
replaced by the ops that it is composed of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from .._torch import OpOverload, core_aten_decompositions, foreach_kernels, get_decompositions
from ..rules import rule_of
from ..rules.registry import RULES, TAGGED
from .embedding_bag import embedding_bag_table
from .fused_optimizers import fused_decompositions
from .random_decompositions import in_place_random_table, random_table
from .strided_views import strided_views_table
from .values.ctc_loss import ctc_loss_table
from .values.known_masks import known_mask_table
from .values.known_values import known_numbers

aten = torch.ops.aten
Table = dict[Any, Callable[..., Any]]  # by op
_HALF = (torch.float16, torch.bfloat16)


def second_trace_table() -> Table:
    """The decompositions of the second trace: ours, torch's for reductions over the batch, torch's without a rule."""
    return {
        **_without_rule(len(RULES), len(TAGGED)),
        **_torch_decompositions(*_OVER_THE_BATCH),
        **random_table(),
        **strided_views_table(),
        **_ours(),
    }


def first_trace_table() -> Table:
    """The decompositions of the first trace, which records mutations.

    Batch norms write running statistics, which their schemas do not show. A ``GradScaler``'s ops write lists, as do
    those called ``_foreach`` or ``_fused``, in which each tensor may have another placement. ``as_strided`` refers to
    the strides of eager, which the tensors have here but not later.
    """
    return {
        **foreach_kernels(),
        **_torch_decompositions(aten.native_batch_norm, aten.cudnn_batch_norm),
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
        aten._amp_update_scale_.default: _update_scale,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
        **strided_views_table(),
        **in_place_random_table(),
        **embedding_bag_table(),
        **ctc_loss_table(),
        **fused_decompositions(),
        **known_numbers(),
        **known_mask_table(),
    }


def _unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Unscale each gradient in place, and set ``found_inf`` if one is not finite."""
    # Counts are sums, of which every rank has its share: one reduction for all gradients, empty shards or not.
    bad = torch.stack([(~gradient.isfinite()).sum() for gradient in gradients]).sum()
    found_inf.copy_(torch.maximum(found_inf, (bad != 0).to(found_inf.dtype)))
    for gradient in gradients:
        gradient.mul_(inverse_scale)


def _update_scale(
    scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> torch.Tensor:
    """Shrink the scale after an overflow; grow it after ``interval`` steps without one, if it stays finite."""
    found = found_inf != 0
    steps = tracker + 1
    full = steps == interval
    grown = (scale.double() * growth).to(scale.dtype)
    unless_found = torch.where(full & grown.isfinite(), grown, scale)
    scale.copy_(torch.where(found, (scale.double() * backoff).to(scale.dtype), unless_found))
    tracker.copy_(torch.where(found | full, torch.zeros_like(tracker), steps))
    return scale


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``v`` and ``g`` of a weight ``g * v / |v|``; linear in ``grad``, so pending sums pass through."""
    along = (grad * v).sum([d for d in range(v.ndim) if d != dim], keepdim=True)
    return g / norms * (grad - v * (along / norms.square())), along / norms


@functools.lru_cache(maxsize=1)
def _without_rule(rules: int, tagged: int) -> Table:
    """Those of torch for ops that have no rule, as long as there are so many: none is ever replaced."""
    return {op: function for op, function in _torch_table().items() if rule_of(op) is None and op not in _WRONG}


@functools.cache
def _torch_table() -> Table:
    return dict(core_aten_decompositions().items())  # torch collects it anew, slowly, at every call


@functools.cache
def _torch_decompositions(*ops: Any) -> Table:
    return get_decompositions(ops)  # torch goes through all that it has at every call


# Decomposed by torch into another number, in 2.11 to 2.15: targets after the first -1 should not count.
_WRONG = {aten.multilabel_margin_loss_forward.default}

# Ops whose kernels divide by the number of elements they see, or read the whole batch at once.
_OVER_THE_BATCH = [
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.l1_loss,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.batch_norm_backward,
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
]


def _ours() -> Table:
    return {
        aten.mean.default: _mean,
        aten.mean.dim: _mean,
        aten.linalg_vector_norm.default: _vector_norm,
        aten.var_mean.correction: _var_mean,
        aten.var.correction: lambda *args, **kwargs: _var_mean(*args, **kwargs)[0],
        aten.std.correction: lambda *args, **kwargs: _var_mean(*args, **kwargs)[0].sqrt(),
        aten.nll_loss_forward.default: _nll_loss(aten.nll_loss_forward.default),
        aten.nll_loss2d_forward.default: _nll_loss(aten.nll_loss2d_forward.default),
        aten.multi_margin_loss_backward.default: _multi_margin_backward,
    }


def _multi_margin_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    p: float,
    margin: float,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    """Each class within the margin of its row's own one is pushed down, and that one up by their sum."""
    rows, own = x.reshape(-1, x.shape[-1]), target.reshape(-1, 1)
    gap = margin - rows.gather(1, own) + rows
    down = (gap > 0).to(x.dtype) if p == 1 else 2 * gap.clamp(min=0)
    down = (down if weight is None else down * weight[own]) / x.shape[-1]
    is_own = torch.arange(x.shape[-1], device=x.device) == own
    down = down.masked_fill(is_own, 0)
    found = torch.where(is_own, -down.sum(1, keepdim=True), down)
    scale = grad / rows.shape[0] if reduction == 1 else grad  # 1 is the mean
    return (found * scale.reshape(-1, 1)).reshape(x.shape)


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A sum divided by a known count; half precision is summed in fp32, as in torch's kernel."""
    if not x.dtype.is_floating_point and not x.dtype.is_complex and dtype is None:
        return NotImplemented  # type: ignore[no-any-return]  # let torch raise
    target = dtype or x.dtype
    dims = list(range(x.ndim)) if dim is None or dim == [] else [d % max(x.ndim, 1) for d in _as_list(dim)]
    count = math.prod(x.shape[d] for d in dims) if x.ndim else 1
    inner = torch.float32 if target in _HALF else target
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=inner)
    mean: torch.Tensor = total / count if count else total * math.nan
    return mean.to(target)


def _var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(range(x.ndim)) if dim is None or dim == [] else [d % max(x.ndim, 1) for d in _as_list(dim)]
    count = math.prod(x.shape[d] for d in dims)
    mean = _mean(x, dims, True)
    away = x - mean
    square = torch.view_as_real(away).square().sum(-1) if x.dtype.is_complex else away.square()
    squares = aten.sum.dim_IntList(square, dims, keepdim)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    return variance, mean if keepdim else mean.reshape(variance.shape)


def _vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """A sum of powers or a maximum, to which every rank contributes; then the root. Real, also of complex numbers."""
    x = x.to(dtype or x.dtype).abs() if x.dtype.is_complex else x
    target = x.dtype if dtype is None or dtype.is_complex else dtype
    inner = torch.float32 if target in _HALF else target
    dims = list(range(x.ndim)) if dim is None else [d % max(x.ndim, 1) for d in _as_list(dim)]
    if ord in (math.inf, -math.inf):
        reduce = aten.amax if ord > 0 else aten.amin
        return reduce(x.abs(), dims, keepdim).to(target)
    size = x.to(inner).abs()
    if ord == 0:
        return aten.sum.dim_IntList((size != 0).to(inner), dims, keepdim).to(target)
    if ord == 1:
        return aten.sum.dim_IntList(size, dims, keepdim).to(target)
    if ord == 2:
        return aten.sum.dim_IntList(size * size, dims, keepdim).sqrt().to(target)
    return aten.sum.dim_IntList(size.pow(ord), dims, keepdim).pow(1.0 / ord).to(target)


def _nll_loss(op: OpOverload) -> Callable[..., Any]:
    """A mean over tokens as their sum divided by the sum of their weights.

    That does not depend on the loss: without weights it is the number of targets that are not ignored.
    """

    def nll_loss(
        logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
    ) -> Any:
        if reduction != 1:
            return NotImplemented
        total, _ = op(logits, target, weight, 2, ignore_index)
        counts = target.long() != ignore_index
        if weight is None:
            total_weight = counts.sum().to(logits.dtype)
        else:
            total_weight = torch.where(counts, weight[torch.where(counts, target.long(), 0)], 0).sum()
        return total / total_weight, total_weight

    return nll_loss


def _as_list(dim: Any) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim)
