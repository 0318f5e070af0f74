"""An option may carry a small program that communicates: a product whose second factor passes around in a ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import passes
import spmd
from spmd.rules import RULES, OpCall, Option, S, Sent
from tests.spmd.partitioner.test_assignment import SEEN, Given

from .engine import Sample, check

MM = torch.ops.aten.mm.default
listed = RULES[MM]


def pass_around(run: Any, call: OpCall, args: tuple[Any, ...], operands: Any, results: Any) -> Any:
    """Multiply by one block of rows after the other; each rank sends the block that it has to the rank before it."""
    x, block = args
    rows = operands[1].shape[0]
    to_previous = [rows * (rank == (run.rank - 1) % run.size) for rank in range(run.size)]
    from_next = [rows * (rank == (run.rank + 1) % run.size) for rank in range(run.size)]
    product = None
    for step in range(run.size):
        start = (run.rank + step) % run.size * rows
        columns = run(torch.ops.aten.slice.Tensor, (x, 1, start, start + rows))
        part = run(MM, (columns, block))
        product = part if product is None else run(torch.ops.aten.add.Tensor, (product, part))
        if step < run.size - 1:
            block = run.all_to_all(block, from_next, to_previous)
    return product


def with_ring(call: OpCall) -> list[Option]:
    """The options of a product, and the ring where all blocks have the same rows."""

    def sends(_: OpCall, operands: Any, results: Any) -> list[Sent]:
        nbytes = operands[1].shape[0] * operands[1].shape[1] * call.operands[1].dtype.itemsize
        return [Sent(passes.Kind.ALL_TO_ALL, nbytes)] * (call.size - 1)

    ring = Option((S(0), S(0)), (S(0),), local=pass_around, sends=sends, name="ring")
    return [*listed(call), *([ring] if call.even(call.operands[1].shape[0]) else [])]


@pytest.fixture(autouse=True)
def rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, MM, with_ring)


@pytest.mark.parametrize(("rows", "ranks"), [(6, 2), (7, 3), (2, 3)])
def test_the_engine_runs_it_on_all_ranks_at_once_and_counts_what_it_sends(
    rows: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(MM, (torch.randn(rows, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)))
    with_it = check(sample, ranks)
    monkeypatch.setitem(RULES, MM, listed)
    assert with_it == check(sample, ranks) + 1


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(**given: Any) -> tuple[Any, passes.Program]:
    """The verdict on four simulated ranks, and the program before the passes."""
    torch.manual_seed(0)
    model = Product()
    mode = Given(inputs={"x": Shard(0)}, params={"model.weight": Shard(0)}, **given)
    x = torch.randn(8, 8, dtype=torch.float64)
    verdict = spmd.verify(spmd.compile(step, parallel_mode=mode), model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    return verdict, spmd.partition(*SEEN[-1])


def test_it_is_chosen_by_name_and_computes_the_same() -> None:
    verdict, usual = trained()
    assert verdict and usual.collectives()
    by_ring = spmd.Choice(((S(0),), (S(0),)), ((S(0),),), by=("ring",))
    given = replace(usual.assignment, choices={"mm": by_ring}, outputs={})
    verdict, program = trained(assignment=given)
    assert verdict
    moved = [n for n in program.collectives() if n.meta["collective"].kind is passes.Kind.ALL_TO_ALL]
    assert len(moved) == 3 and all("for mm" in n.meta["collective"].why for n in moved)
    problem = spmd.Problem.of(*SEEN[-1])
    cost = problem.cost(program.assignment)
    assert cost.count("all_to_all") == 3 and cost.bytes("all_to_all") == 3 * 2 * 4 * 8
    assert spmd.Assignment.read(str(program.assignment)).choices["mm"].by == ("ring",)
    text = str(spmd.Assignment(given.axes, {"mm": replace(by_ring, by=("spiral",))}))
    with pytest.raises(spmd.PartitionError, match=r"no option .* by 'spiral'"):
        spmd.partition(*SEEN[-1], spmd.Assignment.read(text))
