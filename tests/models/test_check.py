"""``spmd check`` says of real models what compiling them says: that they compile."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import spmd
from spmd.checking import check, text_of
from tests.interplay.seeds import seed

from .catalog import ENTRIES
from .examine import Training
from .zoo import ROWS

STYLES = ("replicate", "fully_shard")
IN_A_RUN = 1  # model, another with each commit; `--exhaustive` takes all


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [entry.name for entry in ENTRIES]
    chosen = names if metafunc.config.getoption("exhaustive") else random.Random(seed()).sample(names, IN_A_RUN)
    metafunc.parametrize("name", chosen)


@pytest.mark.slow
def test_a_model_that_compiles_has_no_refusals(name: str) -> None:
    (entry,) = (entry for entry in ENTRIES if entry.name == name)
    model = entry.build()
    given: tuple[Any, ...] = (model, torch.optim.SGD(model.parameters(), lr=0.1), entry.batch(torch.Generator()))
    found = check(spmd.compile(Training.step), *given, modes=STYLES, world=ROWS)
    assert found, text_of(found)
    assert not any(each.unseen for each in found.modes)
