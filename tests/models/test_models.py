"""Real models train as in one process on the whole batch, and no rank computes with the rows of another."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.harness.pool import Ranks

from .catalog import ENTRIES
from .examine import Style, Training, assert_trains_in_place

# In every run one here, a decoder in `test_lengths.py` and a U-Net in `test_unet.py`, whose parameters are sharded;
# `--exhaustive` takes all, in both styles.
USUAL = {"Bert": "replicate"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = [(entry.name, style) for entry in ENTRIES for style in get_args(Style)]
    metafunc.parametrize("name, style", everything if metafunc.config.getoption("exhaustive") else USUAL.items())


def test_a_real_model_trains_as_on_one_device(
    ranks: Ranks, request: pytest.FixtureRequest, name: str, style: Style
) -> None:
    (entry,) = (entry for entry in ENTRIES if entry.name == name)
    case = Training(entry, momentum=0.9 if request.config.getoption("exhaustive") else 0.0)
    assert_trains_in_place(ranks, case, style)
