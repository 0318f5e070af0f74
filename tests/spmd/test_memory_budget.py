"""``memory=``: what a step holds fits into a budget, and computes the same bits."""

from __future__ import annotations

import re
from functools import cache
from traceback import extract_tb
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import passes
import spmd
from passes import Recompute, default, estimate, fit_memory, run
from passes.fit_memory import fit
from tests.harness.pool import Ranks
from tests.harness.programs import ROOT
from tests.harness.structure import compile_on_fake_ranks

pytestmark = pytest.mark.slow
ROWS = 1024
WHOLE = 1 << 30  # a budget that everything fits into


class Net(nn.Module):
    """Residual blocks with dropout, whose activations take most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*_layers()) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def _layers() -> list[nn.Module]:
    return [nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16)]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def objects(optimizer: str = "SGD") -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Net().double()
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 16, dtype=torch.float64, generator=generator)
    return x, torch.randint(4, (ROWS,), generator=generator)


@cache
def compiled(memory: Any, style: str = "replicate", **options: Any) -> Any:
    mode = spmd.DataParallel(style, **options)  # type: ignore[arg-type]
    return compile_on_fake_ranks(2, train_step, objects(), *batch(), parallel_mode=mode, memory=memory)


def peak(step: Any) -> int:
    """The bytes of values, by plan."""
    return sum(plan.peak for plan in step.report().memory.values())


def counted(step: Any) -> int:
    """The bytes that count for a budget: graphs, too."""
    (note,) = [note for note in step.program.notes if note.startswith("memory: ")]
    return megabytes(note)


def megabytes(text: str) -> int:
    """The first size in a sentence, in bytes."""
    found = re.search(r"([\d.]+) MB", text)
    assert found
    return round(float(found[1]) * 1e6)


def recomputed(step: Any) -> int:
    return sum("recompute_of" in node.meta for node in step.program.graph.nodes)


def test_a_step_that_fits_stays_as_it_is() -> None:
    plain, fitted = compiled(None), compiled("1GiB")
    assert fitted.program.code == plain.program.code and not recomputed(plain)


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_more_memory_is_never_slower(style: str) -> None:
    step = compiled("1GiB", style)
    partitioned, most = step._dispatch.programs.all[0].partitioned, counted(step)
    figures = []
    for share in (0.0, 0.1, 0.25, 0.4):
        budget = most - int(share * peak(step))
        fitted = fit(partitioned, default(), budget, lambda text: [text])
        timeline = estimate(run(fitted.program, fitted.pipeline))
        assert timeline is not None and fitted.peak <= budget
        figures.append((timeline.seconds, fitted.peak))
    assert figures == sorted(figures, key=lambda each: (each[0], -each[1])) and len(set(figures)) == 4


def test_a_budget_that_nothing_fits_into_is_refused_with_one_that_does() -> None:
    state, _ = of_state("replicate", Net().double())
    with pytest.raises(spmd.MemoryBudgetError, match=r"at least [\d.]+ MB per rank, with which this step") as refused:
        compiled(state + 100_000)
    least, text = megabytes(str(refused.value)), str(refused.value)
    assert " for graphs and compiling), got " in text and "its peak is in " in text and "test_memory_budget.py:" in text
    assert "MB of activations" in text and text.endswith("set micro_batches=2, or pass a smaller batch")
    step = compiled(least)
    assert peak(step) < counted(step) <= least
    assert "computed again in backward" in "".join(step.program.notes)


def test_a_step_in_micro_batches_gets_the_next_number_of_them() -> None:
    with pytest.raises(spmd.MemoryBudgetError, match="set micro_batches=8 instead of 4"):
        compiled("11MB", micro_batches=4)


def of_state(style: str, model: nn.Module, **options: Any) -> tuple[int, list[str]]:
    """The bytes that a refusal of a small budget names, and the files of its traceback."""
    mode = spmd.DataParallel(style, **options)  # type: ignore[arg-type]
    given = model, torch.optim.Adam(model.parameters())
    with pytest.raises(spmd.MemoryBudgetError, match=r"of state, .*, got 100.00 KB: no setting") as refused:
        compile_on_fake_ranks(2, train_step, given, *batch(), parallel_mode=mode, memory="100KB")
    return megabytes(str(refused.value)), [frame.filename for frame in extract_tb(refused.value.__traceback__)]


def test_state_that_does_not_fit_is_refused_before_any_pass_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the passes do, and however many micro-batches there are, state is as large."""
    for module in (passes, fit_memory):
        monkeypatch.setattr(module, "run", None)
    model = nn.Sequential(nn.Linear(16, 30_000), nn.Linear(30_000, 4)).double()
    of_adam = 3 * 8 * sum(p.numel() for p in model.parameters())
    whole, files = of_state("replicate", model)
    split, _ = of_state("fully_shard", model, micro_batches="auto")
    assert whole > of_adam and whole - split > 0.4 * of_adam
    assert not [file for file in files if file.startswith((str(ROOT / "spmd"), str(ROOT / "passes")))]


def test_parameters_are_gathered_again_before_anything_is_slower() -> None:
    whole = compiled("1GiB", "fully_shard", reshard_after_forward=False)
    assert not whole.programs[0].reshard
    fitted = compiled(counted(whole) - 20_000, "fully_shard", reshard_after_forward=False)
    assert peak(fitted) < peak(whole)


@pytest.mark.parametrize("given", ["600", "MB", "-1MB", "0GB", 0, -5, True, 1.5, b"1MB"])
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r'expected memory to be a number of bytes, or text such as "600MB"'):
        spmd.compile(train_step, memory=given)


def test_a_pipeline_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(spmd.PassError, match="the pipeline has neither"):
        compile_on_fake_ranks(2, train_step, objects(), *batch(), memory="1GB", passes=())
    step = compile_on_fake_ranks(2, train_step, objects(), *batch(), memory="1GB", passes=(Recompute(),))
    assert not recomputed(step)


def losses(rank: int, world: int, style: str, optimizer: str, memory: int) -> list[Any]:
    model, trained = objects(optimizer)
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(style), memory=memory)  # type: ignore[arg-type]
    torch.manual_seed(7)
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    found = [step(model, trained, *(each[rows] for each in batch(seed))).item() for seed in range(3)]
    budget = counted(step) - int(0.4 * peak(step)) if memory == WHOLE else memory
    return [found, budget, recomputed(step), [_whole(p) for p in model.parameters()]]


def _whole(parameter: Any) -> Tensor:
    whole: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach()


@pytest.mark.parametrize(
    ("style", "optimizer"),
    [("fully_shard", "SGD"), pytest.param("replicate", "Adam", marks=pytest.mark.exhaustive)],
)
def test_the_bits_are_the_same_with_dropout(ranks: Ranks, style: str, optimizer: str) -> None:
    plain = ranks.run(2, losses, style, optimizer, WHOLE)
    budget = max(each[1] for each in plain)
    for one, other in zip(plain, ranks.run(2, losses, style, optimizer, budget), strict=True):
        assert one[0] == other[0] and other[2] > one[2]
        assert all(map(torch.equal, one[3], other[3]))


def uneven(rank: int, world: int, memory: int) -> list[Any]:
    model, trained = objects()
    step = spmd.compile(train_step, memory=memory)
    rows = slice(0, 640) if rank == 0 else slice(640, ROWS)
    found = [step(model, trained, *(each[rows] for each in batch(seed))).item() for seed in range(2)]
    again = [n.target for n in step.program.graph.nodes if "recompute_of" in n.meta]
    return [found, counted(step) - int(0.3 * peak(step)), list(map(str, again))]


def test_ranks_with_unequal_parts_decide_as_one(ranks: Ranks) -> None:
    plain = ranks.run(2, uneven, WHOLE)
    one, other = ranks.run(2, uneven, max(each[1] for each in plain))
    assert one[0] == other[0] == plain[0][0] and one[2] == other[2] != []


def test_verify_grants_float64_the_memory_that_it_takes() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batch()
    most = counted(compiled("1GiB")) // 2  # of float32
    step = spmd.compile(train_step, memory=int(0.9 * most))
    assert spmd.verify(step, model, optimizer, x.float(), y, steps=2, world=2)
