"""``spmd.no_sync``: gradients that stay pending sums from call to call, and are reduced once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.fake import fake_world
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks
from tests.harness.structure import counts, regression

PENDING = Partial("sum")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, last: bool) -> Tensor:
    with nullcontext() if last else spmd.no_sync(model):
        loss = F.mse_loss(model(x), y)
        loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def accumulate(model: nn.Module, x: Tensor, y: Tensor, last: bool) -> Tensor:
    with nullcontext() if last else spmd.no_sync(model):
        loss = F.mse_loss(model(x), y) / 3
        loss.backward()
    return loss


class Window(MLP):
    """Three calls a window; the last one clips, updates and clears. Odd sizes."""

    sizes = (15, 17, 4)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return *super().part(rank, step), step % 3 == 2

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, last: bool) -> Tensor:
        loss = accumulate(model, x, y, last)
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return loss


class ClearedFirst(Window):
    """Gradients are cleared when the next window begins, so that reduced ones outlive the update, too."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return *super().part(rank, step), step % 3 == 0

    @staticmethod
    def step(  # type: ignore[override]
        model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, last: bool, first: bool
    ) -> Tensor:
        if first:
            optimizer.zero_grad()
        loss = accumulate(model, x, y, last)
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return loss


class ToZero(Window):
    """Gradients are set to zero instead of None, the first layer alone is left pending, and all are read meanwhile."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, last: bool) -> list[Tensor]:
        with nullcontext() if last else spmd.no_sync(model[0]):  # type: ignore[index]
            loss = F.mse_loss(model(x), y) / 3
            loss.backward()
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [loss, *norms]


NUMBERS = [
    (Window(optimizer="SGD"), 2, {"parallel_style": "replicate"}),
    (Window(optimizer="SGD momentum"), 2, {"parallel_style": "fully_shard"}),
    pytest.param(Window(optimizer="AdamW"), 3, {"parallel_style": "fully_shard"}, marks=pytest.mark.exhaustive),
    (Window(optimizer="AdamW"), 2, {"parallel_style": "replicate", "shard_optimizer": True}),
    (ClearedFirst(optimizer="SGD momentum"), 2, {"parallel_style": "fully_shard", "reduce_gradients": "each"}),
    pytest.param(ClearedFirst(optimizer="SGD"), 2, {"parallel_style": "replicate"}, marks=pytest.mark.exhaustive),
    pytest.param(ToZero(optimizer="SGD"), 2, {"parallel_style": "fully_shard"}, marks=pytest.mark.exhaustive),
    (ToZero(optimizer="SGD"), 2, {"parallel_style": "replicate"}),
]


@pytest.mark.parametrize(
    "case, world, options", NUMBERS, ids=lambda x: type(x).__name__ if isinstance(x, MLP) else None
)
def test_pending_gradients_are_those_of_the_plain_step(
    ranks: Ranks, case: MLP, world: int, options: dict[str, Any]
) -> None:
    """After every call ``.grad`` has the value that the plain step's has; the comparison reduces it."""
    assert_agrees(ranks, world, case, options, steps=7)


def run(
    calls: int, mode: spmd.DataParallel, step: Any = train_step, every: int = 3
) -> tuple[Any, nn.Module, list[Any]]:
    """The compiled step, the model, and the collectives of each call; each ``every``-th is the last of a window."""
    model, optimizer, x, y = regression(8, 16, 4, rows=4)
    compiled = spmd.compile(step, parallel_mode=mode, passes=())
    seen = []
    for k in range(calls):
        compiled(model, optimizer, x, y, k % every == every - 1)
        seen.append(counts(compiled))
    return compiled, model, seen


LOSS = {"all_reduce": 1}


@pytest.mark.parametrize(
    "style, forward, last",
    [
        ("replicate", {}, {"all_reduce": 4}),
        ("fully_shard", {"all_gather": 4}, {"all_gather": 4, "reduce_scatter": 4}),
    ],
)
def test_only_the_last_call_of_a_window_reduces_gradients(style: Any, forward: Any, last: Any) -> None:
    with fake_world(4):
        compiled, model, seen = run(8, spmd.DataParallel(style, reshard_after_forward=None))
    first = forward | LOSS
    final = last | {"all_reduce": last.get("all_reduce", 0) + 1}
    assert seen == [first, first, final, first, first, final, first, first]
    assert len(compiled.programs) == 3, "without and with gradients, and the last one"
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == (PENDING,)
        assert parameter.grad.to_local().shape == parameter.shape


def test_a_gradient_is_pending_over_the_axes_of_the_batch_alone() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        split = {"0.weight": {"tp": Shard(0)}, "0.bias": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
        mode = spmd.DataParallel("fully_shard", mesh=mesh, params={f"*{name}": p for name, p in split.items()})
        _, model, _ = run(2, mode)
    placements = {name: parameter.grad.placements for name, parameter in model.named_parameters()}
    assert placements["0.weight"] == placements["0.bias"] == (PENDING, PENDING, Shard(0))
    assert placements["2.weight"] == (PENDING, PENDING, Shard(1))
    assert placements["2.bias"][:2] == (PENDING, PENDING)


def updates_inside(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, last: bool) -> Tensor:
    with spmd.no_sync():
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss


def last_backward_outside(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, last: bool
) -> Tensor:
    with spmd.no_sync():
        F.mse_loss(model(x), y).backward()
    loss = F.l1_loss(model(x), y)
    loss.backward()
    return loss


@pytest.mark.parametrize("step", [updates_inside, last_backward_outside])
def test_what_the_step_updates_or_adds_to_outside_is_reduced_once(step: Any) -> None:
    with fake_world(4):
        _, model, seen = run(1, spmd.DataParallel("replicate"), step)
    assert seen == [{"all_reduce": 4 + 1}]
    assert all(type(parameter.grad) is Tensor for parameter in model.parameters())


def test_a_gradient_that_is_whole_already_stays_so() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, pending: bool) -> Tensor:
        with spmd.no_sync() if pending else nullcontext():
            loss = F.mse_loss(model(x), y)
            loss.backward()
        return loss

    with fake_world(4):
        _, model, seen = run(2, spmd.DataParallel("replicate"), step, every=2)
    assert seen == [{"all_reduce": 4 + 1}] * 2
    assert all(type(parameter.grad) is Tensor for parameter in model.parameters())


def test_a_sum_that_was_reduced_between_calls_compiles_anew(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two DTensors of one shape: only their placements tell them apart."""
    monkeypatch.delenv("SPMD_QUIET")
    model, optimizer, x, y = regression(8, 16, 4, rows=4)
    compiled = spmd.compile(train_step, parallel_mode=spmd.DataParallel("fully_shard"), passes=())
    with fake_world(4):
        for _ in range(2):
            compiled(model, optimizer, x, y, False)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        compiled(model, optimizer, x, y, False)
    assert len(compiled.programs) == 3
    assert all(parameter.grad.placements == (Shard(0),) for parameter in model.parameters())
    title = "0.weight.grad: float64[16, 8] on cpu, strides (8, 1), placed as (Partial(sum),) -> "
    assert title in capfd.readouterr().err


def test_whole_gradients_and_pending_ones_have_programs_of_their_own() -> None:
    model, optimizer, x, y = regression(8, 16, 4, rows=4)
    compiled = spmd.compile(train_step, passes=())
    with fake_world(4):
        for _ in range(2):
            compiled(model, optimizer, x, y, False)
        pending = [parameter.grad for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        compiled(model, optimizer, x, y, False)
        assert len(compiled.programs) == 3 and compiled.program is compiled.programs[2]
        assert all(type(parameter.grad) is Tensor for parameter in model.parameters())
        for parameter, gradient in zip(model.parameters(), pending, strict=True):
            parameter.grad = gradient
        compiled(model, optimizer, x, y, False)
    assert len(compiled.programs) == 3 and compiled.program is compiled.programs[1]


def test_it_does_nothing_in_a_plain_step_and_refuses_what_is_no_module() -> None:
    model, optimizer, x, y = regression(8, 16, 4)
    train_step(model, optimizer, x, y, False)
    assert all(type(parameter.grad) is Tensor for parameter in model.parameters())
    with pytest.raises(TypeError, match=r"expected spmd\.no_sync to be given modules, got \[\]"), spmd.no_sync([]):  # type: ignore[arg-type]
        pass


def test_a_call_inside_of_it_is_refused_and_changes_nothing(alone: None) -> None:
    model, optimizer, x, y = regression(8, 16, 4, rows=4)
    before = [parameter.clone() for parameter in model.parameters()]
    with fake_world(2):
        compiled = spmd.compile(train_step)
        with spmd.no_sync(), pytest.raises(spmd.SpmdError, match=r"train_step was called inside of spmd\.no_sync"):
            compiled(model, optimizer, x, y, True)
    assert all(map(torch.equal, before, model.parameters()))


def eager_meanwhile(rank: int, world: int, style: str) -> list[str]:
    """Pending gradients outside of compiled steps: whole in ``unshard``, and refused or exact in eager updates."""
    model, optimizer, *_ = regression(8, 16, 4, rows=8)
    torch.manual_seed(0)
    whole = regression(8, 16, 4, rows=8)
    loss = F.mse_loss(whole[0](whole[2]), whole[3])
    loss.backward()
    model.load_state_dict(whole[0].state_dict())
    compiled = spmd.compile(train_step, parallel_mode=spmd.DataParallel(style))
    part = slice(4 * rank, 4 * rank + 4)
    compiled(model, optimizer, whole[2][part], whole[3][part], False)
    problems = []
    with spmd.unshard(model, with_grads=True, writeback=False):
        for name, parameter in model.named_parameters():
            if not torch.allclose(parameter.grad, whole[0].get_parameter(name).grad, rtol=1e-12):
                problems.append(f"{name}.grad differs in unshard")
    optimizer.step()
    whole[1].step()
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.allclose(full, whole[0].get_parameter(name), rtol=1e-12):
            problems.append(f"{name} differs after an eager update")
    return problems


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_outside_of_compiled_steps_a_pending_gradient_is_read_right(ranks: Ranks, style: str) -> None:
    assert ranks.run(2, eager_meanwhile, style) == [[], []]


def on_one_rank_only(rank: int, world: int) -> str:
    def step(model: nn.Module, x: Tensor, y: Tensor, pending: bool) -> None:
        with spmd.no_sync() if pending else nullcontext():
            F.mse_loss(model(x), y).backward()

    model, _, x, y = regression(8, 4, rows=4)
    try:
        spmd.compile(step)(model, x, y, rank == 0)
    except spmd.RankMismatchError as error:
        return str(error)
    return "no error"


def test_all_ranks_must_leave_a_gradient_pending(ranks: Ranks) -> None:
    for found in ranks.run(2, on_one_rank_only):
        assert "pending" in found


@pytest.mark.slow
@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_it_is_verified_and_certified(alone: None, style: Any) -> None:
    def micro_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with spmd.no_sync():
            loss = F.mse_loss(model(x), y)
            loss.backward()
        return loss

    model, _, x, y = regression(8, 16, 4, rows=8)
    mode = spmd.DataParallel(style)
    verdict = spmd.verify(spmd.compile(micro_step, parallel_mode=mode), model, x, y, world=2, steps=3)
    assert verdict, str(verdict)
    certificate = spmd.certify(spmd.compile(micro_step, parallel_mode=mode), model, x, y, world=2)
    assert certificate, str(certificate)
