"""Optimizer state that reports when the step looks at it: state that was made ahead must not be seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch


class WatchedState(defaultdict[torch.Tensor, Any]):
    """State of an optimizer that reports when somebody looks at it."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__(dict)
        self._note = note

    def __getitem__(self, key: torch.Tensor) -> Any:
        self._note()
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._note()
        return super().__iter__()

    def __len__(self) -> int:
        self._note()
        return super().__len__()

    def get(self, *args: Any) -> Any:
        """As ``dict.get``."""
        self._note()
        return super().get(*args)

    def keys(self) -> Any:
        """As ``dict.keys``."""
        self._note()
        return super().keys()

    def values(self) -> Any:
        """As ``dict.values``."""
        self._note()
        return super().values()

    def items(self) -> Any:
        """As ``dict.items``."""
        self._note()
        return super().items()
