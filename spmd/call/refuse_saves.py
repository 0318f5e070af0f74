"""Refuse to save state that a failed call left partly updated, or other than that of the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from passes import SpmdError

from .state import Arguments


class RefusedSaves:
    """``state_dict`` of the modules and optimizers of a call raises ``why``, until all of them have loaded another.

    Then, or with ``allow``, they can be saved again; ``on_loaded`` is called once they have loaded.
    """

    def __init__(self, given: Arguments, why: str, on_loaded: Callable[[], None]) -> None:
        self._why, self._on_loaded = why, on_loaded
        owners: list[Any] = [*given.modules.values(), *given.optimizers.values()]
        self._waiting = {id(owner) for owner in owners}
        self._hooks = [hook for owner in owners for hook in self._hook(owner)]

    def allow(self) -> None:
        """Let state be saved again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, owner: Any) -> list[Any]:
        return [
            owner.register_state_dict_pre_hook(self._refuse),
            owner.register_load_state_dict_post_hook(self._loaded),
        ]

    def _refuse(self, *_: Any) -> None:
        raise SpmdError(f"this state cannot be saved: {self._why}")

    def _loaded(self, owner: Any, *_: Any) -> None:
        self._waiting.discard(id(owner))
        if not self._waiting:
            self.allow()
            self._on_loaded()
