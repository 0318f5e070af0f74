"""A fake world: this process is rank 0 of many, and no data moves. For tests of structure, not of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Make the default process group a fake one of ``size`` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
