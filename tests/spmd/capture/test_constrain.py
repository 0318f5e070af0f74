"""``spmd.constrain``: the identity in eager; in a compiled step a placement, redistributed once each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F

import spmd
from passes import PlacementError
from spmd.capture.constraint import CONSTRAIN
from tests.harness.cases import MLP, make_optimizer, mlp
from tests.harness.fake import fake_world
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts, regression

ROWS, COLUMNS = {"dp": Shard(0), "tp": Shard(1)}, {"tp": Shard(0), "dp": Shard(1)}


class Constrained(nn.Module):
    """A linear layer whose result has a given placement."""

    def __init__(self, width: int, height: int, placement: Any) -> None:
        super().__init__()
        self.linear, self.placement = nn.Linear(width, height), placement

    def forward(self, x: Tensor) -> Tensor:
        return spmd.constrain(self.linear(x), self.placement)


@dataclass(frozen=True)
class Layers(MLP):
    """Regression through constrained layers."""

    sizes: tuple[int, ...] = (6, 6)
    rows: int = 4
    placements: tuple[Any, ...] = ()

    def build(self) -> tuple[Any, ...]:
        layers = [Constrained(*self.sizes, placement) for placement in self.placements]
        model = nn.Sequential(*[each for layer in layers for each in (layer, nn.Tanh())]).double()
        return model, make_optimizer("SGD", model.parameters())


def test_it_is_the_tensor_itself_where_nothing_compiles() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    assert spmd.constrain(x, {"anything": Shard(5)}) is x
    torch.autograd.gradcheck(lambda x: spmd.constrain(x, [Shard(0)]).sin(), x.double())


# Numbers


def run_on_two_axes(rank: int, world: int, case: Layers) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _, got = compiled_run(rank // 2, case, 3, parallel_mode=spmd.DTensorExpand(mesh=mesh))
    return all_unequal(plain_run(case, 2, 3), got, rank // 2, 2)


def run_on_one_axis(rank: int, world: int, case: Layers, style: str) -> list[str]:
    _, got = compiled_run(rank, case, 3, parallel_mode=spmd.DataParallel(style))
    return all_unequal(plain_run(case, world, 3), got, rank, world)


@pytest.mark.parametrize("sizes", [
    pytest.param({}, marks=pytest.mark.exhaustive), {"sizes": (5, 5), "rows": 3},
], ids=["even", "uneven"])  # fmt: skip
def test_numbers_on_two_axes(ranks: Ranks, sizes: dict[str, int]) -> None:
    placements = (ROWS, COLUMNS, {}, [Shard(0), Shard(0)], {"tp": Shard(-1)}, {"dp": Shard(0)})
    assert ranks.run(4, run_on_two_axes, Layers(placements=placements, **sizes)) == [[]] * 4


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_numbers_on_one_axis(ranks: Ranks, style: str) -> None:
    case = Layers((5, 5), placements=(Shard(1), [Shard(0)], Replicate(), {"dp": Shard(1)}))
    assert ranks.run(2, run_on_one_axis, case, style) == [[]] * 2


# Structure


def test_a_tensor_is_redistributed_once_and_so_is_its_gradient() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        hidden = spmd.constrain(model(x), Shard(1))
        loss = (hidden.sin() + hidden.cos()).sum() + hidden.exp().sum()
        loss.backward()
        return loss

    model, _, x, _ = regression(6, 6, rows=4)
    compiled = compile_on_fake_ranks(2, step, (model,), x, passes=())
    assert counts(compiled)["all_to_all"] == 2
    collectives = [node.meta["collective"].why for node in compiled.program.collectives()]
    assert collectives[0] == "activation: split anew for spmd.constrain"
    assert not compiled.program.graph.find_nodes(op="call_function", target=CONSTRAIN)


def test_a_tensor_with_that_placement_does_not_move() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(spmd.constrain(model(x), [Shard(0)]), y)

    compiled = compile_on_fake_ranks(2, step, regression(6, 6)[:2], *regression(6, 6)[2:], passes=())
    assert counts(compiled) == {"all_reduce": 1}  # of the loss


def test_a_pending_sum_is_scattered_and_its_gradient_is_gathered() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        whole = spmd.constrain(model[0](x), {"tp": Replicate()})
        loss = spmd.constrain(model[1](whole), {"tp": Shard(0)}).square().sum()
        loss.backward()
        return loss

    with fake_world(2):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        params = {"*.0.weight": {"tp": Shard(0)}, "*.1.weight": {"tp": Shard(1)}}
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)).double()
        mode = spmd.DTensorExpand(mesh=mesh, params=params, inputs={"x": {}})
        compiled = spmd.compile(parallel_mode=mode, passes=())(step)
        compiled(model, torch.randn(6, 4, dtype=torch.float64))
    collectives = [(node.meta["phase"], node.meta["collective"]) for node in compiled.program.collectives()]
    asked = [(phase, each.kind) for phase, each in collectives if "for spmd.constrain" in each.why]
    assert asked == [("forward", "all_gather"), ("forward", "reduce_scatter"), ("backward", "all_gather")]


@pytest.mark.usefixtures("alone")
def test_a_step_is_certified_whose_result_is_constrained() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return spmd.constrain(model(x), Replicate())

    mode = spmd.DataParallel(inputs={"x": Shard(0)})
    assert spmd.certify(
        spmd.compile(step, parallel_mode=mode), *regression(6, 6)[:1], torch.ones(4, 6).double(), world=2
    )


# Errors


@pytest.mark.parametrize("placement, message", [
    ({"tp": Shard(0)}, r"the placement of the tensor names the mesh axes \['tp'\]; the mesh has \['dp'\]"),
    ([Shard(0), Shard(1)], "the placement of the tensor has 2 entries, but the mesh has 1 axes"),
    (Shard(2), "the tensor has 2 dims, so it cannot be split along dim 2"),
    (Partial(), r"the tensor cannot be Partial by choice, pass Replicate\(\) or Shard\(dim\)"),
], ids=["unknown axis", "too many", "no such dim", "partial"])  # fmt: skip
def test_an_impossible_placement_is_an_error_at_the_users_line(placement: Any, message: str) -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(spmd.constrain(model(x), placement), y)

    line = r", at test_constrain.py:\d+: return F.mse_loss\(spmd.constrain"
    with pytest.raises(PlacementError, match=f"^spmd.constrain: {message}.*{line}"):
        compile_on_fake_ranks(2, step, regression(6, 6)[:2], *regression(6, 6)[2:])


@pytest.mark.parametrize("arguments", [(mlp(2, 2), Shard(0)), (torch.ones(2), "dp"), (torch.ones(2), {"dp": 0})])
def test_other_arguments_are_type_errors(arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"spmd\.constrain: expected a tensor and its placement"):
        spmd.constrain(*arguments)
