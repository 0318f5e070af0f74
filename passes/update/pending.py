"""How programs declare what one call leaves in flight, or unfinished, for the next one."""

from __future__ import annotations

import torch
from torch import fx

from ..ir.program import Input, Output, OutputKind
from ..ir.roles import Role


def pending_output(node: fx.Node) -> Output:
    """The value of ``node``, left to the program that takes the input of the same name."""
    shape, dtype = _described(node)
    return Output(OutputKind.PENDING, f"pending.{node.name}", Role.PENDING, shape, dtype)


def pending_input(node: fx.Node) -> Input:
    """What another program has left as the value of ``node``."""
    shape, dtype = _described(node)
    return Input(Role.PENDING, f"pending.{node.name}", shape, dtype)


def _described(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype | None]:
    val = node.meta.get("val")
    return (tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else ((), None)
