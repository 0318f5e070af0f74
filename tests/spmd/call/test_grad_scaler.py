"""``torch.amp.GradScaler``: an update is skipped where any rank's gradients overflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, in_turn
from tests.harness.fake import fake_world
from tests.harness.oracle import Case, assert_agrees
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Scaled(MLP):
    """In the steps of ``overflow`` one row of one rank alone is infinite."""

    sizes: tuple[int, ...] = (15, 7)
    rows: int = 5
    optimizer: str = "SGD momentum"
    enabled: bool = True
    overflow: tuple[int, ...] = (1, 3)

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=self.enabled)
        return model, optimizer, scaler

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = super().part(rank, step)
        if step in self.overflow and rank == 1:
            y[0] = torch.inf
        return x, y

    @staticmethod
    def step(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss


class Clipped(Scaled):
    """Gradients are brought back to their own scale to be clipped."""

    @staticmethod
    def step(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss, norm, scaler.get_scale()


class GradientsKept(Scaled):
    """Gradients are zeroed first, and there to be looked at afterwards."""

    @staticmethod
    def step(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss


class Accumulated(Scaled):
    """Every second call updates."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return *super().part(rank, step), step % 2 == 1

    @staticmethod
    def step(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor, update: bool) -> Tensor:
        loss = F.mse_loss(model(x), y) / 2
        scaler.scale(loss).backward()
        if update:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss


class OneOfTwo(Scaled):
    """Two optimizers with one scaler: only the one whose gradients overflow is skipped."""

    def build(self) -> tuple[Any, ...]:
        model, _, scaler = super().build()
        head = nn.Linear(self.sizes[0], 1).double()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1) for m in (model, head)]
        return model, optimizers, scaler, head

    @staticmethod
    def step(model: nn.Module, optimizers: Any, scaler: Any, head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        losses = F.mse_loss(model(x), y), head(x).square().mean()
        for loss in scaler.scale(losses):
            loss.backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        return losses[1]


CASES: list[Case] = [
    Scaled(optimizer="AdamW", overflow=(0, 1)),  # the first step is skipped: the optimizer has no state after it
    GradientsKept(),
    Scaled(optimizer="AdamW fused"),
    Scaled(enabled=False, overflow=()),
    *(Clipped(), Scaled(overflow=(0, 4)), Accumulated(overflow=(2,)), OneOfTwo(overflow=(0, 2))),
]


FOREACH = Scaled(optimizer="AdamW foreach")  # a form that a trace does not take
IN_TURN = *(("fully_shard", 2), ("replicate", 2)) * 2, ("fully_shard", 2), ("fully_shard", 3)
HELD = CASES[5]  # by the first case, and by the others with momentum


@pytest.mark.parametrize(
    "case",
    [*(c for c in CASES if c is not HELD), *(pytest.param(c, marks=pytest.mark.exhaustive) for c in (HELD, FOREACH))],
    ids=lambda case: f"{type(case).__name__} {case.optimizer} {case.overflow}",
)
def test_scaled_steps_agree_with_the_plain_step(ranks: Ranks, case: Case, request: pytest.FixtureRequest) -> None:
    for style, world in in_turn(request, [*CASES, FOREACH].index(case), IN_TURN):
        assert_agrees(ranks, world, case, style, steps=6)


def test_the_overflow_check_is_one_all_reduce_where_gradients_are_split() -> None:
    case = Scaled()
    found = {}
    for style in ("replicate", "fully_shard"):
        mode = spmd.DataParallel(style)
        compiled = compile_on_fake_ranks(4, case.step, case.build(), *case.part(0, 0), parallel_mode=mode, passes=())
        found[style] = counts(compiled)["all_reduce"]
    assert found == {"replicate": 2 + 1, "fully_shard": 1 + 1}  # gradients and the loss; what is found and the loss


def test_the_scaler_is_the_users_and_nothing_compiles_from_the_third_call_on() -> None:
    case = Scaled(overflow=())
    objects = case.build()
    scaler = objects[2]
    compiled = spmd.compile(case.step)
    with fake_world(2):
        for k in range(5):
            compiled(*objects, *case.part(0, k))
            if k == 2:
                scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 0})
    assert len(compiled.programs) == 2  # without optimizer state, and with
    assert scaler.state_dict()["scale"] == 16.0
    assert set(vars(scaler)) == set(vars(case.build()[2]))


def left_without_update(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor) -> None:
    scaler.scale(F.mse_loss(model(x), y)).backward()
    scaler.step(optimizer)


def with_a_scaler_of_its_own(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor) -> None:
    torch.amp.GradScaler("cpu").scale(F.mse_loss(model(x), y)).backward()


@pytest.mark.parametrize("step, message", [
    (left_without_update, r"does not update it.* Call scaler.update\(\) at the end of the step"),
    (with_a_scaler_of_its_own, r"a GradScaler that it was not given and that no name in its code leads to. Pass it"),
])  # fmt: skip
def test_a_scaler_without_update_or_made_in_the_step_is_refused(step: Any, message: str) -> None:
    case = Scaled()
    objects = case.build()
    with pytest.raises(spmd.CaptureError, match=message):
        compile_on_fake_ranks(2, step, objects, *case.part(0, 0))
    assert objects[2].get_scale() == 2.0**10
    compile_on_fake_ranks(2, case.step, objects, *case.part(0, 0))


def test_a_scaler_that_waits_for_its_update_is_refused() -> None:
    case = Scaled()
    model, optimizer, scaler = case.build()
    scaler.scale(model(case.part(0, 0)[0]).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(spmd.CaptureError, match="scaler has unscaled gradients and waits for its update"):
        compile_on_fake_ranks(2, case.step, (model, optimizer, scaler), *case.part(0, 0))
