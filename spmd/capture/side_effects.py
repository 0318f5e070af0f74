"""Side effects on Python state while a step is traced: found, undone, and reported or refused.

A trace runs the user's code once; what it does to attributes and parameter groups is not in the graph. A compiled step
would do it once instead of at every call, or leave traced tensors in the user's objects.
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
    """Whether the graph computes ``value``."""
    return isinstance(value, (torch.Tensor, torch.SymFloat, torch.SymInt))


def holds_traced(value: Any) -> bool:
    """Whether there is a traced value anywhere in nested lists, tuples and dicts."""
    return any(is_traced(leaf) for leaf in tree_flatten(value)[0])


@contextmanager
def contain_module_effects(name: str, module: nn.Module) -> Iterator[None]:
    """Restore a module's attributes if tracing fails; else warn of those that the step changed.

    An attribute that holds a traced tensor afterwards is restored in any case: outside of the trace it has no value.
    """
    before = dict(module.__dict__)
    contents = {key: type(value)(value) for key, value in before.items() if type(value) in (list, dict, set)}
    try:
        yield
    except BaseException:
        _restore(module, before, contents, [*module.__dict__, *before])
        raise
    changed = [k for k, v in module.__dict__.items() if v is not before.get(k) or _differs(v, contents.get(k))]
    lost = [key for key in changed if not key.startswith("_") and key != "training"]
    _restore(module, before, contents, [key for key in changed if holds_traced(module.__dict__[key])])
    if lost:
        warnings.warn(
            f"the step changes {', '.join(f'{name}.{key}' for key in lost)}, which a compiled step does only once, "
            "while it is traced. Make it a buffer, or change it outside of the step",
            stacklevel=2,
        )


def _differs(value: Any, content: Any) -> bool:
    """Whether a list, dict or set has other entries than ``content``."""
    if content is None:
        return False
    if isinstance(value, dict):
        return value.keys() != content.keys() or any(value[key] is not content[key] for key in value)
    if isinstance(value, list):
        return len(value) != len(content) or any(a is not b for a, b in zip(value, content, strict=True))
    return len(value) != len(content)


def _restore(module: nn.Module, before: dict[str, Any], contents: dict[str, Any], keys: list[str]) -> None:
    for key in keys:
        if key not in before:
            module.__dict__.pop(key, None)
            continue
        module.__dict__[key] = before[key]
        if key in contents:
            before[key].clear()
            (before[key].extend if isinstance(before[key], list) else before[key].update)(contents[key])


@contextmanager
def contain_group_effects(name: str, group: dict[str, Any]) -> Iterator[None]:
    """Raise ``CaptureError`` if the step changes a parameter group, as a scheduler called inside of it does."""
    before = dict(group)
    yield
    changed = [key for key in group if key not in before or group[key] is not before[key]]
    if changed:
        raise CaptureError(
            f"the step changes {name}.{changed[0]}, which a compiled step would do only once, while it is traced. "
            "Change hyper-parameters, and call schedulers, outside of the step. An optimizer keeps what it counts in "
            "self.state[parameter], as a number or a tensor"
        )


@contextmanager
def contain_group_list_effects(path: str, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Raise ``CaptureError`` if the step adds or removes parameter groups; the list is restored in any case."""
    before = list(groups)
    try:
        yield
        if len(groups) != len(before):
            raise CaptureError(f"the step changes the number of {path}.param_groups. Do so outside of the step")
    finally:
        groups[:] = before


@contextmanager
def contain_optimizer_effects(name: str, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore an optimizer's attributes; raise ``CaptureError`` if the step has changed one, such as a counter."""
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
            f"the step changes {name}.{changed[0]}, which a compiled step would do only once, while it is traced. "
            "Keep it in self.state[parameter], as a number or a tensor"
        )


def _is_torchs(attribute: str) -> bool:
    """Whether an attribute of an optimizer is torch's own, or is handled elsewhere."""
    return attribute.startswith("_") or attribute in ("state", "param_groups", "defaults", "step")
