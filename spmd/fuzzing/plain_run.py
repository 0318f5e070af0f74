"""Whether a plain step can be verified: it runs, and does not enlarge rounding until it looks like an error."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from .._torch import tree_flatten
from ..call.rng import random_state_kept
from .script import Script

_CALLS = 3
_NARROW, _SINGLE = ("bfloat16", "float16"), (".float()", "float32")
# How much the batch (of whole numbers: the parameters) is changed by, and results may be: a part of what verify allows.
_ALLOWED = {"exact": (1e-12, 3e-10), "single": (1e-6, 3e-5), "narrow": (4e-3, 2e-2)}


def can_be_verified(script: Script) -> bool:
    """Whether the plain step runs, its results are finite, and change little where batch or parameters do."""
    text = script.plain()
    try:
        _run(torch.float32, text, 0.0)  # as the file is
        dtype = _dtype(text)
        change, allowed = _ALLOWED[_kind(script.text(), dtype)]
        results, changed = _run(dtype, text, 0.0), _run(dtype, text, change)
    except Exception:  # the step is wrong by itself
        return False
    pairs = list(zip(results, changed, strict=False))
    return len(results) == len(changed) and all(_is_close(one, other, allowed) for one, other in pairs)


def _kind(text: str, dtype: torch.dtype) -> str:
    if any(name in text for name in _NARROW):
        return "narrow"
    return "single" if dtype is torch.float32 or any(name in text for name in _SINGLE) else "exact"


def _dtype(text: str) -> torch.dtype:
    """Float64 where the step can run so, as verify does."""
    try:
        _run(torch.float64, text, 0.0)
        return torch.float64
    except (RuntimeError, TypeError, ValueError):  # it names a dtype
        return torch.float32


def _run(dtype: torch.dtype, text: str, change: float) -> list[Tensor]:
    before, names = torch.get_default_dtype(), dict[str, Any]()
    with random_state_kept():
        torch.set_default_dtype(dtype)
        try:
            exec(compile(text, "<fuzz plain step>", "exec"), names)
            return _call(names, change)
        finally:
            torch.set_default_dtype(before)


def _call(names: dict[str, Any], change: float) -> list[Tensor]:
    step, model = names["train_step"], names["model"]
    torch.manual_seed(1)
    if names["x"].is_floating_point():
        names["x"] = _changed(names["x"], change)
    else:  # of whole numbers
        for parameter in model.parameters():
            parameter.data.copy_(_changed(parameter.data, change))
    arguments = [names[name] for name in step.__code__.co_varnames[: step.__code__.co_argcount]]
    results: list[Any] = []
    for _ in range(_CALLS):
        results.append(step(*arguments))
        results.append(copy.deepcopy(model.state_dict()))
    return [leaf.detach() for leaf in tree_flatten(results)[0] if isinstance(leaf, Tensor)]


def _changed(batch: Tensor, change: float) -> Tensor:
    return batch * (1 + change * torch.randn_like(batch))


def _is_close(one: Tensor, other: Tensor, allowed: float) -> bool:
    if not one.isfinite().all() or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = max(1.0, float(one.abs().max())) if one.numel() else 1.0
    return torch.allclose(one, other, rtol=0.0, atol=allowed * scale)
