"""State of optimizers in lists, tuples and nested dicts, and under a text: factors of Shampoo, the last gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import ON_THREE, THREE_IN_TURN, in_turn
from tests.harness.oracle import Case, assert_agrees, random_generator, snapshot, unequal
from tests.harness.pool import Ranks

FLOAT = torch.float64


class Factors(torch.optim.Optimizer):
    """As SOAP: a list of factors, empty for a dim that is long, whose rotations are made anew, and moments in pairs."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["GG"] = [[] if n > 4 else torch.eye(n, dtype=p.dtype) for n in p.shape]
                    state["Q"], state["beta"] = None, 0.9
                    state["moments"] = (torch.zeros_like(p), {"square": torch.zeros_like(p), "rank": p.ndim})
                for k, factor in enumerate(state["GG"]):
                    if len(factor):
                        others = [d for d in range(p.ndim) if d != k]
                        factor.lerp_(torch.tensordot(p.grad, p.grad, [others] * 2), 0.1)
                state["Q"] = [f if not len(f) else f @ f / f.norm() for f in state["GG"]]
                first, second = state["moments"]
                first.mul_(state["beta"]).add_(p.grad)
                second["square"].mul_(0.9).addcmul_(p.grad, p.grad)
                change = first / (second["square"].sqrt() + 1e-2)
                for factor in state["Q"]:
                    change = torch.tensordot(change, factor, [[0], [0]]) if len(factor) else change.movedim(0, -1)
                p.add_(change, alpha=-group["lr"])


class Hypergradient(torch.optim.Optimizer):
    """The rate follows from the last gradient of all parameters, which is of none."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        now = torch.cat([p.grad.view(-1) for p in group["params"]])
        if not self.state:
            self.state["last"], self.state["sums"] = torch.zeros_like(now), [torch.zeros((), dtype=FLOAT), "text"]
            self.state["global"] = {"square": torch.zeros_like(now), "steps": 0}
        group["lr"] += 0.01 * torch.dot(now, self.state["last"]).item()
        self.state["last"].copy_(now)
        self.state["sums"][0].add_(now.sum())
        self.state["global"]["square"].add_(now.square())
        self.state["global"]["steps"] += 1
        for p in group["params"]:
            p.add_(p.grad, alpha=-group["lr"])


@dataclass(frozen=True)
class Fits(Case):
    """Regression by two layers of dims that do not divide evenly."""

    optimizer: type[torch.optim.Optimizer] = Factors
    rate: float = 0.02

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        return model, self.optimizer(model.parameters(), lr=self.rate)  # type: ignore[call-arg]

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return tuple(torch.randn(4, size, generator=random, dtype=FLOAT) for size in (5, 3))

    @staticmethod
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


OTHERS = [(optimizer, *each) for optimizer in (Factors, Hypergradient) for each in (ON_THREE, *THREE_IN_TURN[1:])]
OTHERS.remove(CASE := (Hypergradient, "replicate", 2))  # split state is compared after checkpoints, too


@pytest.mark.parametrize(
    "optimizer, style, world", [CASE, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in OTHERS)]
)
def test_state_in_containers_and_under_a_text_is_state(
    ranks: Ranks, optimizer: type[torch.optim.Optimizer], style: str, world: int
) -> None:
    assert_agrees(ranks, world, Fits(optimizer), style, steps=4)


def continued(rank: int, world: int, case: Fits, folder: Path, styles: tuple[str, str]) -> list[str]:
    """What differs after two steps in one style, a checkpoint, and two in another; and after a whole state dict."""
    before, after = (spmd.compile(case.step, parallel_mode=_mode(style)) for style in styles)
    torch.manual_seed(0)
    objects = case.build()
    for k in range(2):
        before(*objects, *case.part(rank, k))
    spmd.save(folder, model=objects[0], optimizer=objects[1])
    states = spmd.state_dict(*objects)
    loaded, plain = case.build(), case.build()
    for model, optimizer in (loaded, objects):
        spmd.load(folder, model=model, optimizer=optimizer)
    for each, state in zip(plain, states, strict=True):
        each.load_state_dict(state)
    ends = []
    for step, given in ((after, loaded), (before, objects), (case.step, plain)):
        for k in (2, 3):
            is_plain = step is case.step
            batch = case.whole([case.part(r, k) for r in range(world)]) if is_plain else case.part(rank, k)
            result = step(*given, *batch)
        ends.append(snapshot(result, given))
    torch.manual_seed(0)
    expected = case.build()
    for k in range(4):
        result = case.step(*expected, *case.whole([case.part(r, k) for r in range(world)]))
    return [line for end in ends for line in unequal(snapshot(result, expected), end, rank, world)]


def _mode(style: str) -> spmd.DataParallel:
    return spmd.DataParallel(shard_optimizer=True) if style == "shard_optimizer" else spmd.DataParallel(style)


@pytest.mark.parametrize("optimizer", [Factors, Hypergradient])
def test_checkpoints_hold_state_in_containers_for_any_style(
    ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest, optimizer: type[torch.optim.Optimizer]
) -> None:
    all_styles = [("fully_shard", "shard_optimizer"), ("shard_optimizer", "fully_shard")]
    number = [Factors, Hypergradient].index(optimizer)
    for k, styles in enumerate(in_turn(request, number, all_styles, ())):  # type: ignore[arg-type]
        assert not any(ranks.run(2, continued, Fits(optimizer), tmp_path / f"{k}", styles))


class Scaled(Factors):
    """Reads a number that stands in a list beside a tensor."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            pair = self.state[p].setdefault("pair", [torch.zeros_like(p), 0.5])
            pair[0].add_(p.grad)
            p.sub_(pair[0], alpha=pair[1])


@pytest.mark.usefixtures("alone")
def test_a_number_in_a_container_is_guarded() -> None:
    case, ends = Fits(Scaled), []
    for step in (case.step, compiled := spmd.compile(case.step)):
        torch.manual_seed(0)
        model, optimizer = case.build()
        for k in range(4):
            if k == 3:
                for entries in optimizer.state.values():
                    entries["pair"][1] = 0.1
            step(model, optimizer, *case.part(0, k))
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(ends[1], ends[0])
    assert len(compiled.programs) == 3  # the first call makes the state


@pytest.mark.usefixtures("alone")
def test_a_first_step_that_a_scaler_skips_makes_no_state() -> None:
    def step(model: Any, optimizer: Any, scaler: torch.amp.GradScaler, x: Tensor, y: Tensor) -> None:
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    case, ends = Fits(), []
    for each in (step, spmd.compile(step)):
        torch.manual_seed(0)
        objects = *case.build(), torch.amp.GradScaler("cpu", init_scale=8.0)
        for k in range(3):
            x, y = case.part(0, k)
            each(*objects, x if k else x * torch.inf, y)
            ends.append(snapshot(None, objects))
    assert not any(unequal(want, got, 0, 1) for want, got in zip(ends[:3], ends[3:], strict=True))


class Grows(Factors):
    """The list gets longer at each step."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("history", []).append(p.grad.clone())


class Counts(Factors):
    """A number in a list changes beside a tensor."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            pair = self.state[p].setdefault("pair", [torch.zeros_like(p), 0])
            pair[0].add_(p.grad)
            pair[1] += 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("optimizer", [Grows, Counts])
def test_containers_that_change_besides_their_tensors_are_refused(optimizer: type[torch.optim.Optimizer]) -> None:
    case = Fits(optimizer)
    objects, step = case.build(), spmd.compile(case.step)
    with pytest.raises(spmd.CaptureError, match=r"besides the values of its tensors: .* under a key of its own"):
        for k in range(3):
            step(*objects, *case.part(0, k))
