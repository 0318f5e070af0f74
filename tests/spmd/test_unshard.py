"""``spmd.unshard``: inside of it a sharded model is the plain model, and edits reach the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, snapshot
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 17, 1), rows=5, optimizer="SGD momentum")


class Tied(nn.Module):
    """Two names for one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.other.weight = self.one.weight
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.other(self.one(x)) * self.scale
        return out


def _trained(rank: int, step: Callable[..., Any], at: Callable[[nn.Module], None], part: Callable[..., Any]) -> Any:
    """Two steps, ``at(model)``, and two steps."""
    torch.manual_seed(0)
    model, optimizer = CASE.build()
    for k in range(2):
        step(model, optimizer, *part(k))
    at(model)
    results = [step(model, optimizer, *part(k)) for k in (2, 3)]
    return snapshot(results, (model, optimizer))


def edits(rank: int, world: int, rank0_only: bool) -> list[str]:
    """What differs after a training in which parameters were doubled on the way."""

    def double(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(2)

    def double_whole(model: nn.Module) -> None:
        names = [name for name, _ in model.named_parameters()]
        with spmd.unshard(model, rank0_only=rank0_only):
            assert [name for name, _ in model.named_parameters()] == names
            whole = [not isinstance(p, DTensor) for p in model.parameters()]
            assert all(whole) if rank == 0 or not rank0_only else not any(whole)
            if rank == 0 or not rank0_only:
                double(model)

    def part(k: int) -> Any:
        return CASE.part(rank, k)

    def whole(k: int) -> Any:
        return CASE.whole([CASE.part(r, k) for r in range(world)])

    step = spmd.compile(CASE.step, parallel_mode=spmd.DataParallel("fully_shard"))
    got, want = _trained(rank, step, double_whole, part), _trained(rank, CASE.step, double, whole)
    return all_unequal([want], [got], rank, world)


@pytest.mark.parametrize("world, rank0_only", [(2, False), (4, True)])
def test_edits_reach_the_shards(ranks: Ranks, world: int, rank0_only: bool) -> None:
    assert ranks.run(world, edits, rank0_only) == [[]] * world


def looks(rank: int, world: int) -> None:
    """Everything else, on one model."""
    torch.manual_seed(0)
    model = Tied()
    plain, x = Tied(), torch.randn(3, 5)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel("fully_shard"))
    compiled(model, optimizer, x)
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.0), torch.cat([x] * world))
    before = model.one.weight
    with spmd.unshard(model, with_grads=True, offload_to_cpu=True):
        assert model.one.weight is model.other.weight and isinstance(model.one.weight, nn.Parameter)
        assert list(model.state_dict()) == list(plain.state_dict())
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model.one.weight.grad, plain.one.weight.grad)
        model.one.weight.grad.zero_()
        with pytest.raises(spmd.SpmdError, match="do not nest"), spmd.unshard(model.one):
            pass
        with pytest.raises(spmd.SpmdError, match=r"inside of spmd\.unshard"):
            compiled(model, optimizer, x)
    assert model.one.weight is model.other.weight is before and not before.grad.full_tensor().any()
    with spmd.unshard(model, writeback=False):
        model.one.weight.data.zero_()
    with spmd.unshard(model, recurse=False):
        assert isinstance(model.one.weight, DTensor)
    with pytest.raises(spmd.SpmdError, match=r"one\.weight was replaced"), spmd.unshard(model):
        model.one.weight = nn.Parameter(torch.ones(4, 4))
    with spmd.unshard(model, with_grads=True):
        model.zero_grad()
    assert before.grad is None
    torch.testing.assert_close(before.full_tensor(), plain.one.weight)


def test_the_model_is_the_plain_one_inside(ranks: Ranks) -> None:
    ranks.run(2, looks)


def one_fails(rank: int, world: int) -> None:
    model, optimizer = CASE.build()
    spmd.compile(CASE.step, parallel_mode=spmd.DataParallel("fully_shard"))(model, optimizer, *CASE.part(rank, 0))
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.raises(spmd.SpmdError if rank == 0 else ZeroDivisionError), spmd.unshard(model):
        for p in model.parameters():
            p.data.zero_()
        if rank == 1:
            raise ZeroDivisionError
    assert all(torch.equal(p.to_local(), local) for p, local in zip(model.parameters(), before, strict=True))


def test_where_one_rank_fails_no_rank_writes(ranks: Ranks) -> None:
    ranks.run(2, one_fails)


@pytest.mark.usefixtures("alone")
def test_inside_of_a_step_it_is_refused() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with spmd.unshard(model):
            return model(x)  # type: ignore[no-any-return]

    with pytest.raises(spmd.SpmdError, match="inside of a compiled step"):
        spmd.compile(step)(nn.Linear(2, 2), torch.ones(1, 2))


class Mixed(nn.Module):
    """Parameters of which "default" splits some, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.b(self.a(x)))
        return out


def mixed(rank: int, world: int) -> list[list[float]]:
    """The values of a model with sharded and whole tensors after edits that count, and after some that do not."""
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    spmd.compile(step, parallel_mode=spmd.DataParallel("default"))(model, optimizer, torch.randn(3, 3))
    with spmd.unshard(model, rank0_only=True, with_grads=True):
        if rank == 0:
            for tensor in model.state_dict().values():
                tensor.fill_(7)
            model.a.weight.grad.fill_(5.0)
            model.b.weight.grad = None
    with spmd.unshard(model, writeback=False):
        for tensor in model.state_dict().values():
            tensor.fill_(8)
    with spmd.unshard(model):
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    assert model.b.weight.grad is None
    assert model.a.weight.grad.full_tensor().unique().tolist() == [5.0]
    tensors = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.state_dict().values()]
    return [each.unique().tolist() for each in tensors]


@pytest.mark.parametrize("world", [1, 2])
def test_whole_tensors_are_edited_as_sharded_ones_are(ranks: Ranks, world: int) -> None:
    assert all(value == [8.0] for values in ranks.run(world, mixed) for value in values)


SURGERY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parametrized": (lambda model: weight_norm(model[0]), "0 became a ParametrizedLinear"),
    "with a child": (lambda model: model.append(nn.Tanh()), "3 was added"),
    "another layer": (lambda model: model.__setitem__(2, nn.Linear(17, 1)), "2 was replaced"),
    "without a bias": (lambda model: model[0].__delattr__("bias"), "0.bias was removed"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", SURGERY)
def test_modules_keep_their_parts(kind: str) -> None:
    change, message = SURGERY[kind]
    model, _ = CASE.build()
    before, children = list(model.state_dict().items()), list(model.modules())
    match = f"nothing was written back: {message}, but .* before the first call"
    with pytest.raises(spmd.SpmdError, match=match), spmd.unshard(model):
        change(model)
    now = list(model.state_dict().items())
    assert [name for name, _ in now] == [name for name, _ in before]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(now, before, strict=True))
    assert list(model.modules()) == children and type(model[0]) is nn.Linear


@pytest.mark.usefixtures("alone")
def test_a_place_for_a_child_that_is_empty_may_go() -> None:
    model, _ = CASE.build()
    model[0].register_module("later", None)
    with spmd.unshard(model):
        del model[0].later


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_may_enter_its_mode_first(mode: Callable[[], Any]) -> None:
    model, optimizer = CASE.build()
    step = spmd.compile(CASE.step, parallel_mode=spmd.DataParallel("fully_shard"))
    step(model, optimizer, *CASE.part(0, 0))
    with mode(), spmd.unshard(model):
        model.get_parameter(next(iter(dict(model.named_parameters())))).mul_(2)
        assert not next(model.parameters()).is_inference()
    step(model, optimizer, *CASE.part(0, 1))
