"""The state of a scheduler whose optimizer has its groups in another order than when it was saved, or other groups.

A scheduler has lists with an entry for each group, by the group's number. The groups are known by the names of their
parameters, so each group gets the entry of those that its parameters come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .objects import Objects
from .optimizers import are_reordered, sources_of
from .trees import are_equal

# What torch's schedulers have a list of, an entry for each group; what else they have that is not a single value; and
# where others have the schedulers that they consist of. 2.11 to 2.15.
_PER_GROUP = frozenset("base_lrs _last_lr lr_lambdas min_lrs max_lrs base_momentums max_momentums".split())
_FOR_ALL = frozenset("milestones _milestones _schedule_phases _scale_fn_custom".split())
_PARTS = "_schedulers"


def regrouped(name: str, tree: Any, objects: Objects, stored: Mapping[str, Any]) -> Any:
    """The stored ``tree`` of the object ``name`` as the groups of its optimizer are now; ``stored``: those of all.

    Raises ``ValueError`` with the reason where it is not known what belongs to which group.
    """
    owner = getattr(objects.given[name], "optimizer", None)
    path = next((path for path, optimizer in objects.optimizers.items() if optimizer is owner), None)
    if path is None or path not in stored or not are_reordered(stored[path], objects.groups[path]):
        return tree
    try:
        return _regrouped(tree, objects.trees[name], sources_of(stored[path], objects.groups[path]))
    except _UnknownGroupError as error:
        raise ValueError(
            f"{name}: the groups of {path} were in another order, or divided otherwise, when it was saved, and "
            f"{error}. Make them as they were, or leave {name} out and make it anew"
        ) from None


class _UnknownGroupError(Exception):
    """An entry of which it is not known what belongs to which group."""


def _regrouped(tree: Any, live: Any, sources: list[list[int]]) -> dict[str, Any]:
    if not isinstance(tree, dict) or not isinstance(live, dict):
        raise _UnknownGroupError("its state is no dict")
    return {key: _entry(key, value, live.get(key), sources) for key, value in tree.items()}


def _entry(key: str, stored: Any, live: Any, sources: list[list[int]]) -> Any:
    if key in _FOR_ALL or _is_single(stored):
        return stored
    if key == _PARTS and isinstance(live, list) and len(live) == len(stored):
        return [_regrouped(part, its, sources) for part, its in zip(stored, live, strict=True)]
    if key in _PER_GROUP and isinstance(live, list) and len(live) == len(sources):
        return [_of_group(key, k, stored, live, numbers) for k, numbers in enumerate(sources)]
    raise _UnknownGroupError(f"what {key} has for which group is not known")


def _is_single(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return value is None or isinstance(value, (bool, int, float, str))


def _of_group(key: str, k: int, stored: Sequence[Any], live: Sequence[Any], numbers: Sequence[int]) -> Any:
    """The entry of group ``k``: that of the stored groups with these ``numbers``; its own if there are none."""
    if any(number >= len(stored) for number in numbers):
        raise _UnknownGroupError(f"{key} has no entry for each group")
    found = [stored[number] for number in numbers] or [live[k]]
    if not all(are_equal(each, found[0]) for each in found[1:]):
        raise _UnknownGroupError(f"group {k} has parameters of groups with different {key}")
    return found[0]
