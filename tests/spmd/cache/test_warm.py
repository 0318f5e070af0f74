"""A second process runs no trace, and computes what the first one did to the last bit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes import print_program
from spmd import capture_call, step_compiler
from spmd.cache import compile_cache, surroundings
from spmd.cache.described import digest_of
from tests.harness.cases import MLP
from tests.harness.oracle import Case, all_unequal, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks

from .trainer import TracedError, Trainer, batch
from .trainer import trainer as trainer

pytestmark = pytest.mark.slow


def run(trainer: Trainer, cache: Path | str, steps: int = 3, **options: Any) -> tuple[Any, list[bytes]]:
    """Train in a process that starts now; returns the step with all that it computed."""
    module = trainer.start()
    model, optimizer = module.build()
    step = spmd.compile(module.step, cache=cache, **options)
    seen = [step(model, optimizer, *batch(k)).detach().numpy().tobytes() for k in range(steps)]
    seen += [p.detach().numpy().tobytes() for p in model.parameters()]
    seen += [s["momentum_buffer"].numpy().tobytes() for s in optimizer.state.values()]
    return step, seen


@pytest.mark.usefixtures("alone")
def test_a_second_process_runs_no_trace_and_gives_the_same_bits(trainer: Trainer, tmp_path: Path) -> None:
    traces, cache = trainer.count_traces(), tmp_path / "cache"
    cold, expected = run(trainer, cache)
    assert len(traces) == 2  # the optimizer has no state in the first call
    traces.clear()
    warm, got = run(trainer, cache)
    assert not traces, warm.report().notes
    assert got == expected
    assert "cache" in warm.report().seconds and "capture" not in warm.report().seconds
    for one, other in zip(cold._dispatch.programs.all, warm._dispatch.programs.all, strict=True):
        assert list(map(print_program, one.graphs)) == list(map(print_program, other.graphs))
    assert str(cold.diff("update_in_place")) == str(warm.diff("update_in_place"))


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("error")  # a scheduler warns where it sees no step of its optimizer
def test_numbers_that_each_call_reads_may_be_others(trainer: Trainer, tmp_path: Path) -> None:
    def train(step: Any, module: Any) -> list[Tensor]:
        model, optimizer = module.build()
        optimizer.param_groups[0]["lr"] = 0.2
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for k in range(3):
            step(model, optimizer, *batch(k), smoothing=0.2 + k / 10)
            schedule.step()
        return list(model.parameters())

    cache, module = tmp_path / "cache", trainer.start()
    train(spmd.compile(module.step, cache=cache), module)
    module = trainer.start()
    with trainer.monkeypatch.context() as context:
        traces = trainer.count_traces()
        optimizer_step = spmd.compile(module.step, cache=cache)
        found = train(optimizer_step, module)
        assert not traces
        context.undo()
    for one, other in zip(found, train(module.step, module), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def run_sizes(trainer: Trainer, cache: Path | str, sizes: tuple[int, ...], **options: Any) -> list[Tensor]:
    """The losses of a process that starts now, whose batches have these numbers of rows."""
    module = trainer.start()
    model, optimizer = module.build()
    step = spmd.compile(module.step, cache=cache, **options)
    return [step(model, optimizer, *(each[:rows] for each in batch(k))).detach() for k, rows in enumerate(sizes)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("dynamic", "count"), [(None, 3), ({"x": {0: "rows"}, "y": {0: "rows"}}, 4)])
def test_sizes_that_one_trace_serves_start_warm(trainer: Trainer, tmp_path: Path, dynamic: Any, count: int) -> None:
    """The last size is one that no process has met: it is traced, and compared with programs of entries."""
    traces, cache, sizes = trainer.count_traces(), tmp_path / "cache", (6, 4, 5)
    cold = run_sizes(trainer, cache, sizes, dynamic=dynamic)
    assert len(traces) == count
    traces.clear()
    assert torch.equal(torch.stack(run_sizes(trainer, cache, sizes, dynamic=dynamic)), torch.stack(cold))
    run_sizes(trainer, cache, (6, 5, 4), dynamic=dynamic)
    assert not traces
    warm = run_sizes(trainer, cache, (*sizes, 2), dynamic=dynamic)
    assert traces
    with mock.patch.object(spmd, "compile", lambda step, **_: step):
        torch.testing.assert_close(warm, run_sizes(trainer, cache, (*sizes, 2)), rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("alone")
def test_a_trace_in_other_surroundings_is_kept_for_no_size(trainer: Trainer, tmp_path: Path) -> None:
    """The process goes on with it, but another one that begins in these surroundings would trace something else."""
    module = trainer.start()
    model, optimizer = module.build()
    step = spmd.compile(module.step, cache=tmp_path / "cache")
    for k, rows in enumerate((6, 4, 5)):
        if k == 2:
            trainer.monkeypatch.setenv("TORCH_SOMETHING", "1")
        step(model, optimizer, *(each[:rows] for each in batch(k)))
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert "torch's switches changed since" in "".join(step.report().notes)


@pytest.mark.usefixtures("alone")
def test_verify_compares_a_size_that_another_trace_served(trainer: Trainer, tmp_path: Path) -> None:
    """Its nodes have other names, and its state lies otherwise: the captured ops decide."""
    cache = tmp_path / "cache"
    run_sizes(trainer, cache, (6, 4, 6))
    run_sizes(trainer, f"verify:{cache}", (6, 6))
    assert len(list(cache.iterdir())) == 3
    trainer.monkeypatch.setattr("spmd.cache.compile_cache.captured_the_same", lambda one, other: False)
    with pytest.raises(spmd.SpmdError, match=r"in line \d+:\n    stored: "):
        run_sizes(trainer, f"verify:{cache}", (6, 6))


@pytest.mark.exhaustive  # the last size of test_sizes_that_one_trace_serves_start_warm is such a one
@pytest.mark.usefixtures("alone")
def test_a_size_that_changes_after_a_warm_start_is_compiled(trainer: Trainer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run(trainer, cache)
    results = []
    for compiles in (True, False):
        module = trainer.start()
        model, optimizer = module.build()
        step = spmd.compile(module.step, cache=cache) if compiles else module.step
        for rows in (6, 6, 4, 5, 6):
            x, y = batch(rows)
            results.append(step(model, optimizer, x[:rows], y[:rows]).detach())
    torch.testing.assert_close(results[:5], results[5:], rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("alone")
def test_guards_of_a_warm_step_see_what_changes(trainer: Trainer, tmp_path: Path) -> None:
    """In a list, an object, a constant tensor, its place, and a global of another module."""

    def changes(module: Any, model: Any) -> list[Any]:
        return [
            lambda: model.levels.append(0.5),
            lambda: setattr(model.config, "alpha", 0.9),
            lambda: model.mask.fill_(0.5),
            lambda: setattr(model, "mask", torch.full((8,), 0.25)),
            lambda: setattr(trainer.modules["cached_helper"], "SCALE", 0.1),
        ]

    run(trainer, tmp_path / "cache")
    results = []
    for compiles in (True, False):
        module = trainer.start()
        model, optimizer = module.build()
        step = spmd.compile(module.step, cache=tmp_path / "cache") if compiles else module.step
        for change in (lambda: None, lambda: None, *changes(module, model)):
            change()
            results.append(step(model, optimizer, *batch()).detach())
    torch.testing.assert_close(results[:7], results[7:], rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("alone")
def test_verify_compiles_and_compares(trainer: Trainer, tmp_path: Path) -> None:
    cache, traces = tmp_path / "cache", trainer.count_traces()
    run(trainer, cache)
    traces.clear()
    run(trainer, f"verify:{cache}")
    assert traces
    trainer.monkeypatch.setattr("spmd.cache.program_data.print_program", _changing(print_program))
    with pytest.raises(spmd.SpmdError, match=r"in line \d+:\n    stored: .*aten.*\n    now:    .*aten"):
        run(trainer, f"verify:{cache}")


def _changing(printed: Any) -> Any:
    """Prints every second program with another op."""
    count = iter(range(100))
    return lambda program: printed(program).replace("aten.addmm", "aten.mm") if next(count) % 2 else printed(program)


@pytest.mark.usefixtures("alone")
def test_what_was_imported_and_not_what_lies_on_disk_is_compared(trainer: Trainer, tmp_path: Path) -> None:
    """A file that is edited after it was imported, and before the first call."""
    from .trainer import MODEL

    cache, module = tmp_path / "cache", trainer.start()
    trainer.write(cached_model=MODEL.replace("self.second(x) * 2.0", "self.second(x) * 3.0"))
    model, optimizer = module.build()
    spmd.compile(module.step, cache=cache)(model, optimizer, *batch())
    module = trainer.start()
    model, optimizer = module.build()
    trainer.refuse_traces()
    with pytest.raises(TracedError):
        spmd.compile(module.step, cache=cache)(model, optimizer, *batch())


class Dropped(nn.Module):
    """A block with dropout, a norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.drop = nn.Linear(8, 12), nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.up(self.drop(self.norm(self.embed(tokens))))


@dataclass(frozen=True)
class Tokens(Case):
    """Classification of tokens, with random draws."""

    def build(self) -> tuple[Any, ...]:
        model = Dropped().double()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return (torch.randint(0, 11, (4, 5), generator=random_generator(rank, step)),)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        scores = model(tokens)
        loss = F.cross_entropy(scores.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, {"largest": scores.detach().amax()}


@pytest.fixture(scope="module")
def new_ranks() -> Iterator[Ranks]:
    """Ranks of these tests alone: what others leave in a process may make it another one to the cache."""
    pool = Ranks()
    yield pool
    pool.close()


def cold_and_warm(rank: int, world: int, case: Case, mode: dict[str, Any], folder: str, draws: bool) -> list[str]:
    """What differs between a cold run, a warm one and the plain step; or that the warm run traced."""

    lookups: list[Any] = []
    traced: list[str] = []

    def look_up(*args: Any) -> Any:
        lookups.append((compile_cache.look_up(*args), digest_of(surroundings.surroundings())))
        return lookups[-1][0]

    def note_trace(*args: Any) -> Any:
        """Say on this rank why it traces; the other ranks may have other reasons."""
        parts = [f"{each.key} {known} {[*each.found]} {each.why} {each.missed}" for each, known in lookups]
        traced.append(f"rank {rank} traced: {parts}")
        return original(*args)

    runs, original = [], capture_call.capture
    gc.collect()  # what earlier jobs of this process have left is no part of the calls that are compared
    for capture in (original, note_trace):
        with mock.patch.object(step_compiler, "look_up", look_up), mock.patch.object(capture_call, "capture", capture):
            spmd.seed(7)
            try:
                runs.append(compiled_run(rank, case, 5, cache=folder, parallel_mode=spmd.DataParallel(**mode))[1])
            finally:
                spmd.seed(None)
    found = traced + all_unequal(runs[0], runs[1], rank, world, 0, 0)
    return found if draws else [*found, *all_unequal(plain_run(case, world, 5), runs[1], rank, world)]


@dataclass(frozen=True)
class Shorter(MLP):
    """Batches of several numbers of rows, which one trace serves from the second on."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return tuple(each[: (4, 3, 2, 4, 3)[step]] for each in super().part(rank, step))


@pytest.mark.parametrize(
    ("case", "world", "mode"),
    [
        pytest.param(MLP(optimizer="AdamW"), 2, {"parallel_style": "fully_shard"}, marks=pytest.mark.exhaustive),
        (Shorter(optimizer="SGD momentum"), 2, {"shard_optimizer": True}),
        (MLP(optimizer="AdamW"), 2, {"parallel_style": "fully_shard", "micro_batches": 2}),
    ],
)
def test_ranks_start_warm(new_ranks: Ranks, tmp_path: Path, case: Case, world: int, mode: dict[str, Any]) -> None:
    assert [
        line for each in new_ranks.run(world, cold_and_warm, case, mode, str(tmp_path), False) for line in each
    ] == []


def test_random_ops_draw_what_they_drew(new_ranks: Ranks, tmp_path: Path) -> None:
    found = new_ranks.run(2, cold_and_warm, Tokens(), {}, str(tmp_path), True)
    assert [line for each in found for line in each] == []


def missing_on_one(rank: int, world: int, folder: str) -> tuple[int, list[str]]:
    """The traces of a rank in a run in which rank 1 has no entries."""
    traces, original = [], capture_call.capture
    compiled_run(rank, MLP(), 2, cache=folder)
    capture_call.capture = lambda *given: (traces.append(rank), original(*given))[1]
    try:
        _, got = compiled_run(rank, MLP(), 5, cache="off" if rank else folder)
    finally:
        capture_call.capture = original
    return len(traces), all_unequal(plain_run(MLP(), world, 5), got, rank, world)


def test_a_miss_on_one_rank_is_a_miss_on_all(ranks: Ranks, tmp_path: Path) -> None:
    (traces, _), (others, _) = found = ranks.run(2, missing_on_one, str(tmp_path))
    assert traces and not others, "the first rank captures for both, though it has entries"
    assert not any(differences for _, differences in found)
