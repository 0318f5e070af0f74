"""Refuse tensor arguments that cannot be split over ranks, each with what to do instead."""

from __future__ import annotations

import torch

from passes import CaptureError


def check_argument(name: str, tensor: torch.Tensor) -> None:
    """Raise ``CaptureError`` for a tensor without values, or one that cannot be cut into rows."""
    if tensor.is_nested:
        raise CaptureError(f"{name} is a nested tensor, whose rows differ in shape. Pad it, and pass a mask")
    if tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "quantized" if tensor.is_quantized else "sparse"
        raise CaptureError(f"{name} is a {kind} tensor, which cannot be split over ranks. Pass a dense one")
    if tensor.is_meta:
        raise CaptureError(f"{name} is on the meta device and has no values. Pass it on the model's device")
