"""What ranks of one host see of each other, with all ranks in this process."""

from __future__ import annotations

import errno
import gc
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.ir.collectives import WAIT
from passes.runtime import shared_memory, shared_memory_collectives
from passes.runtime.shared_memory import Neighbours, connect, copied, mapped, neighbours_of, segment, visible


class Group:
    """Stands for a process group."""


def connected(ranks: int, timeout: float = 5.0) -> list[Neighbours]:
    """All ranks of a group."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for one, other in combinations(range(ranks), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [Neighbours(rank, each, timeout) for rank, each in enumerate(sockets)]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Neighbours]]:
    """Three ranks, whose groups functional collectives know as "0", "1" and "2"."""
    ranks = connected(3)
    groups = {str(k): Group() for k in range(3)}
    monkeypatch.setattr(shared_memory_collectives, "group_named", groups.__getitem__)
    monkeypatch.setattr(shared_memory, "_neighbours", {})
    for name, each in zip(groups, ranks, strict=True):
        connect(name, groups[name], each)
    yield ranks
    for each in ranks:
        each.close()


def shared(x: Tensor) -> Tensor:
    """A copy that others can look at."""
    return segment(x.nbytes).view(x.dtype).view(x.shape).copy_(x)


def post(rank: Neighbours, x: Tensor) -> int:
    return rank.post(visible(x) or copied(x))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# Posting and receiving


def test_all_see_what_all_posted_in_whatever_order_they_look() -> None:
    ranks = connected(3)
    for number in range(2):
        for k, each in enumerate(ranks):
            assert post(each, shared(torch.tensor([10 * number + k]))) == number
    for number in (1, 0):
        for each in ranks:
            assert [x.view(torch.int64).item() for x in each.receive(number)] == [10 * number + k for k in range(3)]


def test_what_lies_in_a_segment_is_seen_where_it_lies() -> None:
    one, other = connected(2)
    mine = segment(1 << 12)
    part = mine[64:72].view(torch.int64)
    post(one, part)
    post(other, torch.zeros(1))
    (seen, _), _ = other.receive(0), one.receive(0)
    part.fill_(7)
    assert seen.view(torch.int64).item() == 7
    assert seen.untyped_storage().data_ptr() in mapped() and mine.data_ptr() not in mapped()


def test_what_lies_elsewhere_is_copied() -> None:
    one, other = connected(2)
    mine = torch.tensor([1.0])
    post(one, mine)
    post(other, mine)
    mine.fill_(2.0)
    assert [x.view(torch.float32).item() for x in other.receive(0)] == [1.0, 1.0]


def test_what_a_rank_missed_in_one_call_is_not_seen_in_the_next() -> None:
    one, other = connected(2)
    for call, value in ((1, 5), (2, 7)):
        for each in (one, other):
            each.begin(call)
            post(each, shared(torch.tensor([value])))
        if call == 1:
            post(one, shared(torch.tensor([6])))  # the other has failed by now
            one.receive(1 << 32)
    assert [x.view(torch.int64).item() for x in one.receive(2 << 32)] == [7, 7]
    assert [x.view(torch.int64).item() for x in other.receive(2 << 32)] == [7, 7]


def test_more_may_be_posted_than_a_socket_holds() -> None:
    x = shared(torch.arange(3000))

    def use(rank: Neighbours) -> list[int]:
        for k in range(3000):
            post(rank, x[k : k + 1])
        return [each.view(torch.int64).item() for k in (2999, 0) for each in rank.receive(k)]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(use, connected(2))) == [[2999, 2999, 0, 0]] * 2


def test_a_segment_goes_with_the_last_who_looks() -> None:
    one, other = connected(2)
    before = open_files()
    x = shared(torch.tensor([5]))
    post(one, x)
    post(other, x)
    seen = other.receive(0)[0]
    one.receive(0)
    del x
    gc.collect()
    all_meet([one, other])  # which tells that it is gone
    assert not any(peer.known for peer in one._peers.values()) and not one._gone
    assert seen.view(torch.int64).item() == 5
    assert not any(peer.mapped for each in (one, other) for peer in each._peers.values())
    del seen
    assert open_files() == before


def test_memory_that_cannot_be_had_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = open_files()
    monkeypatch.setattr(shared_memory, "mmap", refuse)
    with pytest.raises(OSError, match=r"1,000 bytes of memory .* could not be had: Too many open files"):
        segment(1000)
    assert open_files() == before


def test_a_rank_that_has_gone_is_told_of() -> None:
    one, other = connected(2)
    post(one, torch.zeros(1))
    other.close()
    with pytest.raises(RuntimeError, match="rank 1 of the group has ended"):
        one.receive(0)


def test_a_rank_that_does_not_come_is_told_of() -> None:
    one, _ = connected(2, timeout=0.05)
    post(one, torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"rank 0 .* waited 0.05 s for its rank 1"):
        one.receive(0)


def test_a_group_with_an_old_name_is_another_group(group: list[Neighbours]) -> None:
    assert neighbours_of("0", shared_memory_collectives.group_named("0")) is group[0]
    assert neighbours_of("0", Group()) is None


def test_neighbours_go_with_their_group(group: list[Neighbours]) -> None:
    one, other = connected(2)
    mine = Group()
    connect("0", mine, one)  # in the place of another group of this name
    assert neighbours_of("0", mine) is one
    post(one, torch.zeros(1)), post(other, torch.zeros(1))
    other.receive(0)
    del mine
    with pytest.raises(RuntimeError, match="rank 0 of the group has ended or left it"):
        post(other, torch.zeros(1))


# Meeting


def all_meet(ranks: list[Neighbours], seconds: float = 5.0) -> list[Any]:
    """What each rank hears, or why not; each says three times its own number."""

    def meet(rank: Neighbours) -> Any:
        try:
            return rank.meet((rank.rank,) * 3, seconds)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(meet, ranks))


def test_the_time_is_that_of_the_whole_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    one, *others = connected(3)
    clock, waited = [0.0], []

    def come(peer: Any, events: int, seconds: float) -> bool:
        """The first of them, after 0.7 s; the other one does not."""
        waited.append(seconds)
        clock[0] += 0.7
        if peer.rank == 1:
            others[0]._tell(shared_memory._MESSAGE.pack(1, 1, 1, shared_memory._MEETING), None)
        return bool(peer.rank == 1)

    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(shared_memory._Peer, "wait", come)
    with pytest.raises(RuntimeError, match=r"waited 1 s for its rank 2"):
        one.meet((0, 0, 0), 1.0)
    assert waited == pytest.approx([1.0, 0.3])


def test_all_hear_what_all_say() -> None:
    ranks = connected(3)
    for _ in range(3):
        assert all_meet(ranks) == [[(0, 0, 0), (1, 1, 1), (2, 2, 2)]] * 3


def test_one_may_be_ahead_by_a_meeting_and_what_it_posts() -> None:
    one, other = connected(2)
    one._tell(shared_memory._MESSAGE.pack(1, -1, 1, shared_memory._MEETING), None)
    one.begin(1)
    post(one, shared(torch.tensor([5])))
    one._tell(shared_memory._MESSAGE.pack(2, -2, 2, shared_memory._MEETING), None)
    assert other.meet((9, -9, 1), 5.0) == [(1, -1, 1), (9, -9, 1)]
    other.begin(1)
    post(other, shared(torch.tensor([6])))
    assert [x.view(torch.int64).item() for x in other.receive(1 << 32)] == [5, 6]
    assert other.meet((9, -9, 2), 5.0) == [(2, -2, 2), (9, -9, 2)]


def test_if_one_gives_up_all_are_told() -> None:
    ranks = connected(3)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ranks[0].meet, (0, 0, 0), 5.0)
        with pytest.raises(RuntimeError, match=r"rank 1 .* waited 0.1 s for its rank 2"):
            ranks[1].meet((0, 0, 0), 0.1)
        with pytest.raises(RuntimeError, match="rank 1 of the group has ended"):
            ranks[2].meet((0, 0, 0), 5.0)  # which rank 0 has heard
        with pytest.raises(RuntimeError, match=r"rank [12] of the group has (ended|given up on the others)"):
            waiting.result()


@pytest.mark.parametrize("unread, said", [(0, "given up on the others"), (1, "ended")])
def test_who_gives_up_is_not_met(unread: int, said: str) -> None:
    one, other = connected(2)
    one._tell(shared_memory._MESSAGE.pack(1, -1, 1, shared_memory._MEETING), None)
    for _ in range(unread):
        other._tell(shared_memory._MESSAGE.pack(2, -2, 2, shared_memory._MEETING), None)
    assert other._met(0, 5.0, time.monotonic()) == (1, -1, 1)
    one._peers[1].give_up()
    with pytest.raises(RuntimeError, match=f"rank 0 of the group has {said}"):
        other._peers[0].check_presence()


def test_who_is_interrupted_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = connected(2)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(one._peers[1], "wait", interrupt)
        one.meet((1, -1, 1), 5.0)
    with pytest.raises(RuntimeError, match=r"rank 0 of the group has (ended|given up on the others)"):
        other.meet((1, -1, 1), 5.0)


def interrupt(*_: Any) -> bool:
    raise KeyboardInterrupt


def test_who_has_begun_another_call_is_not_waited_for_in_this_one() -> None:
    one, other = connected(2)
    post(one, shared(torch.ones(1)))
    post(other, shared(torch.ones(1))), post(other, shared(torch.ones(1)))
    one._tell(shared_memory._MESSAGE.pack(1, -1, 1, shared_memory._MEETING), None)
    assert len(other.receive(0)) == 2  # which it posted before
    with pytest.raises(RuntimeError, match="rank 0 of the group has begun another call, while rank 1"):
        other.receive(1)
    assert other._met(0, 5.0, time.monotonic()) == (1, -1, 1)


def test_who_has_said_it_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = connected(2)
    other._tell(shared_memory._MESSAGE.pack(2, -2, 2, shared_memory._MEETING), None)
    assert one.meet((1, -1, 1), 5.0) == [(1, -1, 1), (2, -2, 2)]
    one.close()
    monkeypatch.setattr(other, "_tell", lambda *_: None)  # as it did before
    assert other.meet((2, -2, 2), 5.0) == [(1, -1, 1), (2, -2, 2)]


# The collectives


def on_all(start: Any) -> list[Tensor]:
    """What each rank gets: all start, then all wait."""
    pending = [start(str(rank), rank) for rank in range(3)]
    return [WAIT(each) for each in pending]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16])
@pytest.mark.parametrize("reduction", ["sum", "max", "min", "product"])
def test_reductions(group: list[Neighbours], reduction: str, dtype: torch.dtype) -> None:
    xs = [(torch.arange(6).reshape(2, 3) + 2 * rank + 1).to(dtype) for rank in range(3)]
    combine = shared_memory_collectives.REDUCTIONS[reduction]
    want = combine(combine(xs[0], xs[1]), xs[2])
    got = on_all(
        lambda name, rank: shared_memory_collectives.shared_all_reduce(shared(xs[rank]), None, reduction, name)
    )
    assert all(torch.equal(each, want) for each in got)
    parts = on_all(
        lambda name, rank: shared_memory_collectives.shared_reduce_scatter(xs[rank].view(-1), reduction, [2], 3, name)
    )
    assert torch.equal(torch.cat(parts), want.view(-1))


def test_each_rank_reduces_a_part_and_reads_the_others(group: list[Neighbours]) -> None:
    x, scratch = [torch.arange(7.0) + rank for rank in range(3)], [shared(torch.zeros(3)) for _ in range(3)]
    started = [shared_memory_collectives.shared_all_reduce(x[k], scratch[k], "sum", str(k)) for k in range(3)]
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(WAIT, started))
    assert all(torch.equal(each, x[0] + x[1] + x[2]) for each in got)


def test_members_lie_one_after_the_other(group: list[Neighbours]) -> None:
    members = [torch.arange(6.0), torch.arange(10.0, 13.0)]  # lengths of a rank's part: 2, 1
    whole = torch.cat(members)
    parts = [torch.cat([member.chunk(3)[rank] for member in members]) for rank in range(3)]
    gathered = on_all(lambda name, rank: shared_memory_collectives.shared_all_gather(parts[rank], [2, 1], 3, name))
    assert all(torch.equal(each, whole) for each in gathered)
    scattered = on_all(
        lambda name, rank: shared_memory_collectives.shared_reduce_scatter(whole, "sum", [2, 1], 3, name)
    )
    assert all(torch.equal(each, 3 * part) for each, part in zip(scattered, parts, strict=True))


def test_results_are_written_where_they_are_wanted(group: list[Neighbours]) -> None:
    outs = [torch.zeros(2) for _ in range(3)]
    x = shared(torch.ones(2))
    got = on_all(
        lambda name, rank: shared_memory_collectives.shared_all_reduce.out(x, None, "sum", name, out=outs[rank])
    )
    assert all(
        each.data_ptr() == out.data_ptr() and out.tolist() == [3, 3] for each, out in zip(got, outs, strict=True)
    )


def test_it_runs_again_and_follows_an_operand_that_lies_elsewhere(group: list[Neighbours]) -> None:
    plans: list[int] = []
    outs, members = [torch.zeros(2) for _ in range(3)], [shared(torch.full((6,), rank + 1.0)) for rank in range(3)]
    prepare = shared_memory_collectives.PREPARED[shared_memory_collectives.shared_reduce_scatter.out]
    readings = [prepare(members[k], "sum", [2], 3, str(k), out=outs[k]) for k in range(3)]
    for k, each in enumerate(readings):
        each._plan = counted(each._plan, plans, k)

    def perform() -> list[float]:
        for each in readings:
            each.start()
        for each in readings:
            each.wait()
            each.wait()  # it is done
        return [float(out[1]) for out in outs]

    assert perform() == [6.0] * 3
    members[0].add_(1)
    assert perform() == [7.0] * 3 and sorted(plans) == [0, 1, 2]
    readings[1] = prepare(torch.full((6,), 10.0), "sum", [2], 3, "1", out=outs[1])
    assert perform() == perform() == [15.0] * 3
    assert sorted(plans) == [0, 0, 0, 1, 2, 2, 2]  # a copy lies elsewhere each time


def counted(plan: Any, plans: list[int], rank: int) -> Any:
    return lambda *given: plans.append(rank) or plan(*given)


def test_an_operand_with_gaps_is_copied_each_time(group: list[Neighbours]) -> None:
    x = shared(torch.arange(12.0).view(6, 2))
    prepare = shared_memory_collectives.PREPARED[shared_memory_collectives.shared_all_reduce.out]
    outs = [torch.zeros(6) for _ in range(3)]
    readings = [prepare(x[:, 0], None, "max", str(k), out=outs[k]) for k in range(3)]
    for start in (0.0, 1.0):
        x[:, 0] = torch.arange(6.0) + start
        for each in readings:
            each.start()
        for each in readings:
            each.wait()
        assert all(torch.equal(out, torch.arange(6.0) + start) for out in outs)


def test_what_a_failed_call_started_is_not_waited_for(group: list[Neighbours]) -> None:
    outs, x = [torch.zeros(2) for _ in range(3)], shared(torch.ones(2))

    def start(name: str, rank: int) -> Tensor:
        return shared_memory_collectives.shared_all_reduce.out(x, None, "sum", name, out=outs[rank])

    start("0", 0), start("1", 1)  # which fail before they wait, and rank 2 before it starts
    for each in group:
        each.begin(1)
    assert [each.tolist() for each in on_all(start)] == [[3, 3]] * 3


def test_ranks_that_are_not_connected_are_told(group: list[Neighbours], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_collectives, "group_named", lambda name: None)
    with pytest.raises(RuntimeError, match="process group '0' are not connected through memory"):
        shared_memory_collectives.shared_all_reduce(torch.ones(1), None, "sum", "0")
