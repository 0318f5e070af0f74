"""Whether a checkpoint fits the objects that are to load it: everything that does not, by name, before any change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .objects import Objects, has_state
from .optimizers import check_groups
from .schedulers import regrouped
from .stored import Stored
from .trees import is_expanded

_SHOWN = 20


def check_fit(objects: Objects, stored: Stored, where: str, strict: bool) -> None:
    """Raise ``ValueError`` with all that does not fit.

    Not ``strict``, names may be missing on either side, and dtypes differ; shapes may not.
    """
    wrong = [line for name in objects.given for line in _check(name, objects, stored, strict)]
    if wrong:
        more = [f"... and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
        lines = "\n  ".join([*wrong[:_SHOWN], *more])
        hint = "" if not strict else "\nWith strict=False, names may be missing on either side, and dtypes differ"
        raise ValueError(f"{where} does not fit what is to load it, and nothing was changed:\n  {lines}{hint}")


def _check(name: str, objects: Objects, stored: Stored, strict: bool) -> list[str]:
    each, trees = objects.given[name], stored.trees
    if name not in trees:
        return [f"{name}: missing in the checkpoint, which has {', '.join(trees)}"]
    if isinstance(each, nn.Module):
        return _check_model(name, objects, stored, strict)
    if isinstance(each, Optimizer):
        return _check_optimizer(name, objects.groups[name], trees[name], strict)
    if has_state(each):
        return _check_scheduler(name, objects, trees)
    if isinstance(each, (dict, list)):
        return []
    if isinstance(each, torch.Tensor) and isinstance(trees[name], torch.Tensor):
        return _differences(name, each, trees[name], strict)
    if repr(each) != repr(trees[name]) and strict:
        return [
            f"{name}: {trees[name]!r} in the checkpoint, {each!r} here, which cannot change: keep such values in a dict"
        ]
    return []


def _check_scheduler(name: str, objects: Objects, trees: Mapping[str, Any]) -> list[str]:
    try:
        regrouped(name, trees[name], objects, trees)
    except ValueError as error:
        return [str(error)]
    return []


def _check_model(name: str, objects: Objects, stored: Stored, strict: bool) -> list[str]:
    live, tree = objects.trees[name], stored.trees[name]
    if not isinstance(tree, dict):
        return [f"{name}: a model here, a {type(tree).__name__} in the checkpoint"]
    wrong = _check_names(name, live, tree) if strict else []
    for key in live.keys() & tree.keys():
        if isinstance(live[key], torch.Tensor) and isinstance(tree[key], torch.Tensor):
            wrong += _differences(f"{name}.{key}", live[key], tree[key], strict)
    if strict and stored.all_ties_known:
        for path, first in objects.ties.items():
            if path.startswith(f"{name}.") and stored.source(path) != stored.source(first):
                wrong.append(f"{path}: tied to {first} here, and not in the checkpoint")
    return sorted(wrong)


def _check_names(name: str, live: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    missing = [f"{name}.{key}: missing in the checkpoint" for key in live.keys() - stored.keys()]
    return missing + [f"{name}.{key}: unexpected, only in the checkpoint" for key in stored.keys() - live.keys()]


def _differences(path: str, live: torch.Tensor, stored: torch.Tensor, strict: bool) -> list[str]:
    if live.shape != stored.shape:
        return [f"{path}: shape {list(stored.shape)} in the checkpoint, {list(live.shape)} here"]
    if live.dtype != stored.dtype and strict:
        return [f"{path}: {stored.dtype} in the checkpoint, {live.dtype} here"]
    if is_expanded(live):
        return [f"{path}: expanded here, elements share memory: make it with .expand(...).clone()"]
    return []


def _check_optimizer(name: str, groups: list[list[str]], stored: Any, strict: bool) -> list[str]:
    if not isinstance(stored, dict) or not {"state", "param_groups"} <= stored.keys():
        return [f"{name}: an optimizer here, something else in the checkpoint"]
    live = dict.fromkeys(each for group in groups for each in group)
    saved = dict.fromkeys(each for group in stored["param_groups"] for each in group["params"])
    wrong = _check_names(name, live, saved) if strict else []
    return sorted(wrong) + check_groups(stored, groups, name)
