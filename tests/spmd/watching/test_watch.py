"""``step.watch``: statistics of whole values in any mode, those that hooks of the plain step find."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks

CALLS = 4


@dataclass(frozen=True)
class Watched(MLP):
    """Clipped gradients, of which some are 0, cleared first."""

    sizes: tuple[int, ...] = (3, 5, 2)
    rows: int = 8
    optimizer: str = "Adam"

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        x, y = (torch.randn(self.rows, size, generator=random, dtype=torch.float64) for size in (3, 2))
        x[:, 0] = 0
        return x, y

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()


def expected(world: int) -> list[dict[str, Any]]:
    """For each call of the plain step what its hooks see."""
    case, found = Watched(), list[dict[str, Any]]()
    torch.manual_seed(0)
    model, optimizer = case.build()
    named = dict(model.named_parameters())
    outputs: list[Tensor] = []
    model[0].register_forward_hook(lambda _, given, out: outputs.append(out.detach()))
    before: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: before.update({n: p.detach().clone() for n, p in named.items()}))
    for call in range(CALLS):
        case.step(model, optimizer, *case.whole([case.part(rank, call) for rank in range(world)]))
        updates = {name: p.detach() - before[name] for name, p in named.items()}
        found.append(
            {
                "grad": {f"model.{n}.grad": _statistics(p.grad) for n, p in named.items() if p.grad is not None},
                "update": {"all": {"norm": torch.stack([u.norm() for u in updates.values()]).norm().item()}},
                "parameter": {"model.2.weight": {"max": named["2.weight"].abs().max().item()}},
                "state": {"model.0.bias.exp_avg": {"norm": optimizer.state[named["0.bias"]]["exp_avg"].norm().item()}},
                "output": {"model.0.output": {"norm": outputs[-1].norm().item()}},
            }
        )
    return found


def _statistics(x: Tensor) -> dict[str, float]:
    return {"norm": x.norm().item(), "max": x.abs().max().item(), "zeros": int((x == 0).sum()), "nan": 0}


def differences(rank: int, world: int, mode: dict[str, Any], shares: bool) -> list[str]:
    """A line for each statistic that is not that of the plain step. ``shares``: whether each rank has its own rows."""
    case = Watched()
    torch.manual_seed(0)
    model, optimizer = case.build()
    if mode.get("axes"):
        mode = {**mode, "mesh": torch.distributed.init_device_mesh("cpu", (world,), mesh_dim_names=("x",))}
    step = spmd.compile(parallel_mode=spmd.DataParallel(**mode))(case.step)
    watches = {
        "grad": step.watch("*.grad", "norm", "max", "zeros", "nan"),
        "update": step.watch("*.update", as_one=True),
        "parameter": step.watch("2.weight", "max"),
        "state": step.watch("0.bias.exp_avg"),
    }
    if "micro_batches" not in mode:
        watches["output"] = step.watch("model.0.output")
    lines = []
    for call, want in enumerate(expected(world)):
        parts = [case.part(other, call) for other in range(world)]
        step(model, optimizer, *(parts[rank] if shares else case.whole(parts)))
        for kind, watch in watches.items():
            try:
                torch.testing.assert_close(watch.values, want[kind], rtol=1e-9, atol=1e-10)
            except AssertionError as error:
                lines.append(f"rank {rank}, call {call}, {kind}: {error}")
    return lines


@pytest.mark.parametrize("mode, shares", [
    ({"parallel_style": "fully_shard"}, True),
    ({"shard_optimizer": True, "micro_batches": 2}, True),
    ({"axes": {"tensor": "x"}}, False),
    ({"axes": {"stages": "x"}, "micro_batches": 2}, False),
])  # fmt: skip
def test_statistics_are_those_of_the_whole_batch(ranks: Ranks, mode: dict[str, Any], shares: bool) -> None:
    assert not [line for lines in ranks.run(2, differences, mode, shares) for line in lines]


def built(**options: Any) -> tuple[Any, Any]:
    """A step, and what makes its calls."""
    case = Watched()
    torch.manual_seed(0)
    model, optimizer = case.build()
    step = spmd.compile(**options)(case.step)
    return step, lambda call: step(model, optimizer, *case.part(0, call))


@pytest.mark.usefixtures("alone")
def test_what_is_due_in_some_calls_is_handed_on_when_the_next_one_begins(tmp_path: Path) -> None:
    class Writer:
        def add_scalar(self, name: str, value: float, call: int) -> None:
            seen.append((name, call))

    step, call = built()
    seen: list[Any] = []
    step.watch("0.bias.grad", every=2, to=lambda number, values: seen.append((number, list(values))))
    step.watch("0.bias.grad", every=2, to=Writer())
    watch = step.watch("*", "nan", as_one=True, every=3, to=tmp_path / "lines.json")
    for number in range(5):
        call(number)
        assert len(seen) == 2 * ((number + 1) // 2)
    assert seen[:4:3] == [(1, ["model.0.bias.grad"]), ("model.0.bias.grad/norm", 3)]
    assert len(step.programs) == 4  # of both, none, the third call's and the others' alone
    assert step.recompiles().programs[1].reason == "other watched values: none"
    watch.stop()
    assert [json.loads(line) for line in (tmp_path / "lines.json").read_text().splitlines()] == [
        {"call": number, "values": {"all": {"nan": 0}}} for number in (1, 4)
    ]


@pytest.mark.usefixtures("alone")
def test_a_step_that_is_watched_computes_the_same_and_takes_one_program() -> None:
    plain, plain_call = built()
    watched, watched_call = built()
    watch = watched.watch("*.grad", "norm")
    for number in range(3):
        assert torch.equal(plain_call(number), watched_call(number))
    assert watch.call == 3 and len(watched.programs) == len(plain.programs) == 1
    watch.stop()
    watched_call(3)
    assert watch.call == 3 and len(watched.programs) == 2


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("pattern, words", [
    ("0.weihgt.grad", r"none of the 4 parameters .* such as model\.0\.weight"),
    ("layers.*.output", r"none of the 4 modules of the step"),
    ("0.wight.exp_avg", r"none of the 4 parameters"),
])  # fmt: skip
def test_a_name_that_fits_nothing_is_an_error_of_the_next_call(pattern: str, words: str) -> None:
    step, call = built()
    call(0)
    watch = step.watch(pattern)
    with pytest.raises(spmd.CaptureError, match=rf'watch\("{pattern}"\) fits {words}'):
        call(1)
    watch.stop()
    call(1)
    watch = step.watch("0.weight.exp_average")
    with pytest.raises(spmd.CaptureError, match="keep no tensors under 'exp_average', but step, exp_avg, exp_avg_sq"):
        call(2)


@pytest.mark.usefixtures("alone")
def test_what_is_handed_to_may_raise_once_and_gets_no_more() -> None:
    step, call = built()
    seen: list[int] = []

    def to(number: int, values: Any) -> None:
        seen.append(number)
        raise OSError("disk full")

    watch = step.watch("*.grad", to=to)
    call(0)
    with pytest.warns(UserWarning, match=r"watch\('\*\.grad'\) hands on no more values, .* OSError: disk full"):
        call(1)
    call(2)
    assert seen == [1] and watch.values and watch.call == 3


@pytest.mark.usefixtures("alone")
def test_an_update_that_a_scaler_takes_back_is_none() -> None:
    @spmd.compile
    def step(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 0))
    optimizer = torch.optim.Adam(model[0].parameters())
    scaler = torch.amp.GradScaler("cpu")
    model[1] = nn.Identity()
    update, state = step.watch("*.update"), step.watch("*.exp_avg", "max")
    step(model, optimizer, scaler, torch.ones(4, 3))
    kept = dict(state.values)
    assert update.values["model.0.weight.update"]["norm"] > 0
    step(model, optimizer, scaler, torch.full((4, 3), torch.nan))
    assert {values["norm"] for values in update.values.values()} == {0.0} and state.values == kept


@pytest.mark.parametrize("given, error", [
    (("*.grad", "median"), "expected statistics among norm, max, zeros, nan, overflow, got 'median'"),
    (("*.grad", ["norm"]), r"expected statistics among norm, max, zeros, nan, overflow, got \['norm'\]"),
    ((3,), 'expected the names to watch as text, such as "\\*.grad", got 3'),
])  # fmt: skip
def test_arguments_are_checked_at_once(given: Any, error: str) -> None:
    step, _ = built()
    with pytest.raises((TypeError, ValueError), match=error):
        step.watch(*given)
    for options in ({"every": 0}, {"as_one": 1}, {"to": 3}):
        with pytest.raises((TypeError, ValueError), match="expected"):
            step.watch("*.grad", **options)


@pytest.mark.usefixtures("alone")
def test_a_later_process_finds_the_programs_that_look(tmp_path: Path) -> None:
    first, call = built(cache=str(tmp_path))
    watch = first.watch("*.grad", "norm", "max")
    call(0)
    second, call_again = built(cache=str(tmp_path))
    again = second.watch("*.grad", "norm", "max")
    call_again(0)
    assert again.values == watch.values and len(watch.values) == 4
    assert "capture" not in second.report().seconds


@pytest.mark.usefixtures("alone")
def test_programs_that_look_are_verified_and_certified() -> None:
    case = Watched()
    model, optimizer = case.build()
    step = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(case.step)
    alone = spmd.certify(step, model, optimizer, *case.part(0, 0), world=2)
    step.watch("*.grad", "norm", "max", "zeros")
    looking = spmd.certify(step, model, optimizer, *case.part(0, 0), world=2)
    assert alone and looking and looking.outputs == alone.outputs + 3  # a row of each
    assert spmd.verify(step, model, optimizer, *case.part(0, 0), world=2)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("error::UserWarning")
def test_no_rank_misses_a_call_where_warnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    step, call = built()
    step.watch("*.grad", to=lambda number, values: {}["missing"])
    for number in range(3):
        call(number)
    assert "hands on no more values, since to= raised KeyError" in capsys.readouterr().err
