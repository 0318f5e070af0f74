"""Guards on parameter groups, and the live numbers that each call reads from groups and optimizer state."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import is_
from typing import Any

from ..call.state import SCHEDULER_NOTES, Arguments, HyperParameter, hyper_parameters_of, is_live
from ..python_state.effects.carried import Carried
from ..python_state.reads import is_plain
from .equality import structurally_equal


@dataclass
class ParameterGroups:
    """Flags of parameter groups, which are constants of a program, and hyper-parameters, which are its inputs."""

    flags: list[list[dict[str, Any]]]  # by optimizer and group
    live: list[tuple[int, int, str, int | None]]  # (optimizer, group, key, item) of each live hyper-parameter
    counters: list[tuple[int, int, str]]  # (optimizer, position in its state, key) of each number
    names: list[str]  # of both, in order
    checked: list[Any]  # all values of all groups when they were compared; empty if one can change in place
    carried: Carried
    kinds: list[type]  # of the carried numbers
    leaves: list[int]  # of the arguments, that are carried numbers

    @classmethod
    def of(cls, arguments: Arguments, carried: Carried) -> ParameterGroups:
        """The groups now, and numbers that the step carries."""
        found = hyper_parameters_of(arguments.optimizers, carried.counters)
        groups = _index([optimizer.param_groups for optimizer in arguments.optimizers.values()])
        entries = _index([list(optimizer.state.values()) for optimizer in arguments.optimizers.values()])
        values = _values(arguments)
        return cls(
            _flags(arguments, carried.counters),
            [(*groups[id(h.group)], h.key, h.item) for h in found if id(h.group) in groups],
            [(*entries[id(h.group)], h.key) for h in found if id(h.group) in entries],
            [*(each.name for each in found), *(each.name for each in carried.numbers), *carried.leaves],
            values if all(map(_is_immutable, values)) else [],
            carried,
            [type(site.get()) for site in carried.numbers],
            [k for name in carried.leaves for k, leaf in enumerate(arguments.leaves) if leaf.name == name],
        )

    def hold(self, arguments: Arguments) -> bool:
        """Whether every flag is as it was, and every carried number is one."""
        if [type(site.get()) for site in self.carried.numbers] != self.kinds:
            return False
        now = _values(arguments)
        if len(now) == len(self.checked) and all(map(is_, now, self.checked)):
            return True
        return structurally_equal(_flags(arguments, self.carried.counters), self.flags)

    def values(self, arguments: Arguments) -> list[Any]:
        """The live hyper-parameters, in order."""
        groups = [optimizer.param_groups for optimizer in arguments.optimizers.values()]
        found = [HyperParameter("", groups[k][j], key, item).get() for k, j, key, item in self.live]
        if self.counters:
            states = [list(optimizer.state.values()) for optimizer in arguments.optimizers.values()]
            found += [states[k][j][key] for k, j, key in self.counters]
        found += [site.get() for site in self.carried.numbers]
        return found + [arguments.leaves[k].value for k in self.leaves]

    def difference(self, arguments: Arguments) -> str:
        """The first flag that is not as it was, or nothing."""
        for path, groups, now in zip(
            arguments.optimizers, self.flags, _flags(arguments, self.carried.counters), strict=True
        ):
            if len(groups) != len(now):
                return f"{path} has {len(now)} parameter groups instead of {len(groups)}"
            for index, (group, current) in enumerate(zip(groups, now, strict=True)):
                for key in {**group, **current}:
                    if not structurally_equal(group.get(key), current.get(key)):
                        return f"{path}.{index}.{key}: {group.get(key)} -> {current.get(key)}"
        return ""


def _index(dicts: list[list[dict[str, Any]]]) -> dict[int, tuple[int, int]]:
    """(optimizer, index) of each dict, by its id."""
    return {id(each): (k, j) for k, listed in enumerate(dicts) for j, each in enumerate(listed)}


def _values(arguments: Arguments) -> list[Any]:
    groups = [group for optimizer in arguments.optimizers.values() for group in optimizer.param_groups]
    return [value for group in groups for key, value in group.items() if key != "params"]


def _is_immutable(value: Any) -> bool:
    return is_plain(value) or (isinstance(value, tuple) and all(map(_is_immutable, value)))


def _flags(arguments: Arguments, counters: Collection[tuple[str, int, str]]) -> list[list[dict[str, Any]]]:
    """Of each group of each optimizer; of a counter, its type."""
    return [
        [
            {
                key: type(value) if (path, index, key) in counters else _flag(value)
                for key, value in group.items()
                if key != "params" and key not in SCHEDULER_NOTES
            }
            for index, group in enumerate(optimizer.param_groups)
        ]
        for path, optimizer in arguments.optimizers.items()
    ]


def _flag(value: Any) -> Any:
    """``value``, or of a live hyper-parameter its type: an item may be one, and what is nested deeper is a constant."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_type_if_live, value))
    return _type_if_live(value)


def _type_if_live(value: Any) -> Any:
    if not is_live(value):
        return value
    return "float" if isinstance(value, float) else ("tensor", tuple(value.shape), value.dtype, value.device)
