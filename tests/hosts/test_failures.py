"""A rank that fails on the other host: all ranks of both raise at once, with a sentence, and go on if it lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import faults
from tests.faults.test_failed_calls import PROMPT, dies, fails_then_goes_on
from tests.harness.pool import RankError, Ranks

THEIR_OWN = "two hosts"  # transport: ranks take each other for what they are


@pytest.mark.parametrize(
    "world, style", [pytest.param(2, "replicate", marks=pytest.mark.exhaustive), (4, "fully_shard")]
)
def test_an_error_of_one_rank_reaches_both_hosts_and_all_go_on(hosts: Ranks, world: int, style: str) -> None:
    outcomes = hosts.run(world, fails_then_goes_on, style, THEIR_OWN, faults.raises, 0.5)
    for rank, (message, seconds, differ) in enumerate(outcomes):
        assert differ == []
        if rank == 1:
            assert "Injected" in message and "its state is as before the call" in message
            continue
        assert "RankFailedError" in message and "along dp, rank 1 raised Injected" in message
        assert "State is on rank 0 as before the call, on rank 1 as before the call" in message
        assert seconds < PROMPT


def test_a_rank_that_is_killed_on_one_host_is_named_on_the_other(hosts: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="died with exit code -9"):
        hosts.run(2, dies, "replicate", THEIR_OWN, tmp_path / "report", grace=60)
    message = (tmp_path / "report").read_text()
    assert "along dp, rank 1 has ended, or does not answer" in message
    assert message.endswith("\n[]"), "the state of the other rank is not as before the call"
