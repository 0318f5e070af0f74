"""Refuse to save state that a failed call left partly updated, or other than that of the other ranks.

A later process group knows nothing of that call, so its ranks ask here how the state of a call stands.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from passes import SpmdError

from .._torch import takes_state_hooks
from ..ranks.standing import Standing
from .state import Arguments


class RefusedSaves:
    """``state_dict`` of the modules and optimizers of a call raises ``why``, until all of them have loaded another.

    Then, or with ``allow``, they can be saved again; the ``standing`` of this rank starts anew once they have loaded.
    With an empty ``why`` they can be saved all the time: the state of this rank is whole, but all ranks may go back to
    another. ``partly``: why theirs, and no other state, is partly updated.
    """

    def __init__(self, given: Arguments, why: str, standing: Standing, partly: str = "") -> None:
        self.why, self.standing, self.partly = why, standing, partly
        owners = list(filter(takes_state_hooks, _owners(given)))
        self._owners = [weakref.ref(owner) for owner in owners]
        self._waiting = {id(owner) for owner in owners}
        self.is_over = False
        self._hooks = [hook for owner in owners for hook in self._hook(owner)]
        _all.add(self)

    def concerns(self, given: Arguments) -> bool:
        """Whether it refuses to save a module or an optimizer of a call."""
        owners = [ref() for ref in self._owners if self._hooks and self.why]
        return any(owner is other for owner in owners for other in _owners(given))

    def is_of(self, owners: set[int]) -> bool:
        """Whether it is about one of the modules and optimizers with these ids."""
        return any(id(ref()) in owners for ref in self._owners)

    def allow(self) -> None:
        """Let state be saved again."""
        self.is_over = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, owner: Any) -> list[Any]:
        return [
            owner.register_state_dict_pre_hook(self._refuse),
            owner.register_load_state_dict_post_hook(self._loaded),
        ]

    def _refuse(self, *_: Any) -> None:
        if self.why and not _is_readable:
            raise SpmdError(f"this state cannot be saved: {self.why}")

    def _loaded(self, owner: Any, *_: Any) -> None:
        self._waiting.discard(id(owner))
        if not self._waiting and not self.is_over:
            # The hooks stay: torch calls this one while it iterates over them.
            self.why, self.is_over = "", True
            self.standing.restore(0)


_is_readable = False
_all: weakref.WeakSet[RefusedSaves] = weakref.WeakSet()  # the hooks of an owner hold them


@contextmanager
def readable() -> Iterator[None]:
    """Let ``state_dict`` return state that must not be saved: a load asks for what it is about to overwrite."""
    global _is_readable
    before, _is_readable = _is_readable, True
    try:
        yield
    finally:
        _is_readable = before


def allow_all(given: Arguments) -> None:
    """Let the state of a call be saved again, which has been made whole, whichever step refused it."""
    owners = set(map(id, _owners(given)))
    for refused in list(_all):
        if all(ref() is None or id(ref()) in owners for ref in refused._owners):
            refused.allow()


def refusal_of(given: Arguments) -> tuple[Standing | None, str]:
    """The standing of the state of a call, and why that is partly updated, if it must not be saved; else nothing."""
    found = [refused for refused in list(_all) if refused.concerns(given)]
    first = next((refused for refused in found if refused.partly), found[0] if found else None)
    return (first.standing, first.partly) if first is not None else (None, "")


def has_failed(given: Arguments) -> bool:
    """Whether the last call on the state of this one failed, and that has not been mended since."""
    owners = set(map(id, _owners(given)))
    return any(not refused.is_over and refused.is_of(owners) for refused in list(_all))


def _owners(given: Arguments) -> list[Any]:
    return [*given.modules.values(), *given.optimizers.values()]
