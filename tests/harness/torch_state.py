"""Global state of torch that a step must not change: settings, mode stacks, hooks and patched functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.optim import SGD, Adam, AdamW, Optimizer

_OPTIMIZERS = (SGD, Adam, AdamW)
for _optimizer in _OPTIMIZERS:
    _optimizer([torch.zeros(())], lr=0.1)  # the first instance of a class makes torch itself replace ``step``

# Functions that tracers like to replace.
_FUNCTIONS = [
    (torch.Tensor, "backward"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (nn.Module, "__call__"),
    (nn.Module, "__getattr__"),
    (nn.Module, "__setattr__"),
    (Optimizer, "zero_grad"),
    *((optimizer, "step") for optimizer in _OPTIMIZERS),
]


def torch_state() -> dict[str, Any]:
    """The global state by name, comparable with ``==``."""
    hooks = {name: len(value) for name, value in vars(global_hooks).items() if _is_hooks(name, value)}
    functions = {f"{owner.__name__}.{name}": id(getattr(owner, name)) for owner, name in _FUNCTIONS}
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "multithreaded autograd": torch.autograd.is_multithreading_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "is_compiling": torch.compiler.is_compiling(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "threads": torch.get_num_threads(),
        **hooks,
        **functions,
    }


def _is_hooks(name: str, value: object) -> bool:
    return name.startswith("_global_") and name.endswith("hooks") and isinstance(value, dict)
