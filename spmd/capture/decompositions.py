"""Ops taken apart at capture, before anything is placed.

Three reasons: a mean over the batch is a sum divided by the *global* count, and only the sum can be computed per rank;
a loss backward that divides by the number of elements must divide by the global one; and an op without a rule goes
through as the ops it is made of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import OpOverload, core_aten_decompositions, get_decompositions, one_at_a_time
from ..rules import rule_of
from .embedding_bag import bags
from .fused_optimizers import fused
from .known_values import known_numbers
from .random_decompositions import random_table

aten = torch.ops.aten
Table = dict[Any, Callable[..., Any]]  # by op
_HALF = (torch.float16, torch.bfloat16)


def table() -> Table:
    """The decompositions of a capture: ours, torch's for reductions over the batch, torch's for ops without a rule."""
    without_rule = {op: how for op, how in _torch_table().items() if rule_of(op) is None and op not in _WRONG}
    return {**without_rule, **get_decompositions(_OVER_THE_BATCH), **random_table(), **_ours()}


def while_recorded() -> Table:
    """Ops taken apart in the first trace, where mutations are recorded.

    Those of batch norms write running statistics, which their schemas do not say; a ``GradScaler``'s write lists, as do
    those called ``_foreach`` or ``_fused``, in which each tensor may live somewhere else. Strides that only say anew in
    which order the dims of a tensor lie are those of eager here, and of other layouts later.
    """
    return {
        **one_at_a_time(),
        **get_decompositions([aten.native_batch_norm, aten.cudnn_batch_norm]),
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
        aten._amp_update_scale_.default: _update_scale,
        aten.as_strided.default: _as_strided,
        aten.as_strided_.default: _as_strided_,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
        **bags(),
        **fused(),
        **known_numbers(),
    }


def _unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Scale each gradient back in place, and note in ``found_inf`` whether one is not finite."""
    # Counts are sums, of which every rank has its share: one reduction for all gradients, empty shards or not.
    bad = torch.stack([(~gradient.isfinite()).sum() for gradient in gradients]).sum()
    found_inf.copy_(torch.maximum(found_inf, (bad != 0).to(found_inf.dtype)))
    for gradient in gradients:
        gradient.mul_(inverse_scale)


def _update_scale(
    scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> torch.Tensor:
    """Smaller after an overflow; larger after ``interval`` steps without one, if that is still finite."""
    found = found_inf != 0
    steps = tracker + 1
    full = steps == interval
    grown = (scale.double() * growth).to(scale.dtype)
    unless_found = torch.where(full & grown.isfinite(), grown, scale)
    scale.copy_(torch.where(found, (scale.double() * backoff).to(scale.dtype), unless_found))
    tracker.copy_(torch.where(found | full, torch.zeros_like(tracker), steps))
    return scale


def _as_strided(x: torch.Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> torch.Tensor:
    """Where all elements of a dense tensor are named anew, a view; torch's own pooling asks for that."""
    before, after = _memory_order(x.shape, x.stride()), _memory_order(size, stride)
    if (
        before is None
        or after is None
        or math.prod(size) != x.numel()
        or storage_offset not in (None, x.storage_offset())
    ):
        return NotImplemented  # type: ignore[no-any-return]
    flat = x.permute(before).view([size[d] for d in after])
    return flat.permute([after.index(d) for d in range(len(size))])


def _as_strided_(
    x: torch.Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Nothing, where only the strides of dims of size 1 change."""
    same = all(before == after for n, before, after in zip(x.shape, x.stride(), stride, strict=False) if n > 1)
    if tuple(size) != tuple(x.shape) or not same or storage_offset not in (None, x.storage_offset()):
        return NotImplemented  # type: ignore[no-any-return]
    return x


def _memory_order(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The dims from the outermost in memory to the innermost; None where there are gaps or overlaps."""
    order = sorted(range(len(size)), key=lambda d: (size[d] == 1, -stride[d]))
    step = 1
    for d in reversed(order):
        if size[d] != 1 and stride[d] != step:
            return None
        step *= size[d]
    return order


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``v`` and ``g``, where the weight is ``g * v / |v|``. Linear in ``grad``, so that shares of it will do."""
    along = (grad * v).sum([d for d in range(v.ndim) if d != dim], keepdim=True)
    return g / norms * (grad - v * (along / norms.square())), along / norms


@functools.cache
def _torch_table() -> Table:
    return dict(core_aten_decompositions().items())  # collected anew, slowly, at every call


# Taken apart by torch into what is another number, in 2.11 to 2.15: targets after the first -1 should not count.
_WRONG = {aten.multilabel_margin_loss_forward.default}

# Their kernels divide by the number of elements they see, or look at the whole batch at once.
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
        aten.masked_scatter.default: _masked_scatter,
        aten.masked_scatter_backward.default: _masked_scatter_backward,
    }


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A sum divided by a count that is known now; half precision sums in fp32, as torch's kernel does."""
    if not x.dtype.is_floating_point and not x.dtype.is_complex and dtype is None:
        return NotImplemented  # type: ignore[no-any-return]  # let torch say what is wrong
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
    squares = aten.sum.dim_IntList((x - mean).square(), dims, keepdim)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    return variance, mean if keepdim else mean.reshape(variance.shape)


def _vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """A sum of powers, or a maximum, of which every rank has its share; then the root."""
    target = dtype or x.dtype
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


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Each place of the mask takes its element of ``source``; only how many places earlier rows have is not its own."""
    x, mask = torch.broadcast_tensors(x, mask)
    if not source.numel():
        return x.clone()
    taken = source.reshape(-1)[_places(mask).clamp(0, source.numel() - 1)]
    return torch.where(mask, taken, x)


def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """What each element of ``source`` was given, zero for those that were not taken."""
    mask = mask.expand_as(grad)
    count = math.prod(sizes)
    places = _places(mask).clamp(0, max(count - 1, 0)).reshape(-1)
    given = torch.where(mask, grad, torch.zeros_like(grad)).reshape(-1)
    return grad.new_zeros(count).scatter_add(0, places, given).view(sizes)


def _places(mask: torch.Tensor) -> torch.Tensor:
    """For each true element how many are true before it, counted row by row so that rows may be split."""
    if mask.ndim == 0:
        return torch.zeros_like(mask, dtype=torch.long)
    inside = mask.reshape(len(mask), -1).long().cumsum(1)
    counts = mask.reshape(len(mask), -1).sum(1)
    return (inside - 1 + (counts.cumsum(0) - counts)[:, None]).view(mask.shape)


def _nll_loss(op: OpOverload) -> Callable[..., Any]:
    """A mean over the tokens that count is the sum over them divided by the sum of their weights.

    Without weights that is how many there are, which follows from the targets: known long before the loss.
    """

    def nll_loss(
        logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
    ) -> Any:
        if reduction != 1:
            return NotImplemented
        total, total_weight = op(logits, target, weight, 2, ignore_index)
        if weight is None:
            total_weight = (target.long() != ignore_index).sum().to(logits.dtype)
        return total / total_weight, total_weight

    return nll_loss


def _as_list(dim: Any) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim)
