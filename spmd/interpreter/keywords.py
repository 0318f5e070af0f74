"""Keyword arguments that a public function does not have: the error names those that are close, and who has them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from passes.errors import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def checks_keywords(name: str, **others: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function raise ``TypeError`` for a keyword that it does not have, with close ones.

    ``name``: the function as users write it. ``others``: by an option of it, what it takes whose own options users may
    pass to it instead.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [*inspect.signature(function).parameters]
        theirs = {option: (each, [*inspect.signature(each).parameters]) for option, each in others.items()}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            wrong = next((each for each in kwargs if each not in known), None)
            if wrong is not None:
                raise TypeError(f"{name} has no option {wrong!r}{_advice(wrong, known, theirs)}")
            return function(*args, **kwargs)

        return checked

    return decorate


def _advice(wrong: str, known: list[str], others: Mapping[str, tuple[Callable[..., Any], list[str]]]) -> str:
    for option, (owner, names) in others.items():
        if wrong in names:
            return f", but spmd.{owner.__name__} has: pass {option}=spmd.{owner.__name__}({wrong}=...)"
    return did_you_mean(wrong, known)
