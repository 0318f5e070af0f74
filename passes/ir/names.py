"""Names with properties: what asks about a value reads these, and need not know which names there are."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Self


class Name(str):
    """A text with properties: a base of frozen dataclasses with ``eq=False``, whose first field is ``name``.

    A name is one object in each process, also where it is copied or unpickled: ``is`` compares it.
    """

    _known: ClassVar[dict[tuple[type, str], Any]] = {}

    def __new__(cls, name: str, *given: Any, **named: Any) -> Self:
        """The object of this name. Raises ``ValueError`` where it has other properties already."""
        declared: Any = fields(cls)  # type: ignore[arg-type]
        own = {each.name: each.default for each in declared}
        own |= dict(zip(own, (name, *given), strict=False)) | named
        found: Self = cls._known.setdefault((cls, name), str.__new__(cls, name))
        if vars(found) not in ({}, own):
            raise ValueError(f"expected {name!r} to have the properties {vars(found)}, as before, got {own}")
        return found

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """The class and the fields, from which copies and other processes get their own."""
        return type(self), tuple(vars(self).values())
