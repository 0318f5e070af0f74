"""Units: which parameters are communicated together in a compiled step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from passes import FormUnits, Program, Role, default
from tests.harness.cases import MLP, NARROW, Block, make_optimizer
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
    (spmd.DataParallel("replicate"), [Role.GRADIENT], 8),  # the first one is cut early
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


class Tower(nn.Module):
    """Blocks of unequal widths, one in another, between two Linears that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outer, self.other = nn.Sequential(Block(6), nn.Linear(6, 6)), Block(6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.other(self.outer(self.first(x))))
        return y


OUTER = ("model.outer.1.weight", "model.outer.1.bias")
BLOCKS = tuple(
    tuple(f"model.{path}.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias"))
    for path in ("outer.0", "other")
)


def tower() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose blocks are no siblings, and its optimizer."""
    model = Tower()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("choice, units", [
    (Block, BLOCKS),
    ([Block, "*.outer"], (OUTER, *BLOCKS)),
    (lambda module: isinstance(module, Block), BLOCKS),
    ("model.o*er", ((*BLOCKS[0], *OUTER), BLOCKS[1])),
], ids=["class", "class and pattern", "function", "pattern"])  # fmt: skip
def test_chosen_modules_are_units_that_are_gathered_again(choice: Any, units: tuple[tuple[str, ...], ...]) -> None:
    mode = spmd.DataParallel("fully_shard", units=choice)
    compiled = compile_on_fake_ranks(2, MLP.step, tower(), torch.randn(2, 6), torch.randn(2, 6), parallel_mode=mode)
    gathered, reduced = of_role(compiled, Role.PARAMETER), of_role(compiled, Role.GRADIENT)
    assert {tuple(sorted(unit)) for unit in units} <= {tuple(sorted(unit)) for unit in compiled.program.units}
    for unit in units:
        forward, backward = (of for of in gathered if set(of) & set(unit))
        assert sorted(forward) == sorted(unit)
        assert set(backward) == {name for name in unit if "weight" in name}  # biases are not read again
        assert sum(sorted(unit) == sorted(of) for of in reduced) == 1
    rest = [name for of in gathered for name in of if not any(name in unit for unit in units)]
    assert len(rest) == len(set(rest))  # what is in no unit stays whole


def test_units_follow_annotations_in_their_own_modules_only() -> None:
    model, optimizer = tower()
    spmd.replicate(model.get_submodule("other"))
    mode = spmd.DataParallel("fully_shard", units=Block)
    x = torch.randn(2, 6)
    compiled = compile_on_fake_ranks(2, MLP.step, (model, optimizer), x, x, parallel_mode=mode)
    gathered = [name for of in of_role(compiled, Role.PARAMETER) for name in of]
    assert set(BLOCKS[0]) <= set(gathered) and not set(BLOCKS[1]) & set(gathered)


@pytest.mark.parametrize("choice", ["*.block?", nn.Conv2d, lambda module: False], ids=["pattern", "class", "function"])
def test_a_choice_of_no_module_is_refused_before_anything_changes(choice: Any) -> None:
    model, optimizer = tower()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mode = spmd.DataParallel("fully_shard", units=choice)
    with pytest.raises(spmd.PlacementError, match=r"in units picks none of the submodules \(model\.first, "):
        compile_on_fake_ranks(2, MLP.step, (model, optimizer), torch.randn(2, 6), torch.randn(2, 6), parallel_mode=mode)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


@pytest.mark.parametrize("choice", [[], 3, [nn.Linear, 3], int, nn.Linear(2, 2)])
def test_a_choice_that_cannot_pick_modules_is_refused(choice: Any) -> None:
    with pytest.raises(TypeError, match="expected units to be module classes, patterns"):
        spmd.DataParallel(units=choice)


@dataclass(frozen=True)
class Towers(MLP):
    """A model with units within units and a shared parameter."""

    sizes: tuple[int, ...] = (6, 6)
    rows: int = 5
    optimizer: str = "SGD momentum"

    def build(self) -> tuple[Any, ...]:
        """The model in fp64, and its optimizer."""
        model = Tower().double()
        return model, make_optimizer(self.optimizer, model.parameters())


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_numbers_with_chosen_units(ranks: Ranks, style: str) -> None:
    assert_agrees(ranks, 2, Towers(), {"parallel_style": style, "units": [Block, "*.outer"]})


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


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_numbers_with_units_that_split_a_model_oddly(ranks: Ranks, style: str) -> None:
    passes = tuple(FormUnits(2000, 300) if isinstance(each, FormUnits) else each for each in default())
    assert_agrees(ranks, 2, replace(NARROW, optimizer="SGD momentum"), style, passes=passes)
