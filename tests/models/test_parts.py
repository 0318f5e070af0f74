"""Real models whose positions, types and masks are rows of their own, in micro-batches and stages: a sample."""

from __future__ import annotations

import pytest

from .catalog import ENTRIES
from .parts import InParts, Parts, in_parts

USUAL: dict[str, Parts] = {  # `python -m tests.models` takes all, and with a mask
    "GPT2": "micro_batches=2, no mask",
    "Bert": "two stages, no mask",
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("name", "parts"), USUAL.items())
def test_a_real_model_without_a_mask_trains_in_parts(name: str, parts: Parts) -> None:
    (entry,) = (entry for entry in ENTRIES if entry.name == name)
    found = in_parts(InParts(entry, parts=parts))
    assert found.startswith("yes"), found
