"""The first rank captures for all: one trace in all, and the bits of steps that each rank captured for itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import spmd
from spmd import capture_call
from spmd.cache import compile_cache
from tests.harness import experts
from tests.harness.cases import MLP
from tests.harness.messages import messages
from tests.harness.oracle import Case, all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks
from tests.spmd.stages import test_numbers as stages

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def new_ranks() -> Iterator[Ranks]:
    """Ranks of these tests alone: where earlier jobs have left one of them other than the rest, each captures."""
    pool = Ranks()
    yield pool
    pool.close()


@contextmanager
def counted() -> Iterator[list[str]]:
    """A list that grows by one with each trace of this rank."""
    traces, original = list[str](), capture_call.capture
    with mock.patch.object(capture_call, "capture", lambda *given: (traces.append(""), original(*given))[1]):
        yield traces


@dataclass(frozen=True)
class Shorter(MLP):
    """Batches of several numbers of rows, which one trace serves from the second on."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return tuple(each[: (4, 3, 2, 4, 3)[step]] for each in super().part(rank, step))


def both(
    rank: int, world: int, case: Case, mode: dict[str, Any], by_messages: bool = False
) -> tuple[list[int], list[str]]:
    """The traces of a rank where the first one captures for all, and where each does; what differs in the last bit.

    The stages of a pipeline have equal rows. ``by_messages``: as ranks on other hosts communicate.
    """
    is_pipeline, runs, counts = "stages" in mode.get("axes", {}), [], []
    mode = {**mode, "mesh": init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))} if is_pipeline else mode
    part, parts = (0, 1) if is_pipeline else (rank, world)
    for seconds in (compile_cache._LEAST_TIMEOUT, math.inf):
        apart = messages(rank) if by_messages else nullcontext()
        with apart, mock.patch.object(compile_cache, "_LEAST_TIMEOUT", seconds), counted() as traces:
            runs.append(compiled_run(part, case, 5, parallel_mode=spmd.DataParallel(**mode))[1])
            counts.append(len(traces))
    found = all_unequal(runs[1], runs[0], rank, world, 0, 0)
    return counts, [*found, *all_unequal(plain_run(case, parts, 5), runs[0], rank, world)]


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(MLP(), {}, marks=pytest.mark.exhaustive),
        (MLP(optimizer="AdamW"), {"parallel_style": "fully_shard"}),
        (Shorter(optimizer="SGD momentum"), {"shard_optimizer": True}),
        pytest.param(
            experts.Training("numbers"),
            {"parallel_style": "fully_shard", "axes": {"batch": "dp", "experts": "dp"}},
            marks=pytest.mark.exhaustive,
        ),
        (MLP(sizes=(5, 7, 3), rows=4), {"axes": {"stages": "pp"}, "micro_batches": 2, "stages": ["2"]}),
        pytest.param(stages.Training("tied"), stages.TWO, marks=pytest.mark.exhaustive),
    ],
    ids=["replicate", "fully_shard", "shard_optimizer", "experts", "stages", "stages, tied"],
)
def test_one_rank_traces_for_all(new_ranks: Ranks, case: Case, mode: dict[str, Any]) -> None:
    """The traces of later sizes, too, are those of the first rank."""
    results = new_ranks.run(2, both, case, mode, timeout=300)
    assert [line for _, differing in results for line in differing] == []
    (shared, apart), *others = [counts for counts, _ in results]
    assert 0 < shared <= apart and others == [[0, apart]]


@pytest.mark.parametrize("style", ["replicate", pytest.param("fully_shard", marks=pytest.mark.exhaustive)])
def test_passes_that_ask_which_rank_this_is_run_on_each(ranks: Ranks, style: str) -> None:
    """A rank sends its own half of what two reduce by messages: that of the first rank, on both, was wrong."""
    for _, differing in ranks.run(2, both, MLP(), {"parallel_style": style}, True, timeout=300):
        assert differing == []


def from_closure(value: Any) -> Callable[..., Tensor]:
    """A step that reads ``value``, and computes with it if it is a number."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) * (value if isinstance(value, float) else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def of_rank(rank: int, world: int) -> tuple[int, list[str], str]:
    """What ranks read differs: a text, with which nothing is computed, and a number, with which something is."""
    case = Named(kind="of rank", rank=rank)
    with counted() as traces:
        _, got = compiled_run(rank, case, 5)
    count = len(traces)
    with pytest.raises(spmd.RankMismatchError) as caught:
        compiled_run(rank, Named(kind="numbers", rank=rank), 1)
    return count, all_unequal(plain_run(case, world, 5), got, rank, world), str(caught.value)


@dataclass(frozen=True)
class Named(MLP):
    """The step reads what each rank has in a closure."""

    kind: str = ""
    rank: int = 0

    @property
    def step(self) -> Any:  # type: ignore[override]
        return from_closure(1.0 + self.rank if self.kind == "numbers" else f"{self.kind} {self.rank}")


def test_ranks_that_read_other_values_capture_for_themselves(ranks: Ranks) -> None:
    for traces, differing, message in ranks.run(2, of_rank):
        assert traces and not differing
        assert "to be the same on all ranks, but rank 1 differs from rank 0" in message


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return model(x)[: int(x.sum())].sum()


def refusal(rank: int, world: int) -> str:
    case = MLP()
    with pytest.raises(spmd.CaptureError) as caught:
        spmd.compile(refused)(*case.build(), *case.part(rank, 0))
    assert torch.isfinite(spmd.compile(case.step)(*case.build(), *case.part(rank, 0))), "ranks go on together"
    return str(caught.value)


def test_a_refusal_has_the_users_line_on_all_ranks(ranks: Ranks) -> None:
    one, other = ranks.run(2, refusal)
    assert one == other and "refused" in one
