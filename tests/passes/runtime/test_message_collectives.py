"""Collectives as messages, on gloo ranks: their results for any dtype and length, and an error when a rank dies."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from passes.ir.collectives import WAIT, c10d
from passes.runtime import message_collectives
from passes.runtime.collective_ops import bounds
from tests.harness.pool import RankError, Ranks

DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.bool)
LENGTHS = (0, 1, 3, 8, 1001)  # some ranks have nothing, some less than others


def sent_by(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """The operand of one rank."""
    return (torch.arange(length) * 7 + rank * 3).remainder(5).to(dtype)


def expected(group: int, length: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The result of an exchange on this rank, and of a gather of each rank's part of its own operand."""
    ends = bounds(length, group)
    each = [sent_by(r, length, dtype) for r in range(group)]
    rows = torch.stack([x[ends[rank] : ends[rank + 1]] for x in each])
    return rows, torch.cat([x[ends[r] : ends[r + 1]] for r, x in enumerate(each)])


def wrong_results(rank: int, world: int, shape: tuple[int, ...]) -> list[str]:
    """The results that differ from those expected, along the last axis of a mesh."""
    mesh = init_device_mesh("cpu", shape)
    group = mesh.get_group(len(shape) - 1)
    mine, ranks = mesh.get_local_rank(len(shape) - 1), shape[-1]
    wrong = []
    for dtype in DTYPES:
        for length in LENGTHS:
            x = sent_by(mine, length, dtype)
            ends = bounds(length, ranks)
            rows, whole = expected(ranks, length, mine, dtype)
            part = x[ends[mine] : ends[mine + 1]]
            swaps = (
                _both(message_collectives.swap, rows[1 - mine], x, len(part), group.group_name) if ranks == 2 else []
            )
            for got, want, name in (
                *swaps,
                *_both(message_collectives.exchange, rows, x, ranks, len(part), group.group_name),
                *_both(message_collectives.gather_by_broadcast, whole, part, length, ranks, group.group_name),
                *_both(message_collectives.gather_by_sending, whole, part, length, ranks, group.group_name),
            ):
                if not torch.equal(got, want):
                    wrong.append(f"rank {rank}: {name} of {length} {dtype}: expected {want}, got {got}")
    return wrong


def _both(op: Any, want: Tensor, *args: Any) -> list[tuple[Tensor, Tensor, str]]:
    """The functional variant and the one with ``out``."""
    out = torch.empty_like(want)
    written = WAIT(op.out(*args, out=out))
    assert written.data_ptr() == out.data_ptr()
    return [(WAIT(op(*args)), want, str(op)), (out, want, f"{op}.out")]


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_every_rank_gets_its_parts(ranks: Ranks, shape: tuple[int, ...]) -> None:
    world = shape[0] * (shape[1] if len(shape) > 1 else 1)
    assert [line for lines in ranks.run(world, wrong_results, shape) for line in lines] == []


def wrong_out_variants(rank: int, world: int) -> list[str]:
    """The out variants of torch's functional collectives whose results are not those of the functional variant."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x = torch.arange(12, dtype=torch.float64).reshape(6, 2) + rank
    many, uneven = [6 // world] * world, [[1, 2], [3, 3]]
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (c10d.all_reduce.default, (x, "sum", group)),
        (c10d.all_reduce.default, (x, "max", group)),
        (c10d.all_gather_into_tensor.default, (x, world, group)),
        (c10d.reduce_scatter_tensor.default, (x, "sum", world, group)),
        (c10d.all_to_all_single.default, (x, many, many, group)),
        (c10d.all_to_all_single.default, (x[: 3 * rank + 3], [uneven[r][rank] for r in (0, 1)], uneven[rank], group)),
    ]
    wrong = []
    for op, args in calls:
        want = WAIT(op(*args))
        out = torch.full_like(want, -1)
        WAIT(message_collectives.OUT_VARIANTS[op](*args, out=out))
        if not torch.equal(out, want):
            wrong.append(f"rank {rank}: {op}: expected {want}, got {out}")
    same = x.clone()
    WAIT(message_collectives.OUT_VARIANTS[c10d.all_reduce.default](same, "sum", group, out=same))
    return wrong + ([] if torch.equal(same, WAIT(c10d.all_reduce.default(x, "sum", group))) else ["in place"])


def test_out_variants_write_what_functional_variants_return(ranks: Ranks) -> None:
    assert [line for lines in ranks.run(2, wrong_out_variants) for line in lines] == []


def in_flight(rank: int, world: int) -> bool:
    """Start several at once, and wait for them in another order."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x = torch.arange(1000.0) + rank
    started = [
        op(x, 2000, 2, group)
        for op in (message_collectives.gather_by_broadcast, message_collectives.gather_by_sending) * 4
    ]
    rows = message_collectives.exchange(x, 2, 500, group)
    want = torch.cat([torch.arange(1000.0), torch.arange(1000.0) + 1])
    exchanged = torch.equal(WAIT(rows), torch.stack([x[500 * rank :][:500] + k - rank for k in (0, 1)]))
    return exchanged and all(torch.equal(WAIT(each), want) for each in reversed(started))


def test_many_collectives_in_flight(ranks: Ranks) -> None:
    assert ranks.run(2, in_flight) == [True, True]


def one_dies(rank: int, world: int, name: str) -> None:
    """Rank 1 dies before the collective."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.barrier()
    if rank == 1:
        os._exit(3)
    x = torch.zeros(1_000_000)
    sizes = {"exchange": (2, 500_000), "swap": (500_000,)}.get(name, (2_000_000, 2))
    WAIT(getattr(message_collectives, name)(x, *sizes, group))


@pytest.mark.parametrize("name", ["exchange", "swap", "gather_by_broadcast", "gather_by_sending"])
def test_a_rank_that_died_raises_on_the_others(ranks: Ranks, name: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"Connection|closed|reset") as raised:
        ranks.run(2, one_dies, name)
    assert "no answer" not in str(raised.value)
    assert time.monotonic() - start < 60


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("reduction", ["product", "max"])
def test_complex_numbers_are_not_reduced_by_their_parts_where_that_is_wrong(reduction: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x, group = torch.tensor([1 + 2j]), dist.group.WORLD.group_name  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="complex"):
        WAIT(torch.ops.spmd_transport.all_reduce.out(x, reduction, group, out=torch.empty_like(x)))
