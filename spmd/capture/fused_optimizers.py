"""Decompose fused optimizer ops (``torch._fused_adamw_``) into their arithmetic, tensor by tensor.

torch's own optimizers are traced without them; these are for steps that call them directly. The tensors of a list may
have different placements, so the ops are decomposed in the first trace, like ``_foreach``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Write = Callable[[Tensor, Tensor], None]


def fused_table() -> dict[Any, Callable[..., None]]:
    """The decompositions, by op, for learning rates that are numbers and that are tensors."""
    steps: dict[Any, Callable[..., None]] = {
        aten._fused_adam_: partial(adam, decoupled=False),
        aten._fused_adamw_: partial(adam, decoupled=True),
        aten._fused_sgd_: sgd,
        aten._fused_adagrad_: adagrad,
    }
    return {getattr(packet, name): step for packet, step in steps.items() for name in packet.overloads()}


def adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    largest: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    decoupled: bool,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adam, or AdamW if ``decoupled``. ``steps`` count this step already."""
    write = partial(_write, found_inf)
    for k, (param, average, square, step) in enumerate(zip(params, averages, squares, steps, strict=True)):
        decayed, grad = param, _gradient(grads[k], grad_scale, maximize, write)
        if weight_decay != 0 and decoupled:
            decayed = param * (1 - lr * weight_decay)
        elif weight_decay != 0:
            grad = grad + weight_decay * param
        mean, square_mean = average.lerp(grad, 1 - beta1), beta2 * square + (1 - beta2) * grad * grad
        beyond = torch.maximum(largest[k], square_mean) if amsgrad else square_mean
        done = step.double()
        denominator = beyond.sqrt() / (1 - beta2**done).sqrt() + eps
        write(param, decayed - lr / (1 - beta1**done) * mean / denominator)
        write(average, mean)
        write(square, square_mean)
        if amsgrad:
            write(largest[k], beyond)


def sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    lr: Any,
    weight_decay: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """SGD; in the first step the momentum is the gradient."""
    write = partial(_write, found_inf)
    for k, param in enumerate(params):
        grad = _gradient(grads[k], grad_scale, maximize, write)
        if weight_decay != 0:
            grad = grad + weight_decay * param
        if momentum != 0:
            moving = grad if is_first_step else momentum * buffers[k] + (1 - dampening) * grad
            grad = grad + momentum * moving if nesterov else moving
            write(buffers[k], moving)
        write(param, param - lr * grad)


def adagrad(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adagrad. ``steps`` count this step already."""
    write = partial(_write, found_inf)
    for param, given, total, step in zip(params, grads, sums, steps, strict=True):
        grad = _gradient(given, grad_scale, maximize, write)
        if weight_decay != 0:
            grad = grad + weight_decay * param
        squares = total + grad * grad
        rate = lr / (1 + (step.double() - 1) * lr_decay)
        write(param, param - rate * grad / (squares.sqrt() + eps))
        write(total, squares)


def _gradient(grad: Tensor, scale: Tensor | None, maximize: bool, write: Write) -> Tensor:
    """The unscaled gradient, negated to maximize; a scaled gradient is written back unscaled."""
    unscaled = grad if scale is None else grad / scale
    if scale is not None:
        write(grad, unscaled)
    return -unscaled if maximize else unscaled


def _write(found_inf: Tensor | None, old: Tensor, new: Tensor) -> None:
    """Write ``new`` into ``old``, unless some gradient is infinite."""
    old.copy_(new if found_inf is None else torch.where(found_inf == 1, old, new))
