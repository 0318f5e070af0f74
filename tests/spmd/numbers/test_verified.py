"""``spmd.verify`` agrees on the steps that the tests of modules and losses train, each in one of the modes."""

from __future__ import annotations

import pytest
import torch

import spmd
from tests.harness.oracle import Case

from . import test_losses, test_modules

MODES = ("replicate", "fully_shard", "zero1")
CASES = {**test_modules.CASES, **{type(case).__name__: case for case in test_losses.CASES}}
del CASES["graphs that modules keep"]  # which nothing can copy


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case, mode", [(case, MODES[k % 3]) for k, case in enumerate(CASES.values())], ids=CASES)
def test_what_is_trained_is_verified(case: Case, mode: str) -> None:
    torch.manual_seed(0)
    batch = case.whole([case.part(rank, 0) for rank in range(2)])
    assert isinstance(batch, tuple)
    verdict = spmd.verify(spmd.compile(case.step, parallel_mode=mode), *case.build(), *batch, steps=2, world=2)
    assert verdict, verdict
