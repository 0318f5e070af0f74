"""``ReplacedParameter``: a parameter that another took the place of, under a name that could not be given to that.

A variable of a function that runs while a step splits the model is such a name: ``weight = model.weight`` before the
first call. What is asked of the old parameter or done to it afterwards is asked of the new one, and done to that.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import tree_map
from ..call.state import SUCCESSOR, newest


class ReplacedParameter(nn.Parameter):
    """Passes everything on to the parameter in its place; only ``is`` tells them apart, and what is built on it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(_newest_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(newest(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(newest(self), name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(newest(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return newest(self).__reduce_ex__(protocol)


def let_successor_answer(old: Tensor) -> None:
    """Let ``old`` pass on to the parameter in its place; a DTensor, whose class has slots, stays as it is."""
    if isinstance(old, DTensor):
        return
    for name in vars(old).keys() - {SUCCESSOR}:
        del vars(old)[name]  # the new one has them
    old.__class__ = ReplacedParameter


def _newest_of(value: Any) -> Any:
    return newest(value) if isinstance(value, ReplacedParameter) else value
