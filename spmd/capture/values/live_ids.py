"""``id`` of state while a step is traced: that of the live tensor, which the user's code may have noted before."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ...interpreter.foreign_code import is_foreign_frame
from ..unsupported import Refused


@contextmanager
def ids_of_live_state(state: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let ``id`` of a fake be that of its live tensor, in the user's code; ``state``: pairs of both."""
    plain = builtins.id
    live_of = {plain(fake): live for live, fake in state}

    def id_of(value: Any) -> int:
        live = live_of.get(plain(value))
        if live is None or is_foreign_frame(sys._getframe(1)):
            return plain(value)
        if isinstance(live, DTensor):
            raise Refused(
                "it asks for the id of a parameter that a step has split: it is another one since. Go by name."
            )
        return plain(live)

    builtins.id = id_of
    try:
        yield
    finally:
        builtins.id = plain
