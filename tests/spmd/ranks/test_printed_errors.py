"""An error that all ranks raise is printed whole by the first, and named in a line by the others."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.pool import Ranks


def printed(rank: int, world: int) -> str:
    """What a rank prints of an error that all raise, and of one of its own."""

    @spmd.compile
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        return loss * 2 if float(loss) > 0 else loss

    stream, before = io.StringIO(), sys.excepthook
    try:
        with pytest.raises(spmd.CaptureError) as caught:
            step(nn.Linear(2, 2), torch.ones(2, 2))
        with contextlib.redirect_stderr(stream):
            sys.excepthook(caught.type, caught.value, None)
            sys.excepthook(ValueError, ValueError("of this rank"), None)
    finally:
        sys.excepthook = before
    return stream.getvalue()


def test_the_others_print_a_line(ranks: Ranks) -> None:
    first, other = ranks.run(2, printed)
    assert "torch.where" in first
    line, own = other.splitlines()
    assert line == "rank 1 ends with the CaptureError that rank 0 prints" and own.endswith("ValueError: of this rank")
