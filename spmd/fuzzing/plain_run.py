"""Whether a plain step can be verified: it runs, and does not enlarge rounding until it looks like an error."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from .._torch import tree_flatten
from ..call.rng import random_state_kept

_CALLS = 3
_NARROW = ("bfloat16", "float16", ".float()", "float32")
_EXACT, _ROUNDED = (1e-12, 3e-10), (4e-3, 2e-2)  # how much the batch is changed by, and results may change by


def can_be_verified(text: str) -> bool:
    """Whether the plain step runs, its results are finite, and change little where the batch does."""
    change, allowed = _ROUNDED if any(name in text for name in _NARROW) else _EXACT
    try:
        _run_in(torch.float32, text, 0.0)  # as the file is
        results, changed = _run(text, 0.0), _run(text, change)
    except Exception:  # the step is wrong by itself
        return False
    pairs = list(zip(results, changed, strict=False))
    return len(results) == len(changed) and all(_is_close(one, other, allowed) for one, other in pairs)


def _run(text: str, change: float) -> list[Tensor]:
    """What the step leaves in its model and returns, in float64 where it can run so."""
    try:
        return _run_in(torch.float64, text, change)
    except (RuntimeError, TypeError, ValueError):  # it names a dtype
        return _run_in(torch.float32, text, max(change, 1e-6))


def _run_in(dtype: torch.dtype, text: str, change: float) -> list[Tensor]:
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
    names["x"] = _changed(names["x"], change)
    arguments = [names[name] for name in step.__code__.co_varnames[: step.__code__.co_argcount]]
    results: list[Any] = []
    for _ in range(_CALLS):
        results.append(step(*arguments))
        results.append(copy.deepcopy(model.state_dict()))
    return [leaf.detach() for leaf in tree_flatten(results)[0] if isinstance(leaf, Tensor)]


def _changed(batch: Tensor, change: float) -> Tensor:
    torch.manual_seed(1)
    return batch * (1 + change * torch.randn_like(batch)) if batch.is_floating_point() else batch


def _is_close(one: Tensor, other: Tensor, allowed: float) -> bool:
    if not one.isfinite().all() or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = max(1.0, float(one.abs().max())) if one.numel() else 1.0
    return torch.allclose(one, other, rtol=0.0, atol=allowed * scale)
