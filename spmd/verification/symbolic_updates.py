"""The fused kernels of optimizers on symbols: one function for each, on one parameter and its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .symbols import minus, number, over, plus, power, times

Values = dict[str, Tensor]  # symbols by the names of the op's arguments; of lists, those of one entry

_ONE, _HALF = torch.tensor(number(1)), torch.tensor(number(0.5))
_FOR_SCALERS = ("grad_scale", "found_inf")


@dataclass(frozen=True)
class Update:
    """``results``: the new values, for those lists that the kernel writes. ``count``: the list of counted steps.

    ``setting``: a flag for which the kernel is not described. ``exact``: new parameters have no roots in them.
    """

    results: Callable[[Values], Values]
    count: str = ""
    setting: str = ""
    exact: bool = False


def why_unknown(update: Update, kwargs: dict[str, object]) -> str:
    """The part of a call that is not described; empty for none."""
    given = [name for name in (*_FOR_SCALERS, update.setting) if kwargs.get(name) not in (None, False)]
    return f"it is not described with {' and '.join(given)}" if given else ""


def _gradient(x: Values) -> Tensor:
    return minus(torch.tensor(0), x["grads"]) if int(x["maximize"]) else x["grads"]


def _decayed(x: Values) -> Tensor:
    return plus(_gradient(x), times(x["weight_decay"], x["self"]))


def _adam(x: Values) -> Values:
    return _adam_from(x, x["self"], _decayed(x))


def _adamw(x: Values) -> Values:
    param = minus(x["self"], times(times(x["lr"], x["weight_decay"]), x["self"]))
    return _adam_from(x, param, _gradient(x))


def _adam_from(x: Values, param: Tensor, grad: Tensor) -> Values:
    one, two, step = x["beta1"], x["beta2"], x["state_steps"]
    mean = plus(x["exp_avgs"], times(minus(_ONE, one), minus(grad, x["exp_avgs"])))
    square = plus(times(x["exp_avg_sqs"], two), times(minus(_ONE, two), times(grad, grad)))
    first, second = minus(_ONE, power(one, step)), minus(_ONE, power(two, step))
    new: Values = {"exp_avgs": mean, "exp_avg_sqs": square}
    root = power(square, _HALF)
    scaled = plus(over(root, power(second, _HALF)), x["eps"])
    return new | {"self": minus(param, times(over(x["lr"], first), over(mean, scaled)))}


def _sgd(x: Values) -> Values:
    grad = _decayed(x)
    if "momentum_buffer_list" not in x:
        return {"self": minus(x["self"], times(x["lr"], grad))}
    moved = plus(times(x["momentum_buffer_list"], x["momentum"]), times(minus(_ONE, x["dampening"]), grad))
    moving = grad if int(x["is_first_step"]) else moved
    along = plus(grad, times(x["momentum"], moving)) if int(x["nesterov"]) else moving
    return {"self": minus(x["self"], times(x["lr"], along)), "momentum_buffer_list": moving}


def _adagrad(x: Values) -> Values:
    grad, before = _decayed(x), minus(x["state_steps"], _ONE)
    total = plus(x["state_sums"], times(grad, grad))
    rate = over(x["lr"], plus(times(before, x["lr_decay"]), _ONE))
    step = times(rate, over(grad, plus(power(total, _HALF), x["eps"])))
    return {"self": minus(x["self"], step), "state_sums": total}


UPDATES: dict[str, Update] = {
    "_fused_adam": Update(_adam, "state_steps", "amsgrad"),
    "_fused_adamw": Update(_adamw, "state_steps", "amsgrad"),
    "_fused_sgd": Update(_sgd, exact=True),
    "_fused_adagrad": Update(_adagrad, "state_steps"),
}
"""By the name of the op."""
