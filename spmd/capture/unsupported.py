"""Refuse steps and modules that cannot be compiled, each with what to do instead.

``check_modules`` runs before anything is traced, ``check_op`` at every op while tracing, ``check_results`` on what the
step returns. The last two raise ``Refused``, to which ``explain_errors.py`` adds the user's line.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from passes import CaptureError

from .._torch import (
    COLLECTIVE_NAMESPACES,
    forward_hooks,
    forward_pre_hooks,
    tree_flatten,
)
from .effects.traced import holds_traced

_OF_ONE_DTYPE = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution")
}


FROM_OUTSIDE = (
    "it uses a tensor or a module that is neither among its arguments nor found by a name in its code (an attribute of "
    "self, a closure variable, a global), or a parameter that no module holds. Pass it as an argument, and keep "
    "parameters in modules."
)


class Refused(Exception):
    """The step cannot be captured. The message continues "<step> cannot be traced into one graph: ", from "it" on."""


class OutsideTensor(Exception):
    """The step computes with a tensor that is neither an argument nor state: it may be a constant, in another trace."""


def check_modules(submodules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ``CaptureError`` for a module that cannot be traced, or that distributes itself over devices already."""
    for name, module in submodules:
        if isinstance(module, (nn.DataParallel, DistributedDataParallel)):
            kind = type(module).__name__
            raise CaptureError(
                f"{name} is a {kind}, but a compiled step splits the batch and reduces gradients itself. Pass the "
                f"module that {kind} wraps, {name}.module"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name} is scripted or traced by torch.jit, whose parameters cannot be replaced while tracing. Pass "
                "the plain module it was made from"
            )
        if _has_hooks_of_styles(module):
            raise CaptureError(
                f"{name} was made parallel by torch's parallelize_module or distribute_module, whose hooks pass it one "
                "rank's part of activations, but a compiled step computes with whole ones and splits them itself. "
                "Leave that out. Place parameters with DataParallel(mesh=mesh, params={'*.up.weight': {'tp': "
                "Shard(0)}}) or distribute_tensor, and activations with spmd.constrain"
            )


def _has_hooks_of_styles(module: nn.Module) -> bool:
    """Whether ``module`` has hooks of torch's tensor parallel styles, which its package defines."""
    hooks = [*forward_pre_hooks(module).values(), *forward_hooks(module).values()]
    return any(getattr(hook, "__module__", "").startswith("torch.distributed.tensor") for hook in hooks)


def check_results(leaves: Sequence[Any]) -> None:
    """Raise ``Refused`` for a result whose body has not run, or that holds tensors where they are not found."""
    for leaf in leaves:
        if inspect.isgenerator(leaf) or inspect.isawaitable(leaf):
            raise Refused(
                f"it returns a {type(leaf).__name__}, whose body has not run yet. Make the step a plain function that "
                "returns its results."
            )
        known = isinstance(leaf, (type, torch.Tensor, nn.Module, torch.optim.Optimizer))
        if not known and holds_traced(list(getattr(leaf, "__dict__", {}).values())):
            raise Refused(
                f"it returns a {type(leaf).__name__} that holds tensors. Return tensors in tuples, lists, dicts or "
                "dataclasses."
            )


def check_op(func: Any, args: Sequence[Any], result: Any) -> None:
    """Raise ``Refused`` if a compiled step cannot have this op."""
    if func in _OF_ONE_DTYPE:
        dtypes = dict.fromkeys(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
        if len(dtypes) > 1:  # shape functions do not look at dtypes, but kernels do
            listed = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise Refused(
                f"{func} gets operands of {listed}, and needs one dtype. Cast one of them, or let a "
                "spmd.MixedPrecisionPolicy or autocast do so; with torch.utils.checkpoint, a policy of the module that "
                "is checkpointed."
            )
    if func.namespace in COLLECTIVE_NAMESPACES:
        raise Refused(
            f"it communicates itself ({func}), but a compiled step is written as for one device that holds the whole "
            "batch, and spmd adds the communication. Leave it out."
        )
    for tensor in tree_flatten(result)[0]:
        if isinstance(tensor, torch.Tensor) and not all(isinstance(size, int) for size in tensor.shape):
            raise Refused(
                f"the shape of a result depends on a tensor's value: {func} returns {_shape(tensor)}. Pad to a known "
                "size (a number from the config, or a shape) and mask, or replace the submodule through spmd.Override."
            )
        if isinstance(tensor, torch.Tensor) and (tensor.layout is not torch.strided or tensor.is_quantized):
            kind = "quantized" if tensor.is_quantized else "sparse"
            raise Refused(
                f"{func} makes a {kind} tensor, which cannot be split over ranks. Use a dense one (of an "
                "nn.Embedding, sparse=False), or replace the submodule through spmd.Override."
            )


def _shape(tensor: torch.Tensor) -> str:
    """The shape, with a question mark for each size that depends on values."""
    return f"({', '.join(str(size) if isinstance(size, int) else '?' for size in tensor.shape)})"
