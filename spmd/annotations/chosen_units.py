"""Modules and parameters that a parallel mode picks: the units of ``units=``, the experts of ``experts=``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from passes import PlacementError

from .._torch import own_children, own_parameters
from .contract import state

Choice = Callable[[nn.Module], bool] | type[nn.Module] | str


class ChosenUnits:
    """The choices: predicates, module classes, and fnmatch patterns over names. ``option``: what the user calls it."""

    def __init__(self, choices: Sequence[Choice], option: str = "units") -> None:
        self.choices, self.option = choices, option

    def parameters(self, modules: Mapping[str, nn.Module], names: Mapping[int, str]) -> frozenset[str]:
        """The parameters that a pattern names, or that are in a module of a class or predicate.

        Raises ``PlacementError`` for a choice that picks none.
        """
        inside = list(dict.fromkeys(module for whole in modules.values() for module in whole.modules()))
        held = {module: [names[id(each)] for each in module.parameters()] for module in inside}
        every, found = list(dict.fromkeys(name for own in held.values() for name in own)), set[str]()
        for choice in self.choices:
            if isinstance(choice, str):
                picked = {name for name in every if fnmatchcase(name, choice)}
            else:
                picked = {name for module in inside if _picks(choice, "", module) for name in held[module]}
            self._check_picked(choice, picked, "parameters", every)
            found |= picked
        return frozenset(found)

    def check_stacked(self, modules: Mapping[str, nn.Module]) -> None:
        """Raise ``PlacementError`` where a choice picks the modules of a list, each of which is one expert."""
        for path, entries in _submodules(modules).items():
            several = isinstance(entries, nn.ModuleList) and len(entries) > 1
            if not several or any(parameter.ndim > 2 for parameter in entries.parameters()):
                continue
            paths = [(f"{path}.{key}", entry) for key, entry in own_children(entries).items() if entry is not None]
            for choice in self.choices:
                if all(_picks(choice, name, entry) for name, entry in paths):
                    raise PlacementError(
                        f"expected {self.option}= to pick parameters whose dim 0 is the expert, but {_shown(choice)} "
                        f"picks the {len(paths)} modules of {path}, each with parameters of its own: stack them to one "
                        "parameter of (experts, ...), and compute them in a form that docs/experts.md lists"
                    )

    def groups(self, modules: Mapping[str, nn.Module], names: Mapping[int, str]) -> tuple[tuple[str, ...], ...]:
        """The parameters of each unit, in the order of its modules. ``names``: of all parameters, by id.

        A unit is a submodule without those inside of it that are units, too, or annotated. A shared parameter belongs
        to where it is registered first. Raises ``PlacementError`` for a choice that picks no submodule.
        """
        found: dict[str, list[str]] = {}
        claimed, seen = set[int](), set[nn.Module]()
        picked = self._picked(_submodules(modules))

        def visit(module: nn.Module, path: str, unit: str | None) -> None:
            if module in seen:
                return
            seen.add(module)
            unit = path if path in picked else unit
            for parameter in own_parameters(module).values():
                if parameter is not None and id(parameter) not in claimed:
                    claimed.add(id(parameter))
                    if unit is not None:
                        found.setdefault(unit, []).append(names[id(parameter)])
            for key, child in own_children(module).items():
                if child is not None and state(child) is None:
                    visit(child, f"{path}.{key}", unit)

        for path, module in modules.items():
            visit(module, path, None)
        return tuple(map(tuple, found.values()))

    def _picked(self, inside: Mapping[str, nn.Module]) -> set[str]:
        found = set[str]()
        for each in self.choices:
            picked = {path for path, module in inside.items() if _picks(each, path, module)}
            self._check_picked(each, picked, "submodules", inside)
            found |= picked
        return found

    def _check_picked(self, choice: Choice, picked: set[str], kind: str, among: Iterable[str]) -> None:
        if not picked:
            listed = ", ".join(list(among)[:8]) or "there are none"
            raise PlacementError(f"{_shown(choice)} in {self.option} picks none of the {kind} ({listed}, ...)")


def chosen_units(given: Any, option: str = "units") -> ChosenUnits | None:
    """The choices of an option, None for None. Raises ``TypeError`` for anything that cannot pick modules."""
    if given is None:
        return None
    several = isinstance(given, Iterable) and not isinstance(given, str | type)
    choices = tuple(given) if several else (given,)
    if not choices or not all(map(_is_choice, choices)):
        raise TypeError(
            f"expected {option} to be module classes, patterns over names of modules, or functions that pick modules, "
            f"got {given!r}"
        )
    return ChosenUnits(choices, option)


def _is_choice(given: Any) -> bool:
    if isinstance(given, type):
        return issubclass(given, nn.Module)
    return isinstance(given, str) or (callable(given) and not isinstance(given, nn.Module))


def _submodules(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """All but the models themselves, which hold what is in no unit."""
    return {f"{path}.{name}": module for path, each in modules.items() for name, module in each.named_modules() if name}


def _shown(choice: Choice) -> str:
    return repr(choice) if isinstance(choice, str) else getattr(choice, "__qualname__", repr(choice))


def _picks(choice: Choice, path: str, module: nn.Module) -> bool:
    if isinstance(choice, str):
        return fnmatchcase(path, choice)
    return isinstance(module, choice) if isinstance(choice, type) else bool(choice(module))
