"""Python state that a step changes while it is traced: found, put back, and told.

A trace runs the user's code once; what it does to attributes and parameter groups is no part of the graph. A compiled
step would do it once instead of at every call, or leave traced tensors in the user's objects.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from passes import CaptureError

from .._torch import tree_flatten


def is_traced(value: Any) -> bool:
    """Whether a value at the end of a trace is the graph's to compute."""
    return isinstance(value, (torch.Tensor, torch.SymFloat, torch.SymInt))


def holds_traced(value: Any) -> bool:
    """Whether there is a traced value anywhere in nested lists, tuples and dicts."""
    return any(is_traced(leaf) for leaf in tree_flatten(value)[0])


@contextmanager
def attributes_kept(name: str, module: nn.Module) -> Iterator[None]:
    """Put a module's attributes back if tracing fails; else warn of those that the step changed.

    An attribute that came to hold a traced tensor is put back in any case: outside of the trace it has no value.
    """
    before = dict(module.__dict__)
    contents = {key: type(value)(value) for key, value in before.items() if type(value) in (list, dict, set)}
    try:
        yield
    except BaseException:
        _put_back(module, before, contents, [*module.__dict__, *before])
        raise
    changed = [k for k, v in module.__dict__.items() if v is not before.get(k) or _differs(v, contents.get(k))]
    lost = [key for key in changed if not key.startswith("_") and key != "training"]
    _put_back(module, before, contents, [key for key in changed if holds_traced(module.__dict__[key])])
    if lost:
        warnings.warn(
            f"the step changes {', '.join(f'{name}.{key}' for key in lost)}, which a compiled step does only once, "
            "while it is traced. Make it a buffer, or change it outside of the step",
            stacklevel=2,
        )


def _differs(value: Any, content: Any) -> bool:
    """Whether a list, dict or set has other entries than before."""
    if content is None:
        return False
    if isinstance(value, dict):
        return value.keys() != content.keys() or any(value[key] is not content[key] for key in value)
    if isinstance(value, list):
        return len(value) != len(content) or any(a is not b for a, b in zip(value, content, strict=True))
    return len(value) != len(content)


def _put_back(module: nn.Module, before: dict[str, Any], contents: dict[str, Any], keys: list[str]) -> None:
    for key in keys:
        if key not in before:
            module.__dict__.pop(key, None)
            continue
        module.__dict__[key] = before[key]
        if key in contents:
            before[key].clear()
            (before[key].extend if isinstance(before[key], list) else before[key].update)(contents[key])


@contextmanager
def group_kept(name: str, group: dict[str, Any]) -> Iterator[None]:
    """Raise ``CaptureError`` if the step changes a parameter group, as a scheduler called inside of it does."""
    before = dict(group)
    yield
    changed = [key for key in group if key not in before or group[key] is not before[key]]
    if changed:
        raise CaptureError(
            f"the step changes {name}.{changed[0]}, which a compiled step would do once instead of at every call: "
            "change hyper-parameters, and call schedulers, outside of the step. What an optimizer counts, it keeps in "
            "self.state[parameter], as a number or a tensor"
        )


@contextmanager
def optimizer_kept(name: str, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put an optimizer's attributes back; raise ``CaptureError`` if the step has changed one, such as a counter."""
    attributes = optimizer.__dict__
    before = {key: value for key, value in attributes.items() if not _is_torchs(key)}
    changed = []
    try:
        yield
        changed = [key for key in attributes if not _is_torchs(key) and attributes[key] is not before.get(key)]
    finally:
        for key in [key for key in attributes if not _is_torchs(key) and key not in before]:
            del attributes[key]
        attributes.update(before)
    if changed:
        raise CaptureError(
            f"the step changes {name}.{changed[0]}, which a compiled step would do once instead of at every call: keep "
            "it in self.state[parameter], as a number or a tensor"
        )


def _is_torchs(attribute: str) -> bool:
    """Whether an attribute of an optimizer is looked after elsewhere, or is torch's own business."""
    return attribute.startswith("_") or attribute in ("state", "param_groups", "defaults", "step")
