"""``Unread``: stands for text among the arguments, such as file names, that the step may never read.

A step that runs with it as it ran with the text depends on no value of it, so later calls do not compare it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unread:
    """Raises ``TypeError`` for whatever reads it."""

    def __init__(self, name: str, reads: list[str]) -> None:
        """``reads``: gets the name at each read, also one of which the step catches the error."""
        self._name, self._reads = name, reads


def _attribute(self: Unread, key: str) -> Any:
    if key == "__class__":  # of which ``isinstance`` asks
        return Unread
    raise _read(self)


def _read(self: Unread) -> TypeError:
    name = object.__getattribute__(self, "_name")
    object.__getattribute__(self, "_reads").append(name)
    return TypeError(f"the step reads {name}")


def _raising(method: str) -> Callable[..., Any]:
    def read(self: Unread, *_: Any) -> Any:
        raise _read(self)

    read.__name__ = method
    return read


_READS = "eq ne lt le gt ge hash bool len iter contains getitem str repr format add radd mod rmod mul rmul truediv"
_OTHERS = "fspath int float index copy deepcopy reduce_ex"
Unread.__getattribute__ = _attribute  # type: ignore[method-assign,assignment]
for _each in f"{_READS} {_OTHERS}".split():
    setattr(Unread, f"__{_each}__", _raising(f"__{_each}__"))
