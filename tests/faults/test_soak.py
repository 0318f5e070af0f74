"""Many calls with random faults: afterwards all ranks have equal bits, or all have raised a sentence in time.

The calls are episodes. One ends when a rank is killed: its process is replaced, and the next one goes on from the
state that was saved last. Meanwhile strangers connect to the ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.pool import RankError, Ranks

from .episode import KILLS, KINDS, Episode, Log, plan, read_log, run_episode
from .strangers import Strangers

PROMPT = 30.0  # seconds from a fault until all ranks have raised; a machine may be busy
SHORT = {
    "shared memory": ("SIGINT", "full disk", "SIGSTOP", "kill"),
    "messages": ("slow", "raise", "no memory", "kill while connecting"),
}


def check(episode: Episode, logs: list[Log | None]) -> None:
    """What every rank went through is as it should be."""
    dead = [event.victim for event in episode.events if event.kind in KILLS]
    assert [rank for rank, log in enumerate(logs) if log is None] == dead
    for log in logs:
        if log is None:
            continue
        assert log.problems == []
        assert log.files < 200
        assert all(seconds < PROMPT for _, seconds in log.seconds), log.seconds
        assert bool(log.messages) or not log.seconds
    written = [log.disk_warnings for log in logs[:1] if log is not None]  # rank 0 writes dumps
    expected = any(event.kind == "full disk" for event in episode.events)
    assert written in ([], [int(expected)])


def run_all(ranks: Ranks, episodes: list[Episode], folder: Path) -> list[Log]:
    """Run all episodes, on replaced processes after each kill; returns the logs of the ranks that were not killed."""
    found: list[Log] = []
    for episode in episodes:
        try:
            ranks.run(2, run_episode, episode, folder, timeout=120 + 3 * (episode.until - episode.first), grace=60)
        except RankError as error:
            killed = [event.victim for event in episode.events if event.kind in KILLS]
            expected = [f"rank {victim} of 2 failed first: the process died with exit code -9" for victim in killed]
            assert str(error).splitlines() == expected, error
        logs = [read_log(folder, episode, rank) for rank in range(2)]
        kinds = dict(Counter(event.kind for event in episode.events))
        print(f"calls {episode.first} to {episode.until}: {kinds}, {[log and log.seconds for log in logs]}", flush=True)
        check(episode, logs)
        found += [log for log in logs if log is not None]
    return found


@pytest.mark.timeout(7200)  # with --exhaustive
@pytest.mark.parametrize("style, transport", [("replicate", "shared memory"), ("fully_shard", "messages")])
def test_random_faults_end_with_equal_ranks_or_a_sentence(
    ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path, style: str, transport: str
) -> None:
    calls, kinds = 12, list(SHORT[transport])
    if request.config.getoption("--exhaustive"):
        calls, kinds = 2_000, [*KINDS] * 11
        random.Random(len(style)).shuffle(kinds)
    episodes = plan(len(style), 2, style, transport, calls, kinds)
    with Strangers(lambda: [worker.process.pid or 0 for worker in ranks.workers], seed=calls) as strangers:
        logs = run_all(ranks, episodes, tmp_path)
    print(f"{calls} calls, faults {dict(Counter(kinds))}, strangers {dict(strangers.count)}")
    for kind in sorted({kind for log in logs for kind, _ in log.seconds}):
        print(f"  {kind}: at most {max(s for log in logs for each, s in log.seconds if each == kind):.2f} s")
    assert strangers.count.total() > 0
