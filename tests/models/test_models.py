"""Real models train as in one process on the whole batch, and no rank computes with the rows of another."""

from __future__ import annotations

import pytest

from tests.harness.pool import Ranks

from .catalog import ENTRIES
from .examine import Style, Training, assert_trains_in_place

# In every run one of each kind; `--exhaustive` takes all, in both styles.
USUAL = {"GPT2": "fully_shard", "T5": "replicate"}


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES])
def test_a_real_model_trains_as_on_one_device(
    ranks: Ranks, request: pytest.FixtureRequest, name: str, style: Style
) -> None:
    usual, exhaustive = USUAL.get(name) == style, request.config.getoption("exhaustive")
    if not usual and not exhaustive:
        pytest.skip("with --exhaustive")
    (entry,) = (entry for entry in ENTRIES if entry.name == name)
    case = Training(entry, momentum=0.9 if exhaustive else 0.0)
    assert_trains_in_place(ranks, case, style)
