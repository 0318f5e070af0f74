"""``spmd.no_sync``: leave gradients pending sums over the ranks, until a later call needs their values.

A parameter whose last backward pass ran inside of it keeps the summands of its gradient where they came about:
``.grad`` is then a DTensor with the placement ``Partial``, whose value is the gradient of the whole batch as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident

import torch
from torch import nn

from passes import SpmdError


@dataclass(frozen=True)
class _Entered:
    """A ``no_sync`` that runs: its thread (a backward pass may run on another), and its parameters; None for all."""

    thread: int
    parameters: frozenset[int] | None  # by id

    def holds(self, parameter: torch.Tensor) -> bool:
        return self.parameters is None or id(parameter) in self.parameters


_entered: list[_Entered] = []


@contextmanager
def no_sync(*modules: nn.Module) -> Iterator[None]:
    """Leave gradients pending that outlive the call of a compiled step, if backward runs in this context.

    For steps that accumulate gradients over several calls: each call adds to the summands of its rank, and the call
    whose backward pass runs outside of the context reduces the sum once::

        @spmd.compile()
        def micro_step(model, optimizer, x, y, last):
            with contextlib.nullcontext() if last else spmd.no_sync(model):
                F.cross_entropy(model(x), y).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    ``modules``: those whose parameters it holds for; without any, all. No value changes: ``.grad`` is a DTensor of the
    parameter's shape, ``Partial`` over the axes that split the batch, and whole in the memory of every rank, also where
    the parameter is split. A gradient is reduced all the same where the step updates its parameter, or where it was
    whole before the call. In a step that is not compiled it does nothing. Raises ``TypeError`` for what is no module.
    """
    wrong = [module for module in modules if not isinstance(module, nn.Module)]
    if wrong:
        raise TypeError(f"expected spmd.no_sync to be given modules, got {wrong[0]!r}")
    parameters = frozenset(id(parameter) for module in modules for parameter in module.parameters())
    entered = _Entered(get_ident(), parameters if modules else None)
    _entered.append(entered)
    try:
        yield
    finally:
        _entered.remove(entered)


def is_left_pending(parameter: torch.Tensor) -> bool:
    """Whether a backward pass now leaves the gradient of ``parameter`` pending."""
    return any(each.holds(parameter) for each in _entered)


def check_no_sync_is_inside(name: str) -> None:
    """Raise ``SpmdError`` for a call of the compiled step ``name`` inside of ``no_sync``, which it would not see."""
    if _entered and any(each.thread == get_ident() for each in _entered):
        raise SpmdError(
            f"{name} was called inside of spmd.no_sync: enter it in the step instead, around the backward pass whose "
            "gradients are to stay pending"
        )
