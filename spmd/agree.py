"""Agreement between ranks at compile time, through the store of the process group and never through collectives."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import torch
import torch.distributed as dist

from passes import RankMismatchError

from ._torch import default_store

TIMEOUT = timedelta(seconds=60)  # by how much ranks may be apart when they have traced the same step


def agree(what: str, text: str) -> None:
    """Raise ``RankMismatchError`` unless all ranks come here with the same ``text``. ``what`` names it in the error."""
    if not _can_talk():
        return
    mine = f"{hashlib.sha256(text.encode()).hexdigest()}\n{text[:2000]}"
    theirs = _exchange(mine)
    different = [rank for rank, value in enumerate(theirs) if value != theirs[0]]
    if different:
        raise RankMismatchError(
            f"expected {what} to be the same on all ranks, but rank {different[0]} differs from rank 0:\n"
            f"{_first_difference(theirs[0], theirs[different[0]])}"
        )


def agree_on_seed() -> int:
    """A base seed for random ops: drawn from rank 0's default generator, handed to all."""
    drawn = int(torch.empty((), dtype=torch.int64).random_().item())
    return int(_exchange(str(drawn))[0]) if _can_talk() else drawn


def _can_talk() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def _exchange(value: str) -> list[str]:
    """Every rank's value, in rank order."""
    store, rank, ranks = default_store(), dist.get_rank(), dist.get_world_size()
    number = store.add(f"spmd/exchanges/{rank}", 1)  # counted in the store, so that a new process group starts anew
    keys = [f"spmd/exchange {number}/{k}" for k in range(ranks)]
    store.set(keys[rank], value)
    try:
        store.wait(keys, TIMEOUT)
    except Exception as error:
        raise RankMismatchError(
            f"rank {rank} waited {TIMEOUT.total_seconds():.0f} s for all ranks to compile, but not all came"
        ) from error
    return [store.get(key).decode() for key in keys]


def _first_difference(a: str, b: str) -> str:
    for line, other in zip(a.splitlines()[1:], b.splitlines()[1:], strict=False):
        if line != other:
            return f"  rank 0: {line}\n  other:  {other}"
    return f"  rank 0: {a[-80:]}\n  other:  {b[-80:]}"
