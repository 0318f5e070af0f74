"""``shrunk``: fewer and smaller choices that still make a step fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .choices import Choices

_LISTS = ("statements", "changes")


def shrunk(choices: Choices, fails: Callable[[Choices], bool]) -> Choices:
    """The smallest choices that ``fails`` is true of, where each single simplification makes it false.

    Parts are left out first, then single statements; then numbers become zero, which stands for the simplest option.
    """
    before = None
    while choices != before:
        before, position = choices, 0
        simpler = list(_simpler(choices))
        while position < len(simpler):
            if fails(simpler[position]):
                choices = simpler[position]
                simpler = list(_simpler(choices))  # what follows stands at this position now
            else:
                position += 1
    return choices


def _simpler(choices: Choices) -> Iterator[Choices]:
    """The choices with one simplification each, the largest first."""
    parts: dict[str, Any] = {each.name: getattr(choices, each.name) for each in fields(choices)}
    yield from (_with(choices, name, ()) for name, part in parts.items() if part)
    for name in _LISTS:
        part = parts.pop(name)
        yield from (_with(choices, name, part[:k] + part[k + 1 :]) for k in range(len(part)))
        for k, numbers in enumerate(part):
            yield from (_with(choices, name, (*part[:k], each, *part[k + 1 :])) for each in _with_a_zero(numbers))
    for name, numbers in parts.items():
        yield from (_with(choices, name, each) for each in _with_a_zero(numbers))


def _with(choices: Choices, name: str, part: Any) -> Choices:
    return replace(choices, **{name: part})


def _with_a_zero(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield from ((*numbers[:k], 0, *numbers[k + 1 :]) for k, number in enumerate(numbers) if number)
