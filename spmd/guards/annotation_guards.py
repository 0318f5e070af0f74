"""Guards on annotations: modules carry the ones that they had when the program was compiled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..annotations.contract import Annotation, applications, state
from ..call.state import Arguments, submodules_of


@dataclass
class AnnotationGuards:
    """The annotation of each module of a call, None where it carries none. ``seen``: how many were ever applied."""

    modules: list[tuple[str, nn.Module, Annotation | None]]
    seen: int

    @classmethod
    def of(cls, arguments: Arguments) -> AnnotationGuards:
        """The annotations now."""
        return cls([(name, each, state(each)) for name, each in submodules_of(arguments.modules)], applications())

    def hold(self) -> bool:
        """Whether no module was annotated since."""
        if applications() != self.seen:
            if self.difference():
                return False
            self.seen = applications()
        return True

    def difference(self) -> str:
        """The first module that was annotated since, or nothing."""
        for name, module, before in self.modules:
            now = state(module)
            if now is not before:
                assert now is not None, "annotations stay"
                return f"{now.api} was applied to {name}"
        return ""
