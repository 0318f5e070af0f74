"""The formulas of torch's fused optimizer kernels: one set for each combination of their flags.

The one table of them: ``FuseUpdate`` matches a graph with it, a step that calls a kernel itself is decomposed by it,
and the certificate computes kernels by it on symbols. A kernel updates lists: parameters, then gradients, then a list
for each kind of state. Hyper-parameters are Python floats, bias corrections are computed per tensor in fp64 from an
fp32 count. The kernels exist for CPU and CUDA, in fp64, fp32, bf16 and fp16, in torch 2.11 to 2.15. They assume that
all lists have the same layout, and do not check it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ..ir.ops import find
from ..ir.schemas import schema
from .formula_terms import Term, lerp, maximum, sqrt, unknown

aten = torch.ops.aten

_FLAGS = (False, True)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """One op, for one combination of flags.

    ``updates``: by the name of a list, its new value as a formula over the unknowns ``p``, ``g``, the names of state
    and those of ``options``; ``p`` comes first. ``lists`` are the op's arguments; one that is in no formula is empty.
    ``options``: the op's numbers, each as the name of an unknown or as the number itself.
    """

    op: Any
    updates: dict[str, Any]
    lists: tuple[str, ...]
    options: dict[str, Any]
    counts: str | None = None  # the list of counts, which the op reads and does not write

    @property
    def op_with_tensor(self) -> Any:
        """The overload whose learning rate is a tensor; None in a torch that lacks it."""
        return find(f"{schema(self.op).name}.tensor_lr")

    @property
    def state(self) -> list[str]:
        """The lists of state in the formulas, counts included."""
        return [name for name in self.updates if name != "p"]

    def computes(self, val: torch.Tensor) -> bool:
        """Whether the op computes its formulas on tensors like this one.

        Kernels compute in fp32. Of fp16 that is something else: there the square of a small gradient is 0. On CPUs
        torch's SGD leaves whole vectors of bf16 as they were (pytorch/pytorch#191763; seen in 2.13).
        """
        is_wrong = self.op is aten._fused_sgd.default and val.dtype is torch.bfloat16 and val.device.type == "cpu"
        return val.dtype in _DTYPES and not is_wrong

    def has(self, options: Mapping[str, Any]) -> bool:
        """Whether the numbers that are no unknowns are these."""
        return all(isinstance(mine, str) or options.get(name) == mine for name, mine in self.options.items())


p, g, step, lr, eps = (unknown(name) for name in ("p", "g", "step", "lr", "eps"))
COUNT = unknown("count")
"""The number of this step, where counts are known after it; else it is one more than ``step``."""


def kernels(count: Term = step + 1) -> Iterator[Kernel]:
    """All of them. ``count``: the number of this step in the formulas."""
    yield from _adam(count)
    yield from _sgd()
    yield from _adagrad(count)


def kernel_of(op: Any, options: Mapping[str, Any]) -> Kernel | None:
    """The kernel that an op is with these options, its formulas over ``COUNT``; None for an op that is none."""
    if options.get("momentum") == 0:
        options = {**options, "dampening": 0.0, "nesterov": False, "is_first_step": False}  # without a meaning then
    name = schema(op).name
    return next((each for each in kernels(COUNT) if schema(each.op).name == name and each.has(options)), None)


def _adam(count: Term) -> Iterator[Kernel]:
    """Adam and AdamW. Kingma and Ba 2015; Loshchilov and Hutter 2019; amsgrad: Reddi et al. 2018."""
    mean, square, largest = unknown("mean"), unknown("square"), unknown("largest")
    beta1, beta2, decay = unknown("beta1"), unknown("beta2"), unknown("decay")
    for op, maximize, amsgrad, decays in product((aten._fused_adamw, aten._fused_adam), _FLAGS, _FLAGS, _FLAGS):
        decoupled = op is aten._fused_adamw
        if decoupled and not decays:
            continue  # both are the same then
        gradient = _decayed(-g if maximize else g, decay if decays and not decoupled else None)
        new_mean = lerp(mean, gradient, 1 - beta1)
        new_square = square * beta2 + gradient * gradient * (1 - beta2)
        new_largest = maximum(largest, new_square)
        root = sqrt(new_largest if amsgrad else new_square)
        start = p * (1 - lr * decay) if decoupled else p
        state = {"mean": new_mean, "square": new_square} | ({"largest": new_largest} if amsgrad else {})
        for step_of in (_plain_step, _folded_step):
            new = step_of(start, new_mean, root, 1 - beta1**count, 1 - beta2**count)
            yield Kernel(
                op.default,
                {"p": new, **state, "step": count},
                ("p", "g", "mean", "square", "largest", "step"),
                {
                    **{"lr": "lr", "beta1": "beta1", "beta2": "beta2", "eps": "eps", "amsgrad": amsgrad},
                    **{"weight_decay": "decay" if decays else 0.0, "maximize": maximize},
                },
                counts="step",
            )


def _folded_step(start: Any, mean: Any, root: Any, correction1: Any, correction2: Any) -> Any:
    """The rate is folded into the denominator, as torch does where counts are tensors."""
    rate = -(lr / correction1)
    return start + mean / (root / (sqrt(correction2) * rate) + eps / rate)


def _plain_step(start: Any, mean: Any, root: Any, correction1: Any, correction2: Any) -> Any:
    return start + mean / (root / sqrt(correction2) + eps) * -(lr / correction1)


def _sgd() -> Iterator[Kernel]:
    """Stochastic gradient descent. In the first step, the momentum is the gradient."""
    buffer, momentum, dampening, decay = (unknown(x) for x in ("buffer", "momentum", "dampening", "decay"))
    for maximize, decays, moves, nesterov, dampens, first in product(*[_FLAGS] * 6):
        if (nesterov or dampens or first) and not moves:
            continue
        gradient = _decayed(-g if maximize else g, decay if decays else None)
        moved = buffer * momentum + (gradient * (1 - dampening) if dampens else gradient)
        moving = gradient if first else moved
        along = (gradient + moving * momentum if nesterov else moving) if moves else gradient
        for new in (p + along * -lr, p - along * lr):
            yield Kernel(
                aten._fused_sgd.default,
                {"p": new} | ({"buffer": moving} if moves else {}),
                ("p", "g", "buffer"),
                {
                    **{"weight_decay": "decay" if decays else 0.0, "momentum": "momentum" if moves else 0.0},
                    **{"dampening": "dampening" if dampens else 0.0, "nesterov": nesterov, "maximize": maximize},
                    **{"lr": "lr", "is_first_step": first},
                },
            )


def _adagrad(count: Term) -> Iterator[Kernel]:
    """Adagrad. Duchi et al. 2011."""
    total, rate_decay, decay = unknown("total"), unknown("rate_decay"), unknown("decay")
    for maximize, decays in product(_FLAGS, _FLAGS):
        gradient = _decayed(-g if maximize else g, decay if decays else None)
        new_total = total + gradient * gradient
        rate = lr / ((count - 1) * rate_decay + 1)
        yield Kernel(
            aten._fused_adagrad.default,
            {"p": p + gradient / (sqrt(new_total) + eps) * -rate, "total": new_total, "step": count},
            ("p", "g", "total", "step"),
            {
                **{"lr": "lr", "lr_decay": "rate_decay", "weight_decay": "decay" if decays else 0.0, "eps": "eps"},
                "maximize": maximize,
            },
            counts="step",
        )


def _decayed(gradient: Any, decay: Any) -> Any:
    return gradient if decay is None else gradient + p * decay
