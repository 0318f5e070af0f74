"""Tensors that modules hold as plain attributes, such as a table of positions: constants of the program.

They are found with the modules, so they are arguments of the step; but they are not registered as buffers, and nothing
stands in for them while tracing. Where an op meets one, it is taken into the graph. An attribute that comes to hold
another tensor makes another program, as any attribute does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.ops import Trait, has

from .._torch import TorchDispatchMode, tree_map
from .unsupported import Refused

aten = torch.ops.aten


@contextmanager
def held_tensors(submodules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Take the plain tensors of these modules into the graph where the step meets them."""
    held = {
        id(value): (f"{name}.{key}", value)
        for name, module in submodules
        for key, value in vars(module).items()
        if is_held(value)
    }
    if not held:
        yield
        return
    with _Held(held):
        yield


def is_held(value: Any) -> bool:
    """Whether a plain attribute of a module is a tensor that may be a constant."""
    return type(value) is Tensor and not value.requires_grad


class _Held(TorchDispatchMode):
    """Puts what stands for a held tensor in its place, in every op."""

    def __init__(self, held: dict[int, tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = held
        self.taken: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def take(value: Any) -> Any:
            return self._taken(func, value) if type(value) is Tensor and id(value) in self.held else value

        args, kwargs = tree_map(take, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _taken(self, func: Any, value: Tensor) -> Tensor:
        if has(func, Trait.MUTABLE):
            name = self.held[id(value)][0]
            raise Refused(
                f"it may write into {name} ({func}), a plain attribute of a module: make that a buffer, with "
                "register_buffer. This happens"
            )
        if id(value) not in self.taken:
            self.taken[id(value)] = aten.lift_fresh.default(value)
        return self.taken[id(value)]
