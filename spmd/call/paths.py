"""``Path``: how a call gets from its arguments, or from the step's function, to an object that the step uses.

Later calls follow the path again and compare what they come to by identity, so that nothing on the way is kept alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Access = Callable[[Any, Any], Any]


class _Leaf(Protocol):
    @property
    def value(self) -> Any: ...


def field_of(holder: Any, key: str) -> Any:
    """The attribute that an object holds itself."""
    return vars(holder)[key]


def entry_of(holder: Any, key: str) -> Any:
    """The entry of an object's class, or of one of its bases."""
    return next(vars(cls)[key] for cls in type(holder).__mro__ if key in vars(cls))


def item_of(container: Any, key: Any) -> Any:
    """The item of a list, tuple or dict, read past what a class of the user's does: a default dict would add it."""
    return dict.get(container, key) if isinstance(container, dict) else container[key]


def cell_of(function: Any, index: int) -> Any:
    """The value of a function's closure variable."""
    return function.__closure__[index].cell_contents


def global_of(function: Any, key: str) -> Any:
    """The global of a function's file."""
    return function.__globals__[key]


@dataclass(frozen=True, eq=False)
class Path:
    """The way to an object from ``root``, or from the argument that is leaf number ``leaf``; ``name`` is the user's."""

    name: str
    root: Any = None
    leaf: int | None = None
    keys: tuple[tuple[Access, Any], ...] = ()

    def to(self, access: Access, key: Any, name: str = "") -> Path:
        """The path one step further; without a ``name`` the step is not a part of it."""
        joined = ".".join(filter(None, [self.name, name]))
        return Path(joined, self.root, self.leaf, (*self.keys, (access, key)))

    def walk(self, leaves: Sequence[_Leaf]) -> Iterator[Any]:
        """Yield the values on the path now, from the root to its end. Stops where the path ends early."""
        value = self.root if self.leaf is None else leaves[self.leaf].value
        yield value
        try:
            for access, key in self.keys:
                value = access(value, key)
                yield value
        except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
            return

    def get(self, leaves: Sequence[_Leaf]) -> Any:
        """The value at the end of the path now; None if it ends early."""
        passed = [*self.walk(leaves)]
        return passed[-1] if len(passed) > len(self.keys) else None


@dataclass(frozen=True, eq=False)
class Found:
    """A module, optimizer or scaler that the step uses and that is no argument."""

    path: Path
    value: Any

    @property
    def name(self) -> str:
        """The name in the user's words."""
        return self.path.name
