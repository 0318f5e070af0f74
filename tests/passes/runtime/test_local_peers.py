"""Local peers: publications, the barrier, and what happens when a rank leaves; all ranks are in this process."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from passes.runtime import local_peers, shared_memory_collectives
from passes.runtime.local_peers import LocalPeers, local_peers_of, mapped_addresses, register_local_peers
from passes.runtime.peer_connection import PeerConnection, arrival
from passes.runtime.segments import allocate_segment, copy_to_segment, locate

from .local_group import FakeGroup, in_segment, local_group, open_files


def publish(rank: LocalPeers, x: torch.Tensor) -> int:
    """Publish ``x``, or a copy of it where it is not in a segment."""
    return rank.publish(locate(x) or copy_to_segment(x))


# Publish and collect


def test_all_ranks_collect_all_publications_in_any_order() -> None:
    ranks = local_group(3)
    for number in range(2):
        for k, each in enumerate(ranks):
            assert publish(each, in_segment(torch.tensor([10 * number + k]))) == number
    for number in (1, 0):
        for each in ranks:
            assert [x.view(torch.int64).item() for x in each.collect(number)] == [10 * number + k for k in range(3)]


def test_a_tensor_in_a_segment_is_read_in_place() -> None:
    one, other = local_group(2)
    own = allocate_segment(1 << 12)
    part = own[64:72].view(torch.int64)
    publish(one, part)
    publish(other, torch.zeros(1))
    (read, _), _ = other.collect(0), one.collect(0)
    part.fill_(7)
    assert read.view(torch.int64).item() == 7
    assert read.untyped_storage().data_ptr() in mapped_addresses() and own.data_ptr() not in mapped_addresses()


def test_a_tensor_elsewhere_is_copied() -> None:
    one, other = local_group(2)
    x = torch.tensor([1.0])
    publish(one, x)
    publish(other, x)
    x.fill_(2.0)
    assert [x.view(torch.float32).item() for x in other.collect(0)] == [1.0, 1.0]


def test_a_publication_missed_in_one_call_is_not_collected_in_the_next() -> None:
    one, other = local_group(2)
    for call, value in ((1, 5), (2, 7)):
        for each in (one, other):
            each.start_call(call)
            publish(each, in_segment(torch.tensor([value])))
        if call == 1:
            publish(one, in_segment(torch.tensor([6])))  # the other has failed by now
            one.collect(1 << 32)
    assert [x.view(torch.int64).item() for x in one.collect(2 << 32)] == [7, 7]
    assert [x.view(torch.int64).item() for x in other.collect(2 << 32)] == [7, 7]


def test_more_publications_than_a_socket_holds() -> None:
    x = in_segment(torch.arange(3000))

    def publish_all(rank: LocalPeers) -> list[int]:
        for k in range(3000):
            publish(rank, x[k : k + 1])
        return [each.view(torch.int64).item() for k in (2999, 0) for each in rank.collect(k)]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(publish_all, local_group(2))) == [[2999, 2999, 0, 0]] * 2


def test_a_segment_is_unmapped_with_its_last_reader() -> None:
    one, other = local_group(2)
    before = open_files()
    x = in_segment(torch.tensor([5]))
    publish(one, x)
    publish(other, x)
    read = other.collect(0)[0]
    one.collect(0)
    del x
    gc.collect()
    all_barrier([one, other])  # which releases it
    assert not any(peer.known for peer in one._peers.values())
    assert read.view(torch.int64).item() == 5
    assert not any(peer.mapped for each in (one, other) for peer in each._peers.values())
    del read
    assert open_files() == before


def test_collect_raises_if_a_rank_has_left() -> None:
    one, other = local_group(2)
    publish(one, torch.zeros(1))
    other.close()
    with pytest.raises(RuntimeError, match="rank 1 of the group has ended"):
        one.collect(0)


def test_collect_raises_if_a_rank_does_not_publish_in_time() -> None:
    one, _ = local_group(2, timeout=0.05)
    publish(one, torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"rank 0 .* waited 0.05 s for its rank 1"):
        one.collect(0)


def test_a_new_group_of_the_same_name_has_no_peers(group: list[LocalPeers]) -> None:
    assert local_peers_of("0", shared_memory_collectives.group_named("0")) is group[0]
    assert local_peers_of("0", FakeGroup()) is None


def test_connections_are_closed_with_their_group(group: list[LocalPeers]) -> None:
    one, other = local_group(2)
    new = FakeGroup()
    register_local_peers("0", new, one)  # replaces another group of this name
    assert local_peers_of("0", new) is one
    publish(one, torch.zeros(1)), publish(other, torch.zeros(1))
    other.collect(0)
    del new
    with pytest.raises(RuntimeError, match="rank 0 of the group has ended or left it"):
        publish(other, torch.zeros(1))


# Barrier


def all_barrier(ranks: list[LocalPeers]) -> list[Any]:
    """What each rank gathers, or the error it raises; each arrives with three times its own number."""

    def barrier(rank: LocalPeers) -> Any:
        try:
            return rank.barrier((rank.rank,) * 3)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(barrier, ranks))


def test_the_timeout_is_that_of_the_whole_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    one, *others = local_group(3, timeout=1.0)
    clock, waited = [0.0], []

    def arrive(peer: Any, events: int, seconds: float) -> bool:
        """Rank 1 arrives after 0.7 s, rank 2 does not."""
        waited.append(seconds)
        clock[0] += 0.7
        if peer.rank == 1:
            others[0]._send(arrival((1, 1, 1)))
        return bool(peer.rank == 1)

    monkeypatch.setattr(local_peers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(PeerConnection, "poll", arrive)
    with pytest.raises(RuntimeError, match=r"waited 1 s for its rank 2"):
        one.barrier((0, 0, 0))
    assert waited == pytest.approx([1.0, 0.3])


def test_the_barrier_gathers_the_values_of_all_ranks() -> None:
    ranks = local_group(3)
    for _ in range(3):
        assert all_barrier(ranks) == [[(0, 0, 0), (1, 1, 1), (2, 2, 2)]] * 3


def test_a_rank_may_be_ahead_by_a_barrier_and_its_publications() -> None:
    one, other = local_group(2)
    one._send(arrival((1, -1, 1)))
    one.start_call(1)
    publish(one, in_segment(torch.tensor([5])))
    one._send(arrival((2, -2, 2)))
    assert other.barrier((9, -9, 1)) == [(1, -1, 1), (9, -9, 1)]
    other.start_call(1)
    publish(other, in_segment(torch.tensor([6])))
    assert [x.view(torch.int64).item() for x in other.collect(1 << 32)] == [5, 6]
    assert other.barrier((9, -9, 2)) == [(2, -2, 2), (9, -9, 2)]


def test_if_one_rank_gives_up_all_raise() -> None:
    ranks = local_group(3)
    ranks[1].timeout = 0.1
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ranks[0].barrier, (0, 0, 0))
        with pytest.raises(RuntimeError, match=r"rank 1 .* waited 0.1 s for its rank 2"):
            ranks[1].barrier((0, 0, 0))
        with pytest.raises(RuntimeError, match="rank 1 of the group has ended"):
            ranks[2].barrier((0, 0, 0))  # which rank 0 notices
        with pytest.raises(RuntimeError, match=r"rank [12] of the group has (ended|given up on the others)"):
            waiting.result()


def test_a_rank_that_fails_after_a_barrier_has_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = local_group(2)
    other._send(arrival((2, -2, 2)))
    assert one.barrier((1, -1, 1)) == [(1, -1, 1), (2, -2, 2)]
    one.abort()
    with monkeypatch.context() as patched:
        patched.setattr(other, "_send", lambda *_: None)  # it did before
        assert other.barrier((2, -2, 2)) == [(1, -1, 1), (2, -2, 2)]
    with pytest.raises(RuntimeError, match="rank 0 of the group has ended"):
        other.barrier((2, -2, 2))


@pytest.mark.parametrize("unread, message", [(0, "given up on the others"), (1, "ended")])
def test_a_rank_that_aborted_does_not_pass_as_arrived(unread: int, message: str) -> None:
    one, other = local_group(2)
    one._send(arrival((1, -1, 1)))
    for _ in range(unread):
        other._send(arrival((2, -2, 2)))
    assert other._has_arrived(other._peers[0], 5.0)
    one._peers[1].abort(at_barrier=True)
    with pytest.raises(RuntimeError, match=f"rank 0 of the group has {message}"):
        other._peers[0].check_not_aborted()


def test_a_rank_that_was_interrupted_does_not_pass_as_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = local_group(2)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(one._peers[1], "poll", interrupt)
        one.barrier((1, -1, 1))
    with pytest.raises(RuntimeError, match=r"rank 0 of the group has (ended|given up on the others)"):
        other.barrier((1, -1, 1))


def interrupt(*_: Any) -> bool:
    raise KeyboardInterrupt


def test_collect_raises_if_a_rank_has_started_another_call() -> None:
    one, other = local_group(2)
    publish(one, in_segment(torch.ones(1)))
    publish(other, in_segment(torch.ones(1))), publish(other, in_segment(torch.ones(1)))
    one._send(arrival((1, -1, 1)))
    assert len(other.collect(0)) == 2  # rank 0 published it before
    with pytest.raises(RuntimeError, match="rank 0 of the group has started another call, while rank 1"):
        other.collect(1)
    assert other._has_arrived(other._peers[0], 5.0)


def test_a_rank_may_leave_once_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = local_group(2)
    other._send(arrival((2, -2, 2)))
    assert one.barrier((1, -1, 1)) == [(1, -1, 1), (2, -2, 2)]
    one.close()
    monkeypatch.setattr(other, "_send", lambda *_: None)  # it did before
    assert other.barrier((2, -2, 2)) == [(1, -1, 1), (2, -2, 2)]
