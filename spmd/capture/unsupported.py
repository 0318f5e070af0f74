"""Refuse steps that cannot be compiled, each with what to do instead.

``check_op`` runs at every op while tracing, ``check_results`` on what the step returns. They raise ``Refused``, to
which ``explain_errors.py`` adds the user's line.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NoReturn

import torch
from torch import nn

from passes.ir.schemas import schema

from .._torch import (
    COLLECTIVE_NAMESPACES,
    tree_flatten,
    tree_map,
)
from ..call.refusals import refuse
from ..interpreter.source_lines import named_at
from ..python_state.reads import is_array
from ..python_state.reads.one_device import behind_step
from ..python_state.traced import holds_traced, known_number
from .sizes.size_symbols import is_known

_OF_ONE_DTYPE = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution")
}


FROM_OUTSIDE = (
    "it uses a tensor or a module that is neither among its arguments nor found by a name in its code (an attribute of "
    "self, a closure variable, a global), or a parameter that no module holds, nor an optimizer of the step. Pass it "
    "as an argument, and keep parameters in modules."
)


class Refused(Exception):
    """The step cannot be captured. The message continues "<step> cannot be traced into one graph: ", from "it" on."""


class UnknownShape(Refused):
    """The shape of a result depends on a tensor's value."""


class OutsideTensor(Exception):
    """The step computes with a tensor that is neither an argument nor state: it may be a constant, in another trace."""


def accumulation_hook(hook: Callable[[torch.Tensor], object], name: str) -> Callable[[torch.Tensor], None]:
    """The hook of the parameter ``name``, to run when its gradient is accumulated; ``Refused`` if it returns a value.

    Torch raises for it, too, and does not say which hook it is.
    """

    def checked(parameter: torch.Tensor) -> None:
        returned = hook(parameter)
        if returned is not None:
            value = "a tensor" if isinstance(returned, torch.Tensor) else repr(returned)
            refuse(
                Refused,
                f"it runs {named_at(hook)}, a hook on {name} by register_post_accumulate_grad_hook, which returned "
                f"{value}, where torch takes None. Let it write to parameter.grad and return nothing, or use "
                "register_hook, whose hooks return the new gradient.",
            )

    return checked


def check_results(leaves: Sequence[Any]) -> None:
    """Raise ``Refused`` for a result whose body has not run, or that holds tensors where they are not found."""
    for leaf in leaves:
        if inspect.isgenerator(leaf) or inspect.isawaitable(leaf):
            refuse(
                Refused,
                f"it returns a {type(leaf).__name__}, whose body has not run yet. Make the step a plain function that "
                "returns its results.",
            )
        known = isinstance(leaf, (type, torch.Tensor, nn.Module, torch.optim.Optimizer))
        if not known and holds_traced(list(getattr(leaf, "__dict__", {}).values())):
            refuse(
                Refused,
                f"it returns a {type(leaf).__name__} that holds tensors. Return tensors in tuples, lists, dicts or "
                "dataclasses.",
            )


def with_known_numbers(leaf: Any) -> Any:
    """Return what the step returns or keeps, with values for symbols that no call computes anew.

    These are conditions, each with a program for its answer, and what an array of numpy's has. A rank is the process's
    own behind the step.
    """
    leaf = behind_step(leaf)
    if isinstance(leaf, torch.SymBool):
        return bool(leaf)
    if not (is_array(leaf) and getattr(getattr(leaf, "dtype", None), "hasobject", False)):
        return leaf
    found = leaf.ravel().tolist()
    known = [*map(known_number, found)]
    return leaf if all(map(is_, known, found)) else sys.modules["numpy"].array(known).reshape(leaf.shape)


def refuse_regions(func: Any) -> NoReturn:
    """Raise ``Refused`` for an operator that takes functions of the step, such as ``torch.cond``."""
    name = func.name()
    raise Refused(
        f"it calls {_REGIONS.get(name, name)}, which takes a function to call: a program has no regions. "
        + _INSTEAD.get(name, "Write the function's body in the step, or replace the submodule through spmd.Override.")
    )


_REGIONS = {
    "cond": "torch.cond",
    "map_impl": "torch's map",
    "while_loop": "torch's while_loop",
    "scan": "torch's scan",
    "associative_scan": "torch's associative_scan",
}
_INSTEAD = {
    "cond": "Compute both branches and select with torch.where, or decide in Python, outside of the step.",
    "map_impl": "Use torch.vmap, or a loop in Python over x.unbind(0).",
    "while_loop": "Loop in Python, as often as a number or a shape says.",
    "scan": "Loop in Python over xs.unbind(0), or use torch.cumsum or torch.cumprod.",
    "associative_scan": "Loop in Python over xs.unbind(0), or use torch.cumsum or torch.cumprod.",
}


def check_op(func: Any, args: Sequence[Any], result: Any) -> Any:
    """Raise ``Refused`` if a compiled step cannot have this op; returns its result.

    A check that goes on gets a dense result in the place of one that is not.
    """
    if func in _OF_ONE_DTYPE:
        dtypes = dict.fromkeys(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
        if len(dtypes) > 1:  # shape functions do not look at dtypes, but kernels do
            listed = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            refuse(
                Refused,
                f"{func} gets operands of {listed}, and needs one dtype. Cast one of them, or let a "
                "spmd.MixedPrecisionPolicy or autocast do so; with torch.utils.checkpoint, a policy of the module that "
                "is checkpointed.",
            )
    if func.overloadpacket is torch.ops.aten._fused_moving_avg_obs_fq_helper:
        _check_observer(func, args)
    for tensor in tree_flatten(result)[0]:
        if isinstance(tensor, torch.Tensor) and not all(map(is_known, tensor.shape)):
            raise UnknownShape(
                f"the shape of a result depends on a tensor's value: {func} returns {_shape(tensor)}. Pad to a known "
                "size (a number from the config, or a shape) and mask, or replace the submodule through spmd.Override."
            )
        if isinstance(tensor, torch.Tensor) and (tensor.layout is not torch.strided or tensor.is_quantized):
            kind = "quantized" if tensor.is_quantized else "sparse"
            refuse(
                Refused,
                f"{func} makes a {kind} tensor, which cannot be split over ranks. Use a dense one (of an "
                "nn.Embedding, sparse=False), or replace the submodule through spmd.Override.",
            )
            return tree_map(_dense, result)
    return result


def check_collective(func: Any) -> bool:
    """Raise ``Refused`` for a collective of the step's own; whether it is one that a check goes on behind."""
    if func.namespace in COLLECTIVE_NAMESPACES:
        refuse(
            Refused,
            f"it communicates itself ({func}), but a compiled step is written as for one device that holds the whole "
            "batch, and spmd adds the communication. Leave it out.",
        )
    return bool(func.namespace == "c10d")


def _dense(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is torch.strided:
        return value
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


def _check_observer(func: Any, args: Sequence[Any]) -> None:
    """Refuse an observer per channel whose statistics have no entry per channel yet: its kernel alone resizes them."""
    given = dict(zip(schema(func).names, args, strict=False))
    if not given.get("per_row_fake_quant"):
        return
    channels = given["self"].shape[given["ch_axis"]]
    if any(given[name].numel() != channels for name in ("running_min", "running_max", "scale", "zero_point")):
        raise Refused(
            f"{func} resizes its statistics to one entry for each of {channels} channels, and state keeps its shape "
            "from call to call. Run the model once before the first step, under torch.no_grad()."
        )


def _shape(tensor: torch.Tensor) -> str:
    """The shape, with a question mark for each size that depends on values."""
    return f"({', '.join(str(size) if is_known(size) else '?' for size in tensor.shape)})"
