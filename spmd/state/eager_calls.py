"""Refuse to call a split module outside of a compiled step, where torch's error would speak of mixed tensors."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from passes import SpmdError

from .._torch import forward_pre_hooks, get_proxy_mode, own_parameters, tree_flatten


def refuse_eager_calls(module: nn.Module) -> None:
    """Let calls of ``module`` raise ``SpmdError`` as long as it has split parameters, but in a step that is traced."""
    if _refuse not in forward_pre_hooks(module).values():
        module.register_forward_pre_hook(_refuse, with_kwargs=True)


def _refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
    if get_proxy_mode() is not None:
        return
    split = [name for name, value in own_parameters(module).items() if isinstance(value, DTensor)]
    if split and not any(isinstance(each, DTensor) for each in tree_flatten((args, kwargs))[0]):
        raise SpmdError(
            f"a {type(module).__name__} was called outside of a compiled step, but its {' and '.join(split)} are "
            "DTensors, split over the ranks: call the model in a function that spmd.compile compiles, or inside of "
            "`with spmd.unshard(model):`, where all parameters are whole"
        )
