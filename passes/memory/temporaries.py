"""Temporary memory that ops need beside their results, as far as it is large: convolutions on the CPU.

oneDNN copies operands and results into blocks of channels. Measured (torch 2.13, AVX-512, one thread): forward needs
0.4 to 1 times what is counted here, backward 0.5 to 1.6 times.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import fx

from ..ir.program import Program
from .peak_memory import most_allocated
from .pieces import Pieces

aten = torch.ops.aten
_BLOCK = 16  # channels, of those with as many


def most_with_temporaries(program: Program, device: torch.device) -> int:
    """The most bytes on a device that ops allocate at once beside the arena, with what they need while they run."""
    pieces = [piece for piece in Pieces(program.graph).all if piece.space.device == device and not piece.space.shared]
    needed = {k: _temporary_bytes(node) for k, node in enumerate(program.graph.nodes)} if device.type == "cpu" else {}
    return most_allocated(pieces, {k: size for k, size in needed.items() if size})


def _temporary_bytes(node: fx.Node) -> int:
    if node.target is aten.convolution.default:
        x, y = _val(node.args[0]), node.meta["val"]
        return _in_blocks(x) + _in_blocks(y)
    if node.target is aten.convolution_backward.default:
        y, x, (needs_x, *_) = _val(node.args[0]), _val(node.args[1]), cast(list[bool], node.args[10])
        return _in_blocks(x) * (2 if needs_x else 1) + _in_blocks(y)
    return 0


def _val(node: Any) -> torch.Tensor:
    return cast(torch.Tensor, node.meta["val"])


def _in_blocks(x: torch.Tensor) -> int:
    channels = -(-x.shape[1] // _BLOCK) * _BLOCK if x.shape[1] >= _BLOCK else x.shape[1]
    return int(x.shape[0] * channels * prod(x.shape[2:]) * x.element_size())
