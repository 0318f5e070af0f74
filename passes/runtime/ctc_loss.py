"""``ctc_loss`` as ops whose results have shapes known from their operands' shapes.

torch's op returns the memory of its forward pass, which is as long as the longest target: its shape depends on values,
and differs between ranks that have other rows. Here that memory is padded to the width of the padded targets. The
losses and gradients are those of torch's kernels, row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMESPACE = "spmd_losses"
_LOSS_ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
_OPTIONS = "int blank, bool zero_infinity"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(f"ctc_loss({_LOSS_ARGUMENTS}, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define(
    f"ctc_loss_backward(Tensor grad, {_LOSS_ARGUMENTS}, Tensor losses, Tensor log_alpha, {_OPTIONS}) -> Tensor"
)
aten = torch.ops.aten


def _results(log_probs: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Empty results: the loss of each row, and the memory of the forward pass (row, frame, state)."""
    frames, rows, _classes = log_probs.shape
    return log_probs.new_empty(rows), log_probs.new_empty(rows, frames, 2 * targets.shape[1] + 1)


def _forward(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each row of ``log_probs`` (frame, row, class) with ``targets`` (row, label); lengths are (row,)."""
    if not len(targets):
        return _results(log_probs, targets)
    losses, short = aten._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    log_alpha = aten.constant_pad_nd(short, [0, 2 * targets.shape[1] + 1 - short.shape[2]])
    return losses, log_alpha.masked_fill_(_unreached(log_alpha, input_lengths, target_lengths), -torch.inf)


def _unreached(log_alpha: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """Mask of ``log_alpha`` without meaning: behind a row's own frames and states the kernel leaves what was there."""
    _rows, frames, states = log_alpha.shape
    frame = torch.arange(frames, device=log_alpha.device)
    state = torch.arange(states, device=log_alpha.device)
    own_frames, own_states = input_lengths.to(frame.device), 2 * target_lengths.to(frame.device) + 1
    return (frame >= own_frames[:, None])[:, :, None] | (state >= own_states[:, None])[:, None, :]


def _gradient(grad: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    """An empty gradient of ``log_probs``."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of ``log_probs``; ``grad``, ``losses`` are (row,)."""
    if not len(targets):
        return _gradient(grad, log_probs)
    saved = (targets, input_lengths, target_lengths, losses, log_alpha)
    gradient: Tensor = aten._ctc_loss_backward(grad, log_probs, *saved, blank, zero_infinity)
    return gradient.contiguous()


for name, kernel, fake in (("ctc_loss", _forward, _results), ("ctc_loss_backward", _backward, _gradient)):
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)

ctc_loss = getattr(torch.ops, NAMESPACE).ctc_loss.default
ctc_loss_backward = getattr(torch.ops, NAMESPACE).ctc_loss_backward.default
