"""``Captured`` as data, but for its program, and back: where outputs belong, and conditions on numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch

from passes import Program

from .._torch import TreeSpec, tree_flatten, tree_unflatten
from ..answers.answer import Answer
from ..capture.captured import Captured, FromOutput, NewState
from ..capture.hyper_conditions import HyperGuards
from ..python_state.effects.carried import Carried
from ..python_state.effects.writes import GroupEntry, Write
from ..python_state.reads import Reads, ReadSite
from ..watching.watch import Spec
from .conditions import condition_from_data, condition_to_data
from .not_cached import NotCachedError
from .program_data import scalar_from_data, scalar_to_data
from .read_data import StoredReads, sites_of


def captured_to_data(captured: Captured, constants: list[Any], places: Mapping[Any, int]) -> dict[str, Any]:
    """``captured`` as JSON, with its constants as data. Raises ``NotCachedError`` for what refers to other objects.

    ``places``: the numbers of the sites that its trace read, by address; those of inputs count down from -1.
    """
    if captured.guards.branches:
        raise NotCachedError("the step branches on the value of state")
    if captured.returns_loss:
        raise NotCachedError("it returns a loss that it does not train, which each process is warned of")
    carried = captured.carried
    if kept := [*(site.name for site in carried.sites), *(key for *_, key in carried.counters)]:
        raise NotCachedError(f"the step keeps {kept[0]} from call to call")
    places = {**places, **{site.address: -1 - number for number, site in enumerate(carried.numbers)}}
    checks = zip(captured.guards.positions, captured.guards.expressions, strict=True)
    return {
        "conditions": [[positions, condition_to_data(*expression)] for positions, expression in checks],
        "numbers": captured.guards.numbers,
        "constants": constants,
        "is of one size": captured.is_of_one_size,
        "results": list(map(_leaf, captured.result_leaves)),
        "result": _spec(captured.result_spec),
        "new state": [
            [each.parameter, _tree(each.value), each.optimizer, scalar_to_data(each.key), _leaf(each.unless)]
            for each in captured.new_state
        ],
        "cleared gradients": captured.cleared_gradients,
        "requires grad": captured.requires_grad,
        "leaves": carried.leaves,
        "unread": carried.unread,
        "writes": [_write(each, places) for each in captured.writes],
        "live": captured.live,
        "fixed": [[name, scalar_to_data(value)] for name, value in captured.fixed.items()],
        "cleared first": sorted(captured.cleared_first),
        "specs": list(map(astuple, captured.specs)),
        "watched": [
            [captured.specs.index(spec), names, statistic, each.index]
            for (spec, names, statistic), each in captured.watched.items()
        ],
        "answers": [[each.value, each.where] for each in captured.answers],
    }


def captured_from_data(data: Mapping[str, Any], program: Program, reads: StoredReads) -> Captured:
    """The capture that ``data`` is, with constants found where ``reads`` has them."""
    guards = HyperGuards(
        positions=[tuple(positions) for positions, _ in data["conditions"]],
        checks=[condition_from_data(tree) for _, tree in data["conditions"]],
        expressions=[None for _ in data["conditions"]],
        numbers=data["numbers"],
    )
    return Captured(
        program=program,
        guards=guards,
        constants=[_read_constant(each, reads) for each in data["constants"]],
        result_leaves=list(map(_read_leaf, data["results"])),
        result_spec=_read_spec(data["result"]),
        new_state=[
            NewState(parameter, _read_tree(value), optimizer, scalar_from_data(key), _read_leaf(unless))
            for parameter, value, optimizer, key, unless in data["new state"]
        ],
        cleared_gradients=list(data["cleared gradients"]),
        requires_grad={str(name): bool(value) for name, value in data["requires grad"].items()},
        carried=Carried(tuple(reads.kept), leaves=tuple(data["leaves"]), unread=tuple(data["unread"])),
        writes=[_read_write(each, reads) for each in data["writes"]],
        live=data["live"],
        fixed={name: scalar_from_data(value) for name, value in data["fixed"]},
        cleared_first=frozenset(data["cleared first"]),
        specs=(specs := tuple(Spec(pattern, tuple(names), *rest) for pattern, names, *rest in data["specs"])),
        watched={(specs[k], tuple(names), each): FromOutput(index) for k, names, each, index in data["watched"]},
        answers=tuple(Answer(*each) for each in data["answers"]),
        is_of_one_size=data["is of one size"],
    )


def _leaf(leaf: Any) -> Any:
    return {"output": leaf.index} if isinstance(leaf, FromOutput) else scalar_to_data(leaf)


def _read_leaf(data: Any) -> Any:
    return FromOutput(data["output"]) if isinstance(data, dict) and "output" in data else scalar_from_data(data)


def _tree(value: Any) -> Any:
    leaves, spec = tree_flatten(value)
    return [_spec(spec), list(map(_leaf, leaves))]


def _read_tree(data: Any) -> Any:
    spec, leaves = data
    return tree_unflatten(list(map(_read_leaf, leaves)), _read_spec(spec))


def _spec(spec: TreeSpec) -> Any:
    """A structure of lists, tuples and dicts, with the numbers of leaves."""
    return _structure(tree_unflatten(list(range(spec.num_leaves)), spec))


def _structure(tree: Any) -> Any:
    if type(tree) is int:
        return tree
    if type(tree) in (list, tuple):
        return {"t" if type(tree) is tuple else "l": list(map(_structure, tree))}
    if type(tree) is dict:
        return {"d": [[scalar_to_data(key), _structure(value)] for key, value in tree.items()]}
    raise NotCachedError(f"the step returns, or writes, a {type(tree).__qualname__}")


def _read_spec(data: Any) -> TreeSpec:
    leaves, spec = tree_flatten(_read_structure(data))
    if leaves != list(range(len(leaves))):
        raise ValueError("the leaves of a result are out of order")
    return spec


def _read_structure(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, of),) = data.items()
    if kind == "d":
        return {scalar_from_data(key): _read_structure(value) for key, value in of}
    return (tuple if kind == "t" else list)(map(_read_structure, of))


def _write(write: Any, places: Mapping[Any, int]) -> Any:
    """A write to an entry of a group, or to an input; or of flags and texts to a site that was read."""
    if not isinstance(write, Write):
        raise NotCachedError(f"the step writes to {write.name}")
    if isinstance(write.target, GroupEntry):
        target: Any = [write.target.path, write.target.index, write.target.key]
    else:
        target = places.get(write.target.address) if isinstance(write.target, ReadSite) else None
        if target is None or write.in_place or (target >= 0 and not all(map(_is_flag, write.leaves))):
            raise NotCachedError(f"the step writes to {write.name}")
    return [target, list(map(_leaf, write.leaves)), _spec(write.spec), write.in_place, write.had_graph]


def _is_flag(leaf: Any) -> bool:
    return type(leaf) in (bool, str, type(None))


def _read_write(data: Sequence[Any], reads: StoredReads) -> Write:
    place, leaves, spec, in_place, had_graph = data
    target: ReadSite | GroupEntry
    if isinstance(place, int):
        target = [*reads.sites.values()][place] if place >= 0 else reads.kept[-1 - place]
    else:
        target = GroupEntry(*place)
    return Write(target, list(map(_read_leaf, leaves)), _read_spec(spec), in_place, had_graph)


def constant_to_data(tensor: torch.Tensor, reads: Reads) -> Any:
    """A constant at a site that the step read, by the number of that; its values, if the step itself made it."""
    for number, site in enumerate(sites_of(reads)):
        if site.get() is tensor:
            return {"site": number}
    is_small = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.numel() <= 1000
    if not is_small or not reads.is_made(tensor):
        raise NotCachedError("the step reads a tensor that is no argument, where no attribute or global holds it")
    return {"values": tensor.reshape(-1).tolist(), "dtype": scalar_to_data(tensor.dtype), "shape": list(tensor.shape)}


def _read_constant(data: Mapping[str, Any], reads: StoredReads) -> torch.Tensor:
    if "site" in data:
        tensor = [*reads.sites.values()][data["site"]].get()
        assert isinstance(tensor, torch.Tensor), "its description was that of a tensor"
        return tensor
    return torch.tensor(data["values"], dtype=scalar_from_data(data["dtype"]), device="cpu").reshape(data["shape"])
