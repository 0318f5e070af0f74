"""``DTensorExpand``: the placements a user gives, in numbers on ranks, in structure on a fake world, and in errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import spmd
from passes import Kind, PlacementError, Role, default
from tests.harness.cases import MLP, make_optimizer
from tests.harness.fake import fake_world
from tests.harness.oracle import Case, all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow

BATCH: dict[str, Any] = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
MEGATRON: dict[str, Any] = {
    "*up.weight": {"tp": Shard(0)},
    "*up.bias": {"tp": Shard(0)},
    "*down.weight": {"tp": Shard(1)},
}


class Block(nn.Module):
    """Up to the hidden width, and down again."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@dataclass(frozen=True)
class Blocks(MLP):
    """Regression through blocks: ``sizes`` are the width, the hidden width and the width again."""

    sizes: tuple[int, ...] = (6, 8, 6)
    rows: int = 4
    blocks: int = 1

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(*[Block(*self.sizes[:2]) for _ in range(self.blocks)]).double()
        return model, make_optimizer(self.optimizer, model.parameters())


EVEN, UNEVEN = Blocks(), Blocks(sizes=(5, 7, 5), rows=3)
EITHER = [EVEN, UNEVEN]  # by SGD: state is split as its parameters are, and tests around these have some


# Numbers


def run_on_two_axes(rank: int, world: int, case: Case, params: Mapping[str, Any], inputs: Any, passes: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mode = spmd.DTensorExpand(mesh=mesh, params=params, inputs=inputs)
    _, got = compiled_run(rank // 2, case, 3, parallel_mode=mode, passes=passes)
    return all_unequal(plain_run(case, 2, 3), got, rank // 2, 2)


def run_on_one_axis(rank: int, world: int, case: Case, params: Mapping[str, Any]) -> list[str]:
    _, got = compiled_run(rank, case, 3, parallel_mode=spmd.DTensorExpand(params=params))
    return all_unequal(plain_run(case, world, 3), got, rank, world)


def run_with_a_batch_over_both_axes(rank: int, world: int, case: Case, params: Mapping[str, Any]) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    inputs = {"x": [Shard(0), Shard(0)], "y": [Shard(0), Shard(0)]}
    mode = spmd.DTensorExpand(mesh=mesh, params=params, inputs=inputs)
    _, got = compiled_run(rank, case, 3, parallel_mode=mode)
    return all_unequal(plain_run(case, world, 3), got, rank, world)


# Every two options meet.
@pytest.mark.parametrize("case, optimizer, passes", [
    pytest.param(EVEN, "SGD momentum", (), marks=pytest.mark.exhaustive),
    (UNEVEN, "SGD momentum", None),
    pytest.param(replace(EVEN, blocks=2), "SGD", None, marks=pytest.mark.exhaustive),
], ids=lambda each: f"{each.blocks} x {each.sizes}" if isinstance(each, Blocks) else str(each))  # fmt: skip
def test_megatron(ranks: Ranks, case: Blocks, optimizer: str, passes: Any) -> None:
    assert ranks.run(4, run_on_two_axes, replace(case, optimizer=optimizer), MEGATRON, BATCH, passes) == [[]] * 4


def either(usual: Sequence[tuple[str, Blocks]], placements: Mapping[str, Any]) -> list[Any]:
    """Each case with each of these placements, of which the usual ones run in every run."""
    names = {id(EVEN): "even", id(UNEVEN): "uneven"}
    return [
        pytest.param(case, params, id=f"{names[id(case)]}-{name}", marks=[pytest.mark.exhaustive] * (not is_usual))
        for case in EITHER
        for name, params in placements.items()
        for is_usual in [(name, case) in usual]
    ]


@pytest.mark.parametrize("case, params", either(
    [("one dim twice", UNEVEN), ("both dims and biases", EVEN), ("megatron, split twice", UNEVEN)],
    {
        "one dim twice": {"*.weight": [Shard(0), Shard(0)]},
        "both dims": {"*.weight": [Shard(0), Shard(1)]},
        "both dims and biases": {"*.weight": [Shard(1), Shard(0)], "*.bias": [Replicate(), Shard(0)]},
        "as the batch": {"*.weight": {"dp": Shard(0)}, "*.bias": {"dp": Shard(0)}},
        "megatron, split twice": {
            "*up*": {"dp": Shard(0), "tp": Shard(0)}, "*down.weight": {"dp": Shard(0), "tp": Shard(1)},
        },
    },
))  # fmt: skip
def test_parameters_split_over_both_axes(ranks: Ranks, case: Blocks, params: dict[str, Any]) -> None:
    assert ranks.run(4, run_on_two_axes, case, params, BATCH, None) == [[]] * 4


def test_some_ranks_have_empty_parts(ranks: Ranks) -> None:
    case = Blocks(sizes=(3, 1, 3), rows=3, optimizer="SGD momentum")
    assert ranks.run(4, run_on_two_axes, case, MEGATRON | {"*down.bias": [Shard(0), Shard(0)]}, BATCH, None) == [[]] * 4


@pytest.mark.parametrize("case, dim, world", [
    (EVEN, 0, 2),
    pytest.param(EVEN, 1, 3, marks=pytest.mark.exhaustive),
    (UNEVEN, 0, 3),
    (UNEVEN, 1, 2),
    pytest.param(UNEVEN, -1, 3, marks=pytest.mark.exhaustive),
], ids=lambda each: str(each.sizes) if isinstance(each, Blocks) else str(each))  # fmt: skip
def test_parameters_split_over_the_axis_of_the_batch(ranks: Ranks, case: Blocks, dim: int, world: int) -> None:
    params = {"*.weight": Shard(dim), "*.bias": Shard(0)}
    assert ranks.run(world, run_on_one_axis, replace(case, optimizer="SGD momentum"), params) == [[]] * world


@pytest.mark.parametrize("case, params", either(
    [("replicated", UNEVEN), ("split over tp", EVEN), ("split over both", UNEVEN)],
    {
        "replicated": {},
        "split over dp": {"*": {"dp": Shard(0)}},
        "split over tp": {"*": {"tp": Shard(0)}},
        "split over both": {"*": {"dp": Shard(0), "tp": Shard(0)}},
    },
))  # fmt: skip
def test_a_batch_split_over_both_axes(ranks: Ranks, case: Blocks, params: dict[str, Any]) -> None:
    assert ranks.run(4, run_with_a_batch_over_both_axes, case, params) == [[]] * 4


# Structure


def compiled_on_fakes(
    case: Blocks, params: Any = None, inputs: Any = None, shape: Any = (2, 2), rank: int = 0, passes: Any = ()
) -> Any:
    """The compiled step of one rank of a fake ``dp`` x ``tp`` mesh, after one call; and its model and optimizer."""
    model, optimizer = case.build()
    with fake_world(torch.Size(shape).numel(), rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        mode = spmd.DTensorExpand(mesh=mesh, params=params, inputs=inputs)
        compiled = spmd.compile(parallel_mode=mode, passes=passes)(case.step)
        compiled(model, optimizer, *case.part(0, 0))
    return compiled, model, optimizer


def placed(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Where each input of the program lives."""
    compiled, *_ = compiled_on_fakes(*arguments, **options)
    return {declared.name: declared.placement for declared in compiled.program.inputs}


def test_parameters_and_their_optimizer_state_have_the_given_placements() -> None:
    _, model, optimizer = compiled_on_fakes(replace(EVEN, optimizer="AdamW"), MEGATRON)
    block = model[0]
    split = {block.up.weight: Shard(0), block.up.bias: Shard(0), block.down.weight: Shard(1)}
    for parameter, placement in split.items():
        for tensor in (parameter, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]):
            assert isinstance(tensor, DTensor)
            assert tensor.placements == (Replicate(), placement)
    assert [tuple(parameter.shape) for parameter in split] == [(8, 6), (8,), (6, 8)]
    assert not isinstance(block.down.bias, DTensor)


def test_the_first_pattern_that_fits_counts() -> None:
    found = placed(EVEN, {"*up.weight": {"tp": Shard(1)}, "*.weight": {"dp": Shard(0)}})
    assert found["model.0.up.weight"] == (Replicate(), Shard(1))
    assert found["model.0.down.weight"] == (Shard(0), Replicate())
    assert found["model.0.up.bias"] == (Replicate(), Replicate())


def test_a_dim_counted_from_the_end() -> None:
    assert placed(EVEN, {"*up.weight": {"tp": Shard(-1)}})["model.0.up.weight"] == (Replicate(), Shard(1))


def test_inputs_that_are_not_named_are_split_over_the_first_axis() -> None:
    """As ``BATCH`` names them, with which numbers are compared above."""
    found = placed(EVEN, MEGATRON)
    assert found["x"] == found["y"] == (Shard(0), Replicate())


def test_axes_left_out_are_replicated() -> None:
    found = placed(EVEN, inputs={"x": {"dp": Shard(0)}, "y": [Shard(0), Replicate()]})
    assert found["x"] == found["y"] == (Shard(0), Replicate())


def test_one_axis_takes_a_placement_a_list_or_a_dict() -> None:
    for placement in (Shard(0), [Shard(0)], {"dp": Shard(0)}):
        assert placed(EVEN, {"*up.weight": placement}, shape=(2,))["model.0.up.weight"] == (Shard(0),)


def test_a_gradient_is_reduced_once_over_the_axis_of_the_batch() -> None:
    compiled, *_ = compiled_on_fakes(replace(EVEN, blocks=2), MEGATRON)
    collectives = [node.meta["collective"] for node in compiled.program.collectives()]
    reduced = [each.of for each in collectives if each.axis == "dp" and each.role is Role.GRADIENT]
    assert sorted(reduced) == sorted((f"model.{name}",) for name, _ in Blocks(blocks=2).build()[0].named_parameters())
    assert {each.kind for each in collectives if each.axis == "dp"} == {Kind.ALL_REDUCE}


@pytest.mark.parametrize("passes", [default(), ()], ids=["default passes", "no passes"])
@pytest.mark.parametrize("params", [MEGATRON, {"*": {"dp": Shard(0), "tp": Shard(0)}}], ids=["megatron", "one dim"])
@pytest.mark.in_turn("passes")
def test_every_rank_has_the_same_ops_with_uneven_sizes(params: Any, passes: Any) -> None:
    programs = [compiled_on_fakes(UNEVEN, params, rank=rank, passes=passes)[0].program for rank in range(4)]
    assert len({tuple(str(node.target) for node in program.graph.nodes) for program in programs}) == 1


# Errors


@pytest.mark.parametrize("params, message", [
    ({"nothing.*": Shard(0)}, "'nothing.*' in params matches none of the parameters"),
    ({"*.weight": {"tp": Shard(0)}, "up.weight": {"tp": Shard(0)}}, "'up.weight' in params matches none"),
    ({"*.weight": Shard(0)}, "has 1 entries, but the mesh has 2 axes"),
    ({"*.weight": [Shard(0)] * 3}, "has 3 entries, but the mesh has 2 axes"),
    ({"*.weight": {"pp": Shard(0)}}, r"names the mesh axes \['pp'\]; the mesh has \['dp', 'tp'\]"),
    ({"*.bias": {"tp": Shard(1)}}, "has 1 dims, so it cannot be split along dim 1"),
], ids=["no match", "one of two matches", "too few", "too many", "unknown axis", "no such dim"])  # fmt: skip
def test_placements_of_parameters_that_cannot_be(params: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        compiled_on_fakes(EVEN, params)


@pytest.mark.parametrize("inputs, message", [
    ({"z": {"dp": Shard(0)}}, r"inputs names \['z'\], but the tensor arguments of the step are \['x', 'y'\]"),
    ({"x": Shard(0)}, "has 1 entries, but the mesh has 2 axes"),
    ({"x": [Shard(0)] * 3}, "has 3 entries, but the mesh has 2 axes"),
    ({"x": {"pp": Shard(0)}}, r"the placement of x names the mesh axes \['pp'\]"),
    ({"x": {"dp": Shard(2)}}, "x has 2 dims, so it cannot be split along dim 2"),
], ids=["unknown argument", "too few", "too many", "unknown axis", "no such dim"])  # fmt: skip
def test_placements_of_inputs_that_cannot_be(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        compiled_on_fakes(EVEN, inputs=inputs)


@pytest.mark.parametrize("params", [["*.weight"], {"*.weight": {"tp": 0}}, {"*.weight": "tp"}], ids=str)
def test_values_that_are_no_placements(params: Any) -> None:
    with pytest.raises(TypeError, match="expected params to map name patterns to placements"):
        compiled_on_fakes(EVEN, params)
