"""Guards on the tree of modules: which there are, of which classes, and which of them are training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from .._torch import CHILDREN, own_children
from ..call.state import Arguments, submodules_of


@dataclass
class ModuleTree:
    """The submodules of the modules among a call's arguments."""

    names: list[str]
    fields: list[dict[str, Any]]  # the attributes of each module
    training: list[bool | None]
    children: list[dict[str, Any]]  # of each module that has children
    childless: list[dict[str, Any]]  # the empty dicts of all others
    child_names: list[str]
    modules: list[Any]
    classes: list[type]  # of ``modules``: registering a parametrization changes the class of a module

    @classmethod
    def of(cls, arguments: Arguments) -> ModuleTree:
        """The tree now."""
        named = list(submodules_of(arguments.modules))
        children = [own_children(module) for _, module in named]
        modules = list(chain.from_iterable(map(dict.values, children)))
        return cls(
            [name for name, _ in named],
            [vars(module) for _, module in named],
            [vars(module).get("training") for _, module in named],  # a compiled module asks the one that it holds
            [each for each in children if each],
            [each for each in children if not each],
            [f"{name}.{key}" for (name, _), each in zip(named, children, strict=True) for key in each],
            modules,
            list(map(type, modules)),
        )

    def hold(self) -> bool:
        """Whether no module was exchanged, and none switched between train and eval."""
        now = list(chain.from_iterable(map(dict.values, self.children)))  # modules are equal if they are identical
        if now != self.modules or any(self.childless) or list(map(type, now)) != self.classes:
            return False
        return list(map(dict.get, self.fields, repeat("training"))) == self.training

    def difference(self) -> str:
        """The first module that is not as it was, or nothing."""
        return self._exchanged() or self._reclassed() or self._switched()

    def _exchanged(self) -> str:
        now = {
            f"{name}.{key}": module
            for name, fields in zip(self.names, self.fields, strict=True)
            for key, module in fields[CHILDREN].items()
        }
        before = dict(zip(self.child_names, self.modules, strict=True))
        for name, module in now.items():
            if before.get(name) is not module:
                return f"{name} is another module"
        return f"{next(iter(before.keys() - now.keys()))} is gone" if len(now) != len(before) else ""

    def _reclassed(self) -> str:
        for name, module, cls in zip(self.child_names, self.modules, self.classes, strict=True):
            if type(module) is not cls:
                return f"the class of {name}: {cls.__qualname__} -> {type(module).__qualname__}"
        return ""

    def _switched(self) -> str:
        for name, fields, before in zip(self.names, self.fields, self.training, strict=True):
            if fields.get("training") is not before:
                return f"{name}.training: {before} -> {fields.get('training')}"
        return ""
