"""A rank of the pool as torchrun would have started it, for libraries that read the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """Accelerate and Lightning find this rank of the process group that there is, and forget it at the end."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "1"}  # read, but not used
    os.environ |= {"TORCHELASTIC_RUN_ID": "none"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        assert not PartialState._shared_state
