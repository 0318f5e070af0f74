"""Stand-ins for results of ops that depend on values: a check goes on with them where a compiled step is refused."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from ..._torch import DataDependentOutputException, DynamicOutputShapeException, disable_modes, tree_flatten, tree_map
from ...call.refusals import answer
from ..explain_errors import is_from_outside
from ..tensor_attributes import is_real, zeros_like_real

_LARGEST = 1 << 24  # elements of an operand that it is worth making


def can_stand_in(error: Exception, args: Any) -> bool:
    """Whether an op on ``args`` that raised ``error`` has a result to go on with.

    It has none where it reads a parameter from outside of the step, which would get a gradient of the trace.
    """
    if is_from_outside(error):
        return not any(is_real(each) and each.requires_grad for each in tree_flatten(args)[0])
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def stand_in(error: Exception, func: Any, args: Any, kwargs: Any) -> Any:
    """A value that the op might have, or a tensor in the shape of its result on ones: nothing is masked out.

    An op that reads a tensor from outside of the step runs with zeros in its place.
    """
    if is_from_outside(error):
        return func(*tree_map(_traced, args), **tree_map(_traced, kwargs))
    if isinstance(error, DataDependentOutputException):
        return _value(error, args[0].dtype if func is torch.ops.aten._local_scalar_dense.default else torch.bool)
    if any(isinstance(each, Tensor) and each.numel() > _LARGEST for each in (*args, *kwargs.values())):
        raise error
    with disable_modes(), torch.no_grad():
        result = func(*tree_map(_ones, args), **tree_map(_ones, kwargs))
    return tree_map(lambda value: _empty(value, args[0].device) if isinstance(value, Tensor) else value, result)


def beside_the_graph(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective in place, of which the graph has nothing: it goes on with the rank's own values.

    Torch draws a number for the handle of each, which is no draw of the step's.
    """
    state = random.getstate()
    try:
        with disable_modes():
            return func(*args, **kwargs)
    finally:
        random.setstate(state)


def _value(error: Exception, dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return answer(error, False, True)
    return answer(error, 1.0 if dtype.is_floating_point else 1)


def _traced(value: Any) -> Any:
    return zeros_like_real(value) if is_real(value) else value


def _ones(value: Any) -> Any:
    return torch.ones(tuple(value.shape), dtype=value.dtype) if isinstance(value, Tensor) else value


def _empty(value: Tensor, device: torch.device) -> Tensor:
    return torch.zeros(value.shape, dtype=value.dtype, device=device)
