"""The hosts that the ranks of these tests live on: who is where, with and without root, and what if there are none."""

from __future__ import annotations

import os

import pytest

from benchmarks.peers.network import NoNetworkError, two_hosts
from spmd.ranks import local_ranks
from tests.harness.pool import RankError, Ranks
from tests.harness.test_pool import dying, summed
from tests.harness.two_hosts import NEEDED, pool_on_two_hosts


def host(rank: int, world: int) -> str:
    return local_ranks._host()


def test_the_first_half_of_all_ranks_is_on_one_host_and_the_others_on_another(hosts: Ranks) -> None:
    one, other = hosts.run(2, host)
    assert one != other
    assert hosts.run(4, host) == [one, one, other, other]
    assert local_ranks._host() not in (one, other)


def test_a_worker_that_dies_is_replaced_on_its_host(hosts: Ranks) -> None:
    before = hosts.run(4, host)
    with pytest.raises(RankError, match="rank 0 of 4 failed first: the process died with exit code 3"):
        hosts.run(4, dying)
    assert hosts.run(4, host) == before
    assert hosts.run(4, summed, 1.0) == [(rank, 6.0) for rank in range(4)]


@pytest.mark.processes
def test_hosts_are_made_without_root_in_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    try:
        with two_hosts() as network:
            assert network.as_user
            pool = Ranks(network)
            found = pool.run(2, host), pool.run(2, summed, 1.0)
            pool.close()
    except NoNetworkError as missing:
        pytest.skip(str(missing))
    (one, other), sums = found
    assert one != other and sums == [(0, 1.0), (1, 1.0)]


@pytest.mark.parametrize("needed, outcome", [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_tests_skip_without_hosts_and_fail_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, needed: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv(NEEDED, needed)
    with pytest.raises(outcome, match="two hosts need iproute2: there is no ip and"), pool_on_two_hosts():
        pass
