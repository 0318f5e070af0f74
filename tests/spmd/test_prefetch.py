"""Gathers that a call starts for the next one: used as long as they are of state as it is, on all ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.messages import messages
from tests.harness.oracle import Snapshot, all_unequal, plain_run, snapshot
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 7, 7, 5), rows=6, optimizer="SGD momentum")
ROOT = Path(__file__).parents[2]


class Training:
    """A compiled step on one rank; ``prefetched``: of each call, whether it used what the call before had started."""

    def __init__(self, rank: int, case: MLP = CASE, **mode: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.case, self.prefetched = rank, case, list[bool]()
        self.objects = case.build()
        self.step = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard", **mode))(case.step)

    def call(self, times: int = 1) -> Any:
        for _ in range(times):
            result = self.step(*self.objects, *self.case.part(self.rank, len(self.prefetched)))
            self.prefetched.append(self.step.program.name.endswith("-steady"))
        return result

    @property
    def model(self) -> Any:
        return self.objects[0]

    def unequal(self, world: int, result: Any) -> list[str]:
        """What differs from the plain step after as many calls."""
        expected = plain_run(self.case, world, len(self.prefetched))[-1:]
        return all_unequal(expected, [snapshot(result, self.objects)], self.rank, world)

    def state(self) -> Snapshot:
        return {name: p.to_local().detach().clone() for name, p in self.model.named_parameters()}


def trained(rank: int, world: int, case: MLP, mode: dict[str, Any]) -> tuple[list[str], bool, list[bool]]:
    """What differs from the plain step, whether bits are those of gathers in the call, and which were prefetched."""
    with messages(rank):
        training, other = Training(rank, case, **mode), Training(rank, case, **mode, prefetch=(0, 1))
        result, _ = training.call(5), other.call(5)
        assert not any(other.prefetched)
        equal = all(torch.equal(value, other.state()[name]) for name, value in training.state().items())
        return training.unequal(world, result), equal, training.prefetched


@pytest.mark.parametrize(
    "world, optimizer, mode",
    [(2, "SGD", {}), (3, "AdamW", {}), (2, "AdamW", {"reshard_after_forward": False, "limit_gathers": 1})],
)
def test_the_numbers_are_those_of_the_plain_step(
    ranks: Ranks, world: int, optimizer: str, mode: dict[str, Any]
) -> None:
    case = MLP(sizes=(15, 7, 7, 5), rows=6, optimizer=optimizer)
    assert ranks.run(world, trained, case, mode) == [([], True, [False, True, True, True, True])] * world


def _write(parameter: Tensor, write: Callable[[Tensor], Any]) -> None:
    with torch.no_grad():
        write(parameter.to_local())  # type: ignore[attr-defined]


def _load(training: Training) -> None:
    training.model.load_state_dict({k: v.clone() for k, v in training.model.state_dict().items()})


CHANGES: dict[str, tuple[bool, Callable[[Training], Any]]] = {
    "nothing": (True, lambda t: None),
    "the same values are loaded": (True, _load),
    "in place": (False, lambda t: _write(t.model[0].weight, lambda x: x.mul_(0.5))),
    "through data": (False, lambda t: _write(t.model[0].weight.data, lambda x: x.data.mul_(0.5))),
    "through numpy": (False, lambda t: _write(t.model[0].weight, lambda x: x.numpy().__imul__(0.5))),
    "by one rank": (False, lambda t: _write(t.model[0].bias, lambda x: x.add_(1 if t.rank else 0))),
    "what is not prefetched": (True, lambda t: _write(t.model[4].weight, lambda x: x.mul_(0.5))),
}


def changed(rank: int, world: int) -> list[str]:
    """State is written to between calls. How it differs from a step that gathers in the call; which call prefetched."""
    found = []
    with messages(rank):
        training, other = (Training(rank, units=nn.Linear, prefetch=(ahead, 1)) for ahead in (1, 0))
        for name, (is_prefetched, change) in CHANGES.items():
            for each in (training, other):
                each.call(2)
                change(each)
                each.call()
            same = all(torch.equal(value, other.state()[key]) for key, value in training.state().items())
            found += [] if same else [f"{name}: other numbers"]
            found += [] if training.prefetched[-1] is is_prefetched else [f"{name}: {training.prefetched}"]
    return found


def test_a_change_of_state_is_seen_however_it_is_made(ranks: Ranks) -> None:
    assert ranks.run(2, changed) == [[]] * 2


def measured(rank: int, world: int, folder: str) -> tuple[list[str], list[bool]]:
    """Calls are profiled and recorded, which takes the whole program."""
    with messages(rank):
        training = Training(rank)
        training.call(2)
        training.step.profile(1)
        training.call(2)
        training.step.record(folder)
        training.call()
        training.step.record(None)
        result = training.call()
        return training.unequal(world, result), training.prefetched


def test_what_looks_at_the_program_runs_it_whole(ranks: Ranks, tmp_path: Path) -> None:
    expected = ([], [False, True, False, True, False, True])
    assert ranks.run(2, measured, str(tmp_path / "record")) == [expected] * 2


@dataclass(frozen=True)
class Lengths(MLP):
    """Every other batch is longer."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = super().part(rank, step)
        return (x, y) if step % 2 else (x.repeat(2, 1), y.repeat(2, 1))


def test_programs_of_other_sizes_use_what_each_other_started(ranks: Ranks) -> None:
    case = Lengths(sizes=(15, 7, 5), rows=3)
    assert ranks.run(2, trained, case, {}) == [([], True, [False, False, True, True, True])] * 2


def always_changed(rank: int, world: int) -> tuple[list[bool], int]:
    """State changes between all calls. Which were ahead, and what is in flight at the end."""
    with messages(rank):
        training = Training(rank)
        for _ in range(10):
            training.call()
            _write(training.model[0].weight, lambda x: x.mul_(0.5))
        (flight,) = training.step._in_flight.values()
        return training.prefetched, len(flight.values)


def test_what_is_always_in_vain_ends(ranks: Ranks) -> None:
    assert ranks.run(2, always_changed) == [([False] * 10, 0)] * 2


def fails(rank: int, world: int) -> tuple[str, int, list[str]]:
    """Rank 1 fails in its third call; all go on from state as it was before."""
    with messages(rank):
        training = Training(rank)
        training.call(2)
        (compiled,) = training.step._dispatch.programs
        assert compiled.prefetched is not None
        steady = compiled.prefetched._steady
        function = steady.function
        if rank == 1:
            steady.function = _raises
        with pytest.raises((spmd.RankFailedError, MemoryError)) as caught:
            training.step(*training.objects, *CASE.part(rank, 2))
        steady.function = function
        left = len(compiled.prefetched.in_flight.values)
        result = training.call(2)
        return type(caught.value).__name__, left, training.unequal(world, result)


def _raises(*_: Any) -> None:
    raise MemoryError("no memory")


def test_a_call_that_fails_leaves_nothing_in_flight(ranks: Ranks) -> None:
    assert ranks.run(2, fails) == [("RankFailedError", 0, []), ("MemoryError", 0, [])]


@dataclass(frozen=True)
class Twice(MLP):
    """Two updates in one step: what is prefetched is what the second one leaves."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss


def test_two_updates_in_a_step(ranks: Ranks) -> None:
    case = Twice(sizes=(15, 7, 5), rows=3)
    assert ranks.run(2, trained, case, {}) == [([], True, [False, True, True, True, True])] * 2


def with_another_step(rank: int, world: int) -> list[str]:
    """Another step of the same model leaves its update to the next call of either. What differs from one that waits."""
    with messages(rank):
        training, other = Training(rank), Training(rank, prefetch=(0, 1))
        for each in (training, other):
            mode = spmd.DataParallel("fully_shard", defer_updates=True)
            deferring = spmd.compile(parallel_mode=mode)(each.case.step)
            for k, which in enumerate("aaddadadda"):
                (each.step if which == "a" else deferring)(*each.objects, *CASE.part(rank, k))
            deferring.flush()
        return [name for name, value in training.state().items() if not torch.equal(value, other.state()[name])]


def test_an_update_that_another_step_deferred_comes_first(ranks: Ranks) -> None:
    assert ranks.run(2, with_another_step) == [[]] * 2


def of_two_shapes(rank: int, world: int) -> list[float]:
    """Two models in turn, whose weights have other shapes and equal bytes."""

    def square(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = (model(x) + 1).pow(2).mean()
        loss.backward()
        optimizer.zero_grad()
        return loss

    with messages(rank):
        step = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(square)
        models = [nn.Linear(i, o, bias=False).double() for i, o in ((8, 4), (4, 8))]
        for model in models:
            nn.init.zeros_(model.weight)
        calls = [(m, torch.optim.SGD(m.parameters()), torch.ones(2, m.in_features).double()) for m in models]
        return [float(step(*call)) for _ in range(3) for call in calls]


def test_equal_bytes_of_another_shape_are_not_used(ranks: Ranks) -> None:
    assert ranks.run(2, of_two_shapes) == [[1.0] * 6] * 2


@pytest.mark.processes
@pytest.mark.parametrize("end", ["at once", "without the process group"])
def test_a_process_may_end_with_prefetched_gathers(tmp_path: Path, end: str) -> None:
    commands = [[sys.executable, "-m", "tests.spmd.ends_while_pending", str(rank), str(tmp_path)] for rank in range(2)]
    started = [subprocess.Popen([*command, end], cwd=ROOT, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert not any("error" in text.lower() or "unwaited" in text for text in errors), errors
