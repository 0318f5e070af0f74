"""``any`` and ``all`` over rows as counts: each part of a split tensor counts its own elements, and counts are summed.

A truth value has no sum, so that the elements themselves would be gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes import Program

from .traced_ops import inlined

aten = torch.ops.aten
_ANY = (aten.any.default, aten.any.dim, aten.any.dims)
_ALL = (aten.all.default, aten.all.dim, aten.all.dims)


def count_truths(program: Program) -> Program:
    """The program with a sum for each ``any`` or ``all`` of the first dim; ``program`` is left as it is."""
    if not any(map(_is_over_rows, program.graph.nodes)):
        return program
    program = program.copy()
    for node in [each for each in program.graph.nodes if _is_over_rows(each)]:
        node.replace_all_uses_with(inlined(node, _any if node.target in _ANY else _all))
        program.graph.erase_node(node)
    return program


def _is_over_rows(node: fx.Node) -> bool:
    if node.target not in (*_ANY, *_ALL):
        return False
    operand: Any = node.args[0]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    ndim, given = operand.meta["val"].ndim, [dims] if isinstance(dims, int) else dims
    return ndim > 0 and (given is None or any(dim % ndim == 0 for dim in given))


def _any(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return (_sum(x != 0, dim, keepdim) > 0).to(_dtype(x))


def _all(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return (_sum(x == 0, dim, keepdim) == 0).to(_dtype(x))


def _sum(truths: Tensor, dim: Any, keepdim: bool) -> Tensor:
    return truths.sum() if dim is None and not keepdim else truths.sum(dim, keepdim)


def _dtype(x: Tensor) -> torch.dtype:
    return torch.uint8 if x.dtype is torch.uint8 else torch.bool
