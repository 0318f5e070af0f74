"""Refuse arguments that no step can be compiled for, each with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from passes import CaptureError

from .._torch import forward_hooks, forward_pre_hooks


def check_argument(name: str, tensor: torch.Tensor) -> None:
    """Raise ``CaptureError`` for a tensor without values, or one that cannot be cut into rows."""
    if tensor.is_nested:
        raise CaptureError(f"{name} is a nested tensor, whose rows differ in shape. Pad it, and pass a mask")
    if tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "quantized" if tensor.is_quantized else "sparse"
        raise CaptureError(f"{name} is a {kind} tensor, which cannot be split over ranks. Pass a dense one")
    if tensor.is_meta:
        raise CaptureError(f"{name} is on the meta device and has no values. Pass it on the model's device")


def check_modules(submodules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ``CaptureError`` for a module that cannot be traced, or that distributes itself over devices already."""
    for name, module in submodules:
        if isinstance(module, (nn.DataParallel, DistributedDataParallel)):
            kind = type(module).__name__
            raise CaptureError(
                f"{name} is a {kind}, but a compiled step splits the batch and reduces gradients itself. Pass the "
                f"module that {kind} wraps, {name}.module"
            )
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            raise CaptureError(
                f"{name} is sharded by torch's FSDP, which gathers and reduces in hooks of its own, but a compiled "
                "step does so itself. Leave that out, and compile with DataParallel('fully_shard'), or mark the same "
                "modules with spmd.fully_shard(module)"
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
