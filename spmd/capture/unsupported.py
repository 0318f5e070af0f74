"""What a compiled step may not do, and modules it cannot take, each with the way out.

``check_modules`` looks at modules before anything is traced; ``check_op`` at every op while tracing; ``check_results``
at what is returned. What a step does is raised as ``Refused``, to which ``make_program.py`` adds the user's line.
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
    own_buffers,
    own_parameters,
    tree_flatten,
)
from .side_effects import holds_traced


class Refused(Exception):
    """The step does what cannot be captured: a clause that starts with "it", and one that ends before "at <line>"."""


def check_modules(submodules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ``CaptureError`` for a module that cannot be traced, or that spreads itself over devices already."""
    for name, module in submodules:
        if isinstance(module, (nn.DataParallel, DistributedDataParallel)):
            kind = type(module).__name__
            raise CaptureError(
                f"{name} is a {kind}, but a compiled step splits the batch and reduces gradients itself: pass the "
                f"module that {kind} wraps, {name}.module"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name} is scripted or traced by torch.jit, whose parameters cannot be stood in for while tracing: "
                "pass the plain module it was made from"
            )
        if _has_hooks_of_styles(module):
            raise CaptureError(
                f"{name} was made parallel by torch's parallelize_module or distribute_module, whose hooks hand it a "
                "rank's part of activations, but a compiled step computes with whole ones and splits them itself: "
                "leave that out, say where parameters live with DataParallel(mesh=mesh, params={'*.up.weight': "
                "{'tp': Shard(0)}}) or distribute_tensor, and where activations do with spmd.constrain"
            )
        for key, tensor in [*own_parameters(module).items(), *own_buffers(module).items()]:
            if tensor is not None and tensor.is_meta:
                raise CaptureError(
                    f"{name}.{key} is on the meta device and has no values to train: materialize the model first, "
                    'with model.to_empty(device="cpu") and its own initialization, or by loading a checkpoint'
                )


def _has_hooks_of_styles(module: nn.Module) -> bool:
    """Whether torch's tensor parallel styles put hooks on ``module``; they are told by where they are defined."""
    hooks = [*forward_pre_hooks(module).values(), *forward_hooks(module).values()]
    return any(getattr(hook, "__module__", "").startswith("torch.distributed.tensor") for hook in hooks)


def check_results(leaves: Sequence[Any]) -> None:
    """Raise ``Refused`` for a result that is still to run, or that holds tensors where nobody can find them."""
    for leaf in leaves:
        if inspect.isgenerator(leaf) or inspect.isawaitable(leaf):
            raise Refused(
                f"it returns a {type(leaf).__name__}, whose body has not run yet: a step is a plain function that "
                "returns its results. It is defined"
            )
        known = isinstance(leaf, (type, torch.Tensor, nn.Module, torch.optim.Optimizer))
        if not known and holds_traced(list(getattr(leaf, "__dict__", {}).values())):
            raise Refused(
                f"it returns a {type(leaf).__name__} that holds tensors: return tensors in tuples, lists, dicts or "
                "dataclasses. It is defined"
            )


def check_op(func: Any, result: Any) -> None:
    """Raise ``Refused`` if a compiled step cannot have this op."""
    if func.namespace in COLLECTIVE_NAMESPACES:
        raise Refused(
            f"it communicates itself ({func}), but a compiled step is written as for one device that holds the whole "
            "batch, and spmd adds what must be communicated: leave it out. It is called"
        )
    for tensor in tree_flatten(result)[0]:
        if isinstance(tensor, torch.Tensor) and not all(isinstance(size, int) for size in tensor.shape):
            raise Refused(
                f"a tensor's value decides the shape of what {func} makes, {_shape(tensor)}. Pad to a size that is "
                "known (a number from the config, or a shape) and mask, or replace the submodule through "
                "spmd.Override. It is made"
            )
        if isinstance(tensor, torch.Tensor) and (tensor.layout is not torch.strided or tensor.is_quantized):
            kind = "quantized" if tensor.is_quantized else "sparse"
            raise Refused(
                f"{func} makes a {kind} tensor, which cannot be split over ranks: use a dense one (of an "
                "nn.Embedding, sparse=False), or replace the submodule through spmd.Override. It is made"
            )


def _shape(tensor: torch.Tensor) -> str:
    """With a question mark for each size that depends on values."""
    return f"({', '.join(str(size) if isinstance(size, int) else '?' for size in tensor.shape)})"
