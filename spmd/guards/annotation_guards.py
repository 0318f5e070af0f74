"""Guards on annotations: modules carry the ones that they had when the program was compiled."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn

from ..annotations.contract import Annotation, applications, state
from ..call.state import Arguments, submodules_of


@dataclass
class AnnotationGuards:
    """The annotation of each module of a call, None where it carries none. ``seen``: how many were ever applied.

    Modules are referred to weakly: a program is released once they are gone.
    """

    modules: list[tuple[str, weakref.ref[nn.Module], Annotation | None]]
    seen: int

    @classmethod
    def of(cls, arguments: Arguments) -> AnnotationGuards:
        """The annotations now."""
        found = [(name, weakref.ref(each), state(each)) for name, each in submodules_of(arguments.modules)]
        return cls(found, applications())

    def hold(self) -> bool:
        """Whether no module was annotated since."""
        if applications() != self.seen:
            if self.difference():
                return False
            self.seen = applications()
        return True

    def difference(self) -> str:
        """The first module that was annotated since, or nothing."""
        for name, reference, before in self.modules:
            module = reference()
            now = state(module) if module is not None else before
            if now is not before and now is not None:
                return f"{now.api} was applied to {name}"
        return ""
