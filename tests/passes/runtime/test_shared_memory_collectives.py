"""Collectives through shared memory, with all ranks in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.ir.collectives import WAIT
from passes.runtime import shared_memory_collectives
from passes.runtime.local_peers import LocalPeers, register_local_peers
from passes.runtime.shared_memory_collectives import (
    PERSISTENT,
    REDUCTIONS,
    shared_all_gather,
    shared_all_reduce,
    shared_reduce_scatter,
)

from .local_group import in_segment, local_group


def on_all(start: Any) -> list[Tensor]:
    """The result of each rank: all start, then all wait."""
    pending = [start(str(rank), rank) for rank in range(3)]
    return [WAIT(each) for each in pending]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16])
@pytest.mark.parametrize("reduction", ["sum", "max", "min", "product"])
def test_reductions_match_those_of_the_operands(group: list[LocalPeers], reduction: str, dtype: torch.dtype) -> None:
    xs = [(torch.arange(6).reshape(2, 3) + 2 * rank + 1).to(dtype) for rank in range(3)]
    combine = REDUCTIONS[reduction]
    want = combine(combine(xs[0], xs[1]), xs[2])
    got = on_all(lambda name, rank: shared_all_reduce(in_segment(xs[rank]), None, reduction, name))
    assert all(torch.equal(each, want) for each in got)
    parts = on_all(lambda name, rank: shared_reduce_scatter(xs[rank].view(-1), reduction, [2], 3, name))
    assert torch.equal(torch.cat(parts), want.view(-1))


def test_each_rank_reduces_a_part_and_reads_the_others(group: list[LocalPeers]) -> None:
    x, scratch = [torch.arange(7.0) + rank for rank in range(3)], [in_segment(torch.zeros(3)) for _ in range(3)]
    started = [shared_all_reduce(x[k], scratch[k], "sum", str(k)) for k in range(3)]
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(WAIT, started))
    assert all(torch.equal(each, x[0] + x[1] + x[2]) for each in got)


@pytest.mark.parametrize("place", [in_segment, torch.clone])
@pytest.mark.parametrize("elements", [7, 2])
def test_each_rank_reduces_its_part_of_the_operand(group: list[LocalPeers], place: Any, elements: int) -> None:
    given = [torch.arange(float(elements)) * 3**rank + 0.1 for rank in range(3)]
    x, elsewhere = [place(each) for each in given], [torch.zeros(elements) for _ in range(3)]
    for outs in (elsewhere, x):
        for rank in range(3):
            x[rank].copy_(given[rank])
        started = [shared_all_reduce.out(x[k], x[k], "sum", str(k), out=outs[k]) for k in range(3)]
        with ThreadPoolExecutor(3) as threads:
            got = list(threads.map(WAIT, started))
        assert [each.data_ptr() for each in got] == [each.data_ptr() for each in outs]
        assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
        torch.testing.assert_close(got[0], sum(given))


def test_members_are_stored_one_after_the_other(group: list[LocalPeers]) -> None:
    members = [torch.arange(6.0), torch.arange(10.0, 13.0)]  # lengths of a rank's part: 2, 1
    whole = torch.cat(members)
    parts = [torch.cat([member.chunk(3)[rank] for member in members]) for rank in range(3)]
    gathered = on_all(lambda name, rank: shared_all_gather(parts[rank], [2, 1], 3, name))
    assert all(torch.equal(each, whole) for each in gathered)
    scattered = on_all(lambda name, rank: shared_reduce_scatter(whole, "sum", [2, 1], 3, name))
    assert all(torch.equal(each, 3 * part) for each, part in zip(scattered, parts, strict=True))


def test_out_variants_write_into_out(group: list[LocalPeers]) -> None:
    outs = [torch.zeros(2) for _ in range(3)]
    x = in_segment(torch.ones(2))
    got = on_all(lambda name, rank: shared_all_reduce.out(x, None, "sum", name, out=outs[rank]))
    assert all(
        each.data_ptr() == out.data_ptr() and out.tolist() == [3, 3] for each, out in zip(got, outs, strict=True)
    )


def test_a_persistent_collective_is_prepared_again_when_an_operand_moves(group: list[LocalPeers]) -> None:
    prepared: list[int] = []
    outs, members = [torch.zeros(2) for _ in range(3)], [in_segment(torch.full((6,), rank + 1.0)) for rank in range(3)]
    make = PERSISTENT[shared_reduce_scatter.out]
    works = [make(members[k], "sum", [2], 3, str(k), out=outs[k]) for k in range(3)]
    for k, each in enumerate(works):
        each._prepare = counted(each._prepare, prepared, k)

    def run() -> list[float]:
        for each in works:
            each.start()
        for each in works:
            each.wait()
            each.wait()  # does nothing
        return [float(out[1]) for out in outs]

    assert run() == [6.0] * 3
    members[0].add_(1)
    assert run() == [7.0] * 3 and sorted(prepared) == [0, 1, 2]
    works[1] = make(torch.full((6,), 10.0), "sum", [2], 3, "1", out=outs[1])
    assert run() == run() == [15.0] * 3
    assert sorted(prepared) == [0, 0, 0, 1, 2, 2, 2]  # each copy is at another address


def counted(prepare: Any, prepared: list[int], rank: int) -> Any:
    return lambda *given: prepared.append(rank) or prepare(*given)


def test_an_operand_with_gaps_is_copied_each_time(group: list[LocalPeers]) -> None:
    x = in_segment(torch.arange(12.0).view(6, 2))
    make = PERSISTENT[shared_all_reduce.out]
    outs = [torch.zeros(6) for _ in range(3)]
    works = [make(x[:, 0], None, "max", str(k), out=outs[k]) for k in range(3)]
    for start in (0.0, 1.0):
        x[:, 0] = torch.arange(6.0) + start
        for each in works:
            each.start()
        for each in works:
            each.wait()
        assert all(torch.equal(out, torch.arange(6.0) + start) for out in outs)


def test_collectives_started_by_a_failed_call_are_not_waited_for(group: list[LocalPeers]) -> None:
    outs, x = [torch.zeros(2) for _ in range(3)], in_segment(torch.ones(2))

    def start(name: str, rank: int) -> Tensor:
        return shared_all_reduce.out(x, None, "sum", name, out=outs[rank])

    start("0", 0), start("1", 1)  # then these ranks fail, and rank 2 before it starts
    groups = [shared_memory_collectives.group_named(str(rank)) for rank in range(3)]
    for each in group:
        each.abort()
    for rank, each in enumerate(local_group(3)):
        register_local_peers(str(rank), groups[rank], each)
    assert [each.tolist() for each in on_all(start)] == [[3, 3]] * 3


def test_a_wait_raises_if_another_call_has_begun(group: list[LocalPeers]) -> None:
    """Two steps in two threads would do that."""
    pending = shared_all_reduce.out(in_segment(torch.ones(2)), None, "sum", "0", out=torch.zeros(2))
    group[0].start_call(1)
    with pytest.raises(RuntimeError, match="the call that started it is over"):
        WAIT(pending)


def test_ranks_that_are_not_connected_raise(group: list[LocalPeers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_collectives, "group_named", lambda name: None)
    with pytest.raises(RuntimeError, match="process group '0' are not connected through shared memory"):
        shared_all_reduce(torch.ones(1), None, "sum", "0")
