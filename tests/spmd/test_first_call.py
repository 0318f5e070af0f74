"""``compile(check="first")``: a program that a pass broke is found at its first call, and trains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import passes
import spmd
from passes import Pass, Program
from tests.harness.cases import mlp
from tests.harness.pool import Ranks

aten = torch.ops.aten


@dataclass(frozen=True)
class Doubles(Pass):
    """A pass that breaks a product, on one rank alone if ``rank`` says so."""

    numerics = "exact"
    rank: int | None = None

    def rewrite(self, program: Program) -> int:
        first = program.graph.find_nodes(op="call_function", target=aten.mm.default)[0]
        mine = self.rank is None or program.mesh.axes[0].coordinate == self.rank
        for user in list(first.users) if mine else ():
            with program.graph.inserting_after(first):
                doubled = program.graph.call_function(aten.mul.Tensor, (first, 2.0))
            doubled.meta = dict(first.meta)
            user.replace_input_with(first, doubled)
        return 1


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.dropout(model(x), 0.3).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(3, 4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def on_ranks(rank: int, world: int, style: str, broken: int | None) -> list[Any]:
    model, optimizer = made()
    added = () if broken is None else (Doubles(broken),)
    mode = spmd.DataParallel(style)  # type: ignore[arg-type]
    compiled = spmd.compile(step, parallel_mode=mode, passes=(*added, *passes.default()), check="first")
    torch.manual_seed(7)
    x = torch.randn(4, 3, dtype=torch.float64)
    seen: list[Any] = []
    for _ in range(3):
        try:
            compiled(model, optimizer, x)
        except spmd.SpmdError as error:
            seen.append(str(error))
    with spmd.unshard(model):
        return [seen, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_a_broken_pass_is_found_on_all_ranks_and_trains_nothing(ranks: Ranks, style: str) -> None:
    for seen, *parameters in ranks.run(2, on_ranks, style, 1):
        assert len(seen) == 3 and all("before its passes ran" in each for each in seen)
        for parameter, whole in zip(parameters, made()[0].parameters(), strict=True):
            assert torch.equal(parameter, whole)


def test_what_is_right_trains_as_without_the_check(ranks: Ranks) -> None:
    for seen, *parameters in ranks.run(2, on_ranks, "fully_shard", None):
        assert not seen
        assert not torch.equal(parameters[0], next(made()[0].parameters()))


def test_only_first_or_none() -> None:
    with pytest.raises(ValueError, match='to be "first", "nan" or None'):
        spmd.compile(step, check="always")
