"""``Unread``: stands for text among the arguments, such as file names, that the step may never read.

A step that runs with it as it ran with the text depends on no value of it, so later calls do not compare it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unread:
    """Raises ``TypeError`` for whatever reads it."""

    def __init__(self, name: str) -> None:
        self._name = name


def _attribute(self: Unread, key: str) -> Any:
    if key == "__class__":  # of which ``isinstance`` asks
        return Unread
    raise TypeError(f"the step reads {object.__getattribute__(self, '_name')}")


def _raising(method: str) -> Callable[..., Any]:
    def read(self: Unread, *_: Any) -> Any:
        raise TypeError(f"the step reads {object.__getattribute__(self, '_name')}")

    read.__name__ = method
    return read


_READS = "eq ne lt le gt ge hash bool len iter contains getitem str repr format add radd mod rmod mul rmul truediv"
_OTHERS = "fspath int float index copy deepcopy reduce_ex"
Unread.__getattribute__ = _attribute  # type: ignore[method-assign,assignment]
for _each in f"{_READS} {_OTHERS}".split():
    setattr(Unread, f"__{_each}__", _raising(f"__{_each}__"))
