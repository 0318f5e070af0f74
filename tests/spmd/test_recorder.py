"""``step.record`` and ``spmd replay``: recorded calls run again with the same values, up to the first NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import spmd
from spmd.cli.commands import main
from spmd.recorder import recorded_calls
from spmd.verification.replay import NotFinite, replay
from tests.harness.pool import Ranks

LAST = 4
CALLS, TOUCHED, BROKEN = 11, 7, 10


class Normalized(nn.Module):
    """Divides by the norm of each row, which is 0 for a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(3, 4, bias=False), nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(self.drop(hidden / hidden.abs().sum(-1, keepdim=True)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x).masked_fill(y > 2, float("-inf")).clamp(min=-1), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def recorded(rank: int, world: int, folder: Path, style: Any) -> list[float]:
    """The losses; before one call the user changes a parameter, in another rank 1 brings a row of zeros."""
    torch.manual_seed(0)
    model = Normalized().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(style))
    compiled.record(folder, last=LAST)
    random, losses = torch.Generator().manual_seed(rank), []
    for call in range(1, CALLS + 1):
        x, y = torch.randn(4, 3, generator=random).double(), torch.randn(4, 2, generator=random).double()
        if call == TOUCHED:
            with torch.no_grad():
                next(model.parameters()).mul_(1.5)
        if call == BROKEN and rank == 1:
            x[2] = 0
        optimizer.param_groups[0]["lr"] = 0.01 * call
        losses.append(float(compiled(model, optimizer, x, y)))
    return losses


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_calls_run_again_up_to_the_first_nan(
    ranks: Ranks, tmp_path: Path, style: str, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, _ = ranks.run(2, recorded, tmp_path, style)
    calls = list(recorded_calls(tmp_path / "rank-1"))
    assert calls == [7, 8, 9, 10, 11] and losses[8] == losses[8] and losses[9] != losses[9]
    for call in (7, 8, 9):
        again = replay(tmp_path, 0, call)
        assert (again.since, again.found, again.results) == (TOUCHED, None, {"result.0": losses[call - 1]})
    first = replay(tmp_path, 1, BROKEN).found
    assert first is not None and (first.rank, first.kind, first.count, first.of) == (1, "NaN", 4, 16)
    assert first.text.startswith("div = div(") and "hidden / hidden.abs().sum(-1, keepdim=True)" in first.line
    assert first.operands[1].endswith("float64[4, 1] from 0 to " + first.operands[1].rpartition(" ")[2])
    check_what_other_ranks_see(tmp_path, first)
    check_commands(tmp_path, capsys)


def check_what_other_ranks_see(folder: Path, first: NotFinite) -> None:
    """Rank 0 gets it by a collective, and in the next call it is in the state."""
    there = replay(folder, 0, BROKEN)
    assert there.found is not None and there.found.text.startswith("received: wait_tensor")
    assert there.origin is not None and there.origin == first
    after = replay(folder, 0)
    assert after.call == CALLS and after.found is not None and after.found.text.endswith("as it came into the call")


def check_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            main(["replay", str(folder), *arguments])
        shown = capsys.readouterr()
        return ended.value.code, shown.out + shown.err

    code, text = run("--rank", "1", "--call", "10")
    assert code == 1 and "call 10 of step on dp=2, rank 1: step/program-" in text
    assert "the first value that is not finite: NaN in 4 of 16 elements\n    div = div(" in text
    code, text = run("--call", "9", "--json")
    assert code == 0 and json.loads(text)["found"] is None
    assert run("--call", "3") == (2, run("--call", "3")[1]) and "has no call 3: it has 7 to 11" in run("--call", "3")[1]
    assert "has a record of ranks 0 to 1, none of rank 2" in run("--rank", "2")[1]


class Divides(nn.Module):
    """Divides by the norm of each row."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().sum(-1, keepdim=True)


def stages_recorded(rank: int, world: int, folder: Path) -> list[float]:
    """The losses of two stages, of which the last one divides; the last batch has a row of zeros in micro-batch 2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), Divides(), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    optimizer, mesh = torch.optim.Adam(model.parameters()), init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
    mode = spmd.DataParallel(mesh=mesh, axes={"stages": "pp"}, micro_batches=4, stages=["2"])
    compiled = spmd.compile(step, parallel_mode=mode)
    compiled.record(folder)
    random, losses = torch.Generator().manual_seed(0), []
    for call in range(1, 5):
        x, y = torch.randn(8, 3, generator=random).double(), torch.randn(8, 2, generator=random).double()
        if call == 4:
            x[5] = 0
        losses.append(float(compiled(model, optimizer, x, y)))
    return losses


def test_calls_of_a_pipeline_run_again_up_to_the_first_nan(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, _ = ranks.run(2, stages_recorded, tmp_path)
    again = replay(tmp_path, 0, 3)
    assert (again.found, again.results) == (None, {"result.0": losses[2]})
    first = replay(tmp_path, 1).found
    assert first is not None and (first.kind, first.count, first.run) == ("NaN", 4, "forward.1 of 2")
    assert first.text.startswith("div = div(") and "x / x.abs().sum(-1, keepdim=True)" in first.line
    there = replay(tmp_path, 0)
    assert there.found is not None and there.found.run == "backward.0 of 2" and there.origin == first
    assert there.found.text.startswith("received: wait_tensor")
    with pytest.raises(SystemExit):
        main(["replay", str(tmp_path), "--rank", "1"])
    assert "in forward.1 of 2, forward, model.2, " in capsys.readouterr().out


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no record, which step.record\(.*\) writes: it has is no folder"):
        replay(tmp_path / "none", 0)
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-0" / "thesis").write_text("")
    with pytest.raises(ValueError, match=r"expected an empty folder, or that of an earlier record, got .*rank-0"):
        spmd.compile(step).record(tmp_path)
    assert (tmp_path / "rank-0" / "thesis").exists()
    for last in (0, 1.5, True):
        with pytest.raises(ValueError, match="expected the number of calls to keep, got"):
            spmd.compile(step).record(tmp_path / "other", last=last)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_a_disk_that_fails_ends_the_record_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = spmd.compile(step)
    compiled.record(tmp_path)
    monkeypatch.setattr("spmd.recorder.torch.save", full)
    with pytest.warns(
        UserWarning, match=r"the record in .*rank-0 ends before call 1: .*No space left.* Training goes on"
    ):
        compiled(model, optimizer, torch.randn(4, 3), torch.randn(4, 2))
    compiled(model, optimizer, torch.randn(4, 3), torch.randn(4, 2))
    compiled.record(None)


@pytest.mark.usefixtures("alone")
def test_a_call_that_failed_does_not_run_again_before_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer, compiled = torch.optim.SGD(model.parameters(), lr=0.1), spmd.compile(step)
    compiled.record(tmp_path)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    compiled(model, optimizer, *batches[0])
    run = compiled._dispatch.programs.last.executable.function  # type: ignore[union-attr]
    with monkeypatch.context() as patched:
        patched.setattr(type(run), "__call__", failing_run)
        with pytest.raises(Exception, match="out of memory"):
            compiled(model, optimizer, *batches[1])
    loss = float(compiled(model, optimizer, *batches[2]))
    assert replay(tmp_path, 0, 3).results == {"result.0": loss} and replay(tmp_path, 0, 3).since == 3


def failing_run(*args: Any) -> Any:
    raise MemoryError("out of memory")


@pytest.mark.usefixtures("alone")
def test_a_step_without_state_is_recorded(tmp_path: Path) -> None:
    compiled = spmd.compile(lambda x: x.sum())
    compiled.record(tmp_path)
    for _ in range(2):
        total = float(compiled(torch.ones(3)))
    assert replay(tmp_path, 0).results == {"result.0": total}
