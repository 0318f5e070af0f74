"""Units: which parameters are communicated together in a compiled step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from passes import FormUnits, Program, Role, default
from tests.harness.cases import MLP, NARROW, Block
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, regression

pytestmark = pytest.mark.slow


def of_role(compiled: spmd.CompiledStep, role: Role) -> list[tuple[str, ...]]:
    """What the collectives of a role serve."""
    assert compiled.program is not None
    collectives = [node.meta["collective"] for node in compiled.program.collectives()]
    return [each.of for each in collectives if each.role is role]


def test_four_linears_are_three_all_reduces_of_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(4)))
    x = torch.randn(2, 2000)
    compiled = compile_on_fake_ranks(2, MLP.step, (model, torch.optim.SGD(model.parameters(), lr=0.1)), x, x)
    assert [len(of) for of in of_role(compiled, Role.GRADIENT)] == [2, 4, 2]


@pytest.mark.parametrize("mode, roles, units", [
    (spmd.DataParallel("replicate"), [Role.GRADIENT], 6),  # the first one is cut early
    # And so are the last ones, where there is little to do.
    (spmd.DataParallel("fully_shard", reshard_after_forward=False), [Role.GRADIENT, Role.PARAMETER], 8),
], ids=["replicate", "fully_shard"])  # fmt: skip
def test_large_blocks_are_units_in_order_of_registration(mode: Any, roles: list[Role], units: int) -> None:
    model = nn.Sequential(*(Block(256) for _ in range(5)))
    x = torch.randn(2, 256)
    objects = model, torch.optim.AdamW(model.parameters())
    compiled = compile_on_fake_ranks(2, MLP.step, objects, x, x, parallel_mode=mode)
    whole = tuple(f"model.3.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias"))
    for role in roles:
        assert whole in of_role(compiled, role)
        assert len(of_role(compiled, role)) == units


class InUnits(spmd.DataParallel):
    """Says which parameters go together: weights, and biases but for the last one."""

    def plan(self, program: Program) -> spmd.Plan:
        """The plan with units, in no particular order."""
        names = [declared.name for declared in program.inputs if declared.role is Role.PARAMETER]
        units = tuple(n for n in names[::-1] if "weight" in n), tuple(n for n in names[:-1] if "bias" in n)
        return replace(super().plan(program), units=units)


def test_units_of_a_plan_stay_and_the_other_parameters_get_units() -> None:
    model, *rest = regression(6, 5, 4, 3)
    compiled = compile_on_fake_ranks(2, MLP.step, (model, *rest), parallel_mode=InUnits())
    weights, biases = (tuple(f"model.{k}.{kind}" for k in (0, 2, 4)) for kind in ("weight", "bias"))
    assert compiled.program is not None and compiled.program.units == (weights, biases[:2], biases[2:])
    assert sorted(of_role(compiled, Role.GRADIENT)) == sorted([weights, biases[:2], biases[2:]])


def test_a_plan_with_a_unit_of_something_else_is_refused() -> None:
    class Wrong(spmd.DataParallel):
        def plan(self, program: Program) -> spmd.Plan:
            return replace(super().plan(program), units=(("model.0.weight", "model.9"), ("model.0.weight",)))

    model, *rest = regression(6, 5)
    with pytest.raises(spmd.PartitionError, match=r"each once.*model\.0\.weight.*model\.9"):
        compile_on_fake_ranks(2, MLP.step, (model, *rest), parallel_mode=Wrong())


class Normed(nn.Module):
    """Two batch norms side by side, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.left(x) + self.right(x * x))
        return y


def test_statistics_of_independent_batch_norms_are_merged() -> None:
    model = Normed()
    x = torch.randn(8, 4)
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1)
    unmerged = compile_on_fake_ranks(2, MLP.step, objects, x, x, passes=())
    merged = compile_on_fake_ranks(2, MLP.step, objects, x, x)
    assert len(of_role(unmerged, Role.ACTIVATION)) == 8
    # A mean, then a sum of squares about it: of the two side by side, then of the last one. In backward two sums.
    assert len(of_role(merged, Role.ACTIVATION)) == 5


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_numbers_with_units_that_split_a_model_oddly(ranks: Ranks, style: str) -> None:
    passes = tuple(FormUnits(2000, 300) if isinstance(each, FormUnits) else each for each in default())
    assert_agrees(ranks, 2, replace(NARROW, optimizer="SGD momentum"), style, passes=passes)
