"""Tensors that modules hold as plain attributes, or in lists and dicts there: constants of the program.

A table of positions, say. They belong to modules among the step's arguments, but they are not registered as buffers,
so no fake replaces them while tracing. The first op that reads one lifts it into the graph. Guards compare the
attribute by identity. What the step itself replaces is no constant, but state (``effects/carried.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.ops import Trait, has

from .._torch import BUFFERS, CHILDREN, PARAMETERS, TorchDispatchMode, tree_flatten, tree_map
from .reads import CONTAINERS
from .unsupported import Refused

aten = torch.ops.aten
NO_CONSTANTS = {PARAMETERS, BUFFERS, CHILDREN}


@contextmanager
def constant_attributes(submodules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Lift the plain tensors of these modules into the graph where an op reads them."""
    constants = {
        id(leaf): (f"{name}.{key}", leaf)
        for name, module in submodules
        for key, value in vars(module).items()
        if isinstance(value, (torch.Tensor, *CONTAINERS)) and key not in NO_CONSTANTS
        for leaf in tree_flatten(value)[0]
        if is_constant(leaf)
    }
    if not constants:
        yield
        return
    with _LiftConstants(constants):
        yield


def is_constant(value: Any) -> bool:
    """Whether the value of a module's plain attribute is a tensor that may be a constant."""
    return type(value) is Tensor and not value.requires_grad


class _LiftConstants(TorchDispatchMode):
    """Replaces constants, given as (name, tensor) by id, by their lifted form in the arguments of every op."""

    def __init__(self, constants: dict[int, tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants = constants
        self.lifted: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def replace(value: Any) -> Any:
            return self._lift(func, value) if type(value) is Tensor and id(value) in self.constants else value

        args, kwargs = tree_map(replace, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _lift(self, func: Any, value: Tensor) -> Tensor:
        if has(func, Trait.MUTABLE):
            name = self.constants[id(value)][0]
            raise Refused(
                f"it may write into {name} ({func}), a plain attribute of a module. Make that a buffer, with "
                "register_buffer."
            )
        if id(value) not in self.lifted:
            self.lifted[id(value)] = aten.lift_fresh.default(value)
        return self.lifted[id(value)]
