"""The state of an optimizer by the names of its parameters, from its ``state_dict`` and back.

torch numbers parameters by their place in the groups. By name, state finds its parameter also in an optimizer whose
groups are in another order, or divided otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..call.nested_state import item_at, leaves_of, with_item
from ..call.refuse_saves import readable
from .trees import are_equal

_NOT_HYPER = ("params", "param_names")


def names_in(optimizer: Optimizer, path: str, names: Mapping[int, str]) -> list[list[str]]:
    """The names of the parameters of each group. ``names``: by ``id``, of all parameters of the models.

    Raises ``ValueError`` for a parameter that has none.
    """
    return [
        [_name(parameter, k, group, path, names) for k, parameter in enumerate(group["params"])]
        for group in optimizer.param_groups
    ]


def _name(parameter: torch.Tensor, k: int, group: dict[str, Any], path: str, names: Mapping[int, str]) -> str:
    if id(parameter) in names:
        return names[id(parameter)]
    if "param_names" in group:
        return str(group["param_names"][k])
    raise ValueError(
        f"{path} has a parameter of shape {list(parameter.shape)} that no model given here has: give the model, too, "
        "or make the optimizer with model.named_parameters()"
    )


def by_name(state_dict: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """``Optimizer.state_dict()`` with names in place of numbers; what else an optimizer has there stays."""
    name_of = _name_of(state_dict, names)
    groups = [
        {"params": own} | {key: value for key, value in group.items() if key not in _NOT_HYPER}
        for group, own in zip(state_dict["param_groups"], names, strict=True)
    ]
    state = {name_of.get(key, key): entry for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def load_optimizer(optimizer: Optimizer, tree: dict[str, Any], names: list[list[str]]) -> None:
    """Let an optimizer load a tree that ``by_name`` made, with the very tensors in it."""
    with readable():
        state_dict = optimizer.state_dict()
    optimizer.load_state_dict(by_number(tree, state_dict, names))
    for group, own in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], own, strict=True):
            for path, value in leaves_of(tree["state"].get(name, {})):
                now = item_at(optimizer.state[parameter], path)
                if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                    # torch casts state to the dtype of its parameter; stored is what the optimizer had
                    with_item(optimizer.state[parameter], path, value.to(now.device))


def by_number(tree: dict[str, Any], state_dict: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """The part of a ``tree`` of ``by_name`` that the optimizer with this ``state_dict`` and these ``names`` loads.

    State of parameters that it does not have is left out; of those that the tree does not have, it keeps its own.
    """
    number_of = {name: key for key, name in _name_of(state_dict, names).items()}
    saved = {name for group in tree["param_groups"] for name in group["params"]}
    kept = {
        key: entry for key, entry in state_dict["state"].items() if _name_of(state_dict, names).get(key) not in saved
    }
    loaded = {
        number_of.get(name, name): entry
        for name, entry in tree["state"].items()
        if name in number_of or name not in saved
    }
    groups = [group | hyper_parameters(tree, own) for group, own in zip(state_dict["param_groups"], names, strict=True)]
    return {**state_dict, **tree, "state": kept | loaded, "param_groups": groups}


def hyper_parameters(tree: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The hyper-parameters that a tree has for a group with these parameters; none if it knows none of them."""
    found = _groups_of(tree, names)
    return {key: value for key, value in found[0].items() if key not in _NOT_HYPER} if found else {}


def check_groups(tree: dict[str, Any], names: list[list[str]], path: str) -> list[str]:
    """A sentence for each group whose parameters had different hyper-parameters when they were saved."""
    wrong = []
    for k, own in enumerate(names):
        first, *rest = [
            {key: value for key, value in group.items() if key not in _NOT_HYPER} for group in _groups_of(tree, own)
        ] or [{}]
        differ = sorted({key for other in rest for key in first if not are_equal(first[key], other.get(key))})
        if differ:
            wrong.append(
                f"{path}: group {k} has parameters of groups that were saved with different {', '.join(differ)}"
            )
    return wrong


def are_reordered(tree: dict[str, Any], names: list[list[str]]) -> bool:
    """Whether the groups of a tree have other parameters than those with these ``names``, one by one."""
    return [set(group["params"]) for group in tree["param_groups"]] != [set(own) for own in names]


def sources_of(tree: dict[str, Any], names: list[list[str]]) -> list[list[int]]:
    """For each group with these ``names``, the numbers of the groups of a tree that have some of its parameters."""
    saved = [set(group["params"]) for group in tree["param_groups"]]
    return [[number for number, members in enumerate(saved) if not members.isdisjoint(own)] for own in names]


def _groups_of(tree: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The groups in which some of these parameters were saved."""
    (numbers,) = sources_of(tree, [names])
    return [tree["param_groups"][number] for number in numbers]


def _name_of(state_dict: dict[str, Any], names: list[list[str]]) -> dict[Any, str]:
    """From the number of a parameter to its name."""
    pairs = zip(state_dict["param_groups"], names, strict=True)
    return {key: name for group, own in pairs for key, name in zip(group["params"], own, strict=True)}
