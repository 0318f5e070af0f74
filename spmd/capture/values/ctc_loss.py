"""``ctc_loss`` while a step is traced: lengths are tensors, split as the rows are, and shapes follow from shapes.

torch's op takes lengths as numbers, which no rank could have its own of, and returns memory as long as the longest
target. ``passes/runtime/ctc_loss.py`` has ops whose results have known shapes, for targets that are padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from passes.runtime.ctc_loss import ctc_loss, ctc_loss_backward

from ..._torch import TorchFunctionMode

aten = torch.ops.aten


class LengthsAsTensors(TorchFunctionMode):
    """Passes lists of lengths to ``ctc_loss`` as tensors, for the length of a trace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.ctc_loss or func is torch.ctc_loss:
            args, kwargs = map(_as_tensor, args), {name: _as_tensor(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _as_tensor(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.int64) if isinstance(value, (list, tuple)) else value


def ctc_loss_table() -> dict[Any, Any]:
    """Decompositions of the first trace."""
    return {aten._ctc_loss.Tensor: _forward, aten._ctc_loss_backward.Tensor: _backward}


def _forward(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, labels: Tensor, blank: int = 0, zero_infinity: bool = False
) -> Any:
    return ctc_loss(log_probs, *_by_row(log_probs, targets, inputs, labels), blank, zero_infinity)


def _backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    inputs: Tensor,
    labels: Tensor,
    losses: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    by_row = _by_row(log_probs, targets, inputs, labels)
    return ctc_loss_backward(grad, log_probs, *by_row, losses, log_alpha, blank, zero_infinity)


def _by_row(log_probs: Tensor, targets: Tensor, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Targets (row, label) and the lengths of inputs and targets (row,); without a batch there is one row."""
    inputs, labels = inputs.reshape(-1), labels.reshape(-1)
    if targets.ndim == 1 and log_probs.shape[1] != 1:
        return _padded(targets, labels, log_probs.shape[0]), inputs, labels.clamp(max=log_probs.shape[0] + 1)
    return targets if targets.ndim == 2 else targets.unsqueeze(0), inputs, labels


def _padded(targets: Tensor, labels: Tensor, frames: int) -> Tensor:
    """The targets of all rows, one behind the other, as (row, label); what is behind a row's own does not count.

    How long the longest is depends on values. No more than ``frames`` labels have a finite loss: one more is enough.
    """
    starts = labels.cumsum(0) - labels
    places = starts.unsqueeze(1) + torch.arange(frames + 1, device=targets.device)
    return targets[places.clamp(max=targets.shape[0] - 1)]
