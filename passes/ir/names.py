"""Names with properties: what asks about a value reads these, and need not know which names there are."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, Self

_known: dict[tuple[type, str], Any] = {}


class Name(str):
    """A text with properties: a base of frozen dataclasses with ``eq=False``, whose first field is ``name``.

    A name is one object in each process, also where it is copied or unpickled: ``is`` compares it.
    """

    def __new__(cls, name: str, *given: Any, **named: Any) -> Self:
        """The object of this name. Raises ``ValueError`` where it has other properties already."""
        declared: Any = fields(cls)  # type: ignore[arg-type]
        own = {each.name: each.default for each in declared}
        own |= dict(zip(own, (name, *given), strict=False)) | named
        found: Self = _known.setdefault((cls, name), str.__new__(cls, name))
        if vars(found) not in ({}, own):
            raise ValueError(f"expected {name!r} to have the properties {vars(found)}, as before, got {own}")
        return found

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """The class and the fields, from which copies and other processes get their own."""
        return type(self), tuple(vars(self).values())

    def to_data(self) -> Any:
        """Plain data for JSON: the name if its class declares it, else all fields, for who does not know the name."""
        return str(self) if _declared(type(self)).get(self) is self else dict(vars(self))

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """The value of ``to_data``. Raises ``ValueError`` for a name that the class does not declare."""
        if not isinstance(data, str):
            return cls(**data)
        known: dict[str, Self] = _declared(cls)
        if data not in known:
            raise ValueError(
                f"expected a {cls.__name__} to be one of {', '.join(known)}, or to have its fields with it, got "
                f"{data!r}: another version has saved it, so save it anew"
            )
        return known[data]


@cache
def _declared(cls: type) -> dict[str, Any]:
    """The values that a class has as attributes, by name."""
    return {str(each): each for each in vars(cls).values() if type(each) is cls}
