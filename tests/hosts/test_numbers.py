"""Ranks on two hosts compute what the plain step computes, in every way to divide a step."""

from __future__ import annotations

import pytest

from tests.harness.pool import Ranks

from .layouts import LAYOUTS, REST, trained


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in REST else name for name in LAYOUTS]
)
def test_numbers_are_those_of_the_plain_step(hosts: Ranks, name: str) -> None:
    layout = LAYOUTS[name]
    for found in hosts.run(layout.world, trained, name):
        assert not found.differences, "\n".join(found.differences[:20])
        inside = "pp" not in layout.mesh  # programs of stages share no memory
        assert found.shared == [False, inside][: len(layout.mesh)]  # the second axis of two stays on its host
        assert found.received > 0
        assert found.was_pending is name.startswith("deferred")
