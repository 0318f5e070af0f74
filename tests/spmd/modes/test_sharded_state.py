"""In "fully_shard" each rank keeps its shard only, and the user's objects stay what they were but for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import spmd
from tests.harness.cases import MLP, make_optimizer, mlp
from tests.harness.memory import arena_bytes, live_bytes, still_alive, storages_of
from tests.harness.pool import Ranks
from tests.spmd.numbers.test_modules import Tied, TiedWeights

SIZES = (256, 512, 128)
CASE = MLP(sizes=SIZES, rows=8, optimizer="AdamW")


def train(case: MLP, rank: int, model: nn.Module, optimizer: Any, steps: int = 3, **options: Any) -> spmd.CompiledStep:
    compiled = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"), **options)(case.step)
    for k in range(steps):
        compiled(model, optimizer, *case.part(rank, k))
    return compiled


def entries(rank: int, world: int) -> None:
    model, optimizer = CASE.build()
    names, shapes = list(model.state_dict()), [tuple(p.shape) for p in model.parameters()]
    train(CASE, rank, model, optimizer)
    parameters = list(model.parameters())
    assert list(model.state_dict()) == names
    assert [tuple(p.shape) for p in parameters] == shapes
    for parameter in parameters:
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
        assert parameter.placements[0].is_shard(0) and parameter.device_mesh.size() == world
        assert len(parameter.to_local()) == len(parameter) // world
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(mine is theirs for mine, theirs in zip(held, parameters, strict=True))
    assert list(map(id, optimizer.state)) == list(map(id, parameters))
    for parameter in parameters:
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter][key]
            assert isinstance(state, DTensor) and state.placements == parameter.placements


def test_parameters_and_optimizer_state_are_dtensors_under_their_old_names(ranks: Ranks) -> None:
    ranks.run(2, entries)


def memory(rank: int, world: int, passes: Any) -> tuple[int, int, list[str]]:
    """Bytes that came to be alive, bytes of three shards (parameter and two averages), full storages still alive.

    The arenas that programs compute in stay, too; they are counted separately.
    """
    before = live_bytes()
    model, optimizer = CASE.build()
    full, storages = sum(p.numel() * 8 for p in model.parameters()), storages_of(model)
    compiled = train(CASE, rank, model, optimizer, passes=passes)
    grown = live_bytes() - before - arena_bytes(compiled)
    assert compiled.program is not None  # alive while counting
    return grown, 3 * full // world, still_alive(storages)


@pytest.mark.parametrize("world, passes", [(2, ()), (4, None)], ids=["2-no passes", "4-default passes"])
def test_no_full_copy_stays_alive(ranks: Ranks, world: int, passes: Any) -> None:
    for grown, shards, alive in ranks.run(world, memory, passes):
        assert alive == []
        assert shards <= grown < 1.1 * shards


def moved_along(rank: int, world: int) -> None:
    model, optimizer = CASE.build()
    model[0].weight.tag = "mine"
    model[0].weight.register_hook(lambda gradient: gradient)
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    model(torch.ones(2, SIZES[0], dtype=torch.float64)).sum().backward()
    gradient = model[2].weight.grad.clone()

    @spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))
    def no_update(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    no_update(model, optimizer, CASE.part(rank, 0)[0])
    weight, bias, last = model[0].weight, model[0].bias, model[2].weight
    assert weight.tag == "mine"
    assert len(weight._backward_hooks) == 1
    assert len(bias._post_accumulate_grad_hooks) == 1
    assert isinstance(last.grad, DTensor) and last.grad.placements == last.placements
    torch.testing.assert_close(last.grad.full_tensor(), gradient)


def test_attributes_hooks_and_gradients_move_along(ranks: Ranks) -> None:
    ranks.run(2, moved_along)


def tied(rank: int, world: int) -> None:
    case = TiedWeights()
    model = Tied().double()
    optimizer = make_optimizer("AdamW", model.parameters())
    train(case, rank, model, optimizer)
    assert model.head.weight is model.embed.weight
    assert list(model.state_dict()) == list(Tied().state_dict())
    assert any(p is model.embed.weight for p in optimizer.param_groups[0]["params"])


def test_tied_parameters_stay_one(ranks: Ranks) -> None:
    ranks.run(2, tied)


def reloaded(rank: int, world: int) -> None:
    """A state_dict() can be loaded into a model and an optimizer with the same placements."""
    (model, optimizer), (other, its_optimizer) = CASE.build(), CASE.build()
    train(CASE, rank, model, optimizer)
    train(CASE, rank, other, its_optimizer, steps=1)
    other.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor(), rtol=0, atol=0)


def test_state_dicts_can_be_loaded_again(ranks: Ranks) -> None:
    ranks.run(2, reloaded)


def still_replicated(rank: int, world: int) -> None:
    """The other styles leave plain parameters where they were."""
    model = mlp(15, 17, 4)
    optimizer = make_optimizer("AdamW", model.parameters())
    before = list(model.parameters())
    case = MLP(sizes=(15, 17, 4), rows=4)
    compiled = spmd.compile(case.step)
    for k in range(3):
        compiled(model, optimizer, *case.part(rank, k))
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))


def test_replicated_parameters_are_the_same_objects_as_before(ranks: Ranks) -> None:
    ranks.run(2, still_replicated)
