"""``spmd plan FILE:STEP`` and ``spmd.plan``: what they find, print, and refuse."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import passes
import spmd
from passes.analysis.collective_algorithms import BUILT_IN
from passes.default_passes import with_micro_batches
from passes.memory.peak_memory import planned_memory
from passes.schedule.gpus import GPUS
from passes.schedule.rates import BUILT_IN_CPU
from spmd.cli import plan_command
from spmd.cli.commands import main
from spmd.planning.capture import partitioned
from spmd.planning.estimate import estimate
from spmd.planning.fitted import CONSTANTS
from spmd.planning.layout import Layout, Style
from spmd.planning.machine import Machine, Software
from spmd.planning.search import SOFTWARE, recomputed, search
from spmd.planning.step_work import CapturedStep
from spmd.verification.world import simulated_world

from .test_kernels import TOKENS, WIDTH, model, train_step

pytestmark = pytest.mark.slow

FILE = """
import torch, spmd
from tests.spmd.planning.test_kernels import model, train_step

def example_args():
    made = model(4)
    return made, torch.optim.Adam(made.parameters()), torch.zeros(16, 8, dtype=torch.long)
"""


def plan(step: Any = train_step, rows: int = 16, **options: Any) -> spmd.Plans:
    made = model(4)
    text = torch.zeros(rows, TOKENS, dtype=torch.long)
    return spmd.plan(step, made, torch.optim.Adam(made.parameters()), text, **{"gpus": 8, **options})


@cache
def captured() -> CapturedStep:
    made = model(4)
    text = torch.zeros(16, TOKENS, dtype=torch.long)
    return CapturedStep(train_step, (made, torch.optim.Adam(made.parameters()), text), {})


def searched(gpus: int = 8, memory: int | str | None = None, per_host: int = 8, rows: int = 16) -> spmd.Plans:
    return search(captured(), gpus, "H100", per_host, memory, rows, 100)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 3, -1)).permute(3, 0, 2, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def attending() -> spmd.Plans:
    """The layouts of a step with attention, without which none splits sequences."""
    with torch.device("meta"):
        ends = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256, bias=False)
        made = nn.Sequential(ends[0], nn.Sequential(*(Attending() for _ in range(4))), ends[1])
    text = torch.zeros(16, TOKENS, dtype=torch.long)
    return spmd.plan(train_step, made, torch.optim.Adam(made.parameters()), text, gpus=8, per_host=1, top=100)


def test_layouts_are_ordered_and_the_same_each_time() -> None:
    assert plan(top=100, gpus=8, per_host=1).to_dict() == searched(8, per_host=1).to_dict()
    found = searched()
    seconds = [each.estimate.seconds for each in found.layouts]
    assert seconds == sorted(seconds)
    assert {each.layout.style for each in found.layouts} == {"replicate", "shard_optimizer", "fully_shard"}
    assert {each.layout.stages for each in found.layouts} == {1, 2, 4}
    assert {each.layout.schedule for each in found.layouts} == {"1f1b", "interleaved", "zb-h1"}
    assert len(found.why()) == 3


def test_a_plan_is_printed_as_a_table_and_a_mode_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    found = searched()
    title, *rows = str(found).splitlines()
    assert "8 H100, 8 a host, 16 rows a step: estimates" in title and max(map(len, rows[: len(found.layouts)])) <= 60
    assert str(found).endswith(found.python()) and found.why()[0] in rows
    assert str(searched(memory=1000)) == searched(memory=1000).missing()


def test_rows_and_hosts_decide_which_layouts_there_are() -> None:
    found = searched(16, None, 4, rows=64)
    assert any(each.layout.shard == 4 for each in found.layouts)
    assert all(each.layout.rows * each.layout.micro_batches * each.layout.data == 64 for each in found.layouts)
    with pytest.raises(ValueError, match="rows divide among 24 GPUs, got 16 rows"):
        searched(24)
    odd = search(captured(), 12, "H100", None, None, 48, 100).layouts  # hosts have 8
    assert all(each.layout.shard is None and each.layout.data * each.layout.stages == 12 for each in odd)


def test_a_model_that_fits_nowhere_is_described_by_how_much() -> None:
    found = searched(memory="10KB")
    assert not found
    assert "no layout fits into the 10.0 KB of one H100: the least is" in found.missing()
    assert found.missing().endswith("; take more GPUs, or fewer rows")  # each micro-batch has two
    by_row = search(captured(), 4, "H100", None, "10KB", 64, 100)
    assert by_row.missing().endswith("64 micro-batches, 134.7 KB more; take more GPUs")
    assert found.to_dict()["missing"] == found.missing()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gpu": "T1000"}, "expected a GPU with published figures, one of V100, A100"),
        ({"gpus": 0}, "expected gpus to be a number, 1 or more, got 0"),
        ({"gpus": 12, "per_host": 8}, "expected gpus to fill hosts of 8, got 12"),
        ({"step": spmd.compile(parallel_mode=spmd.DTensorExpand())(train_step.function)}, "a step with DataParallel"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**options)


def test_a_function_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(TypeError, match="decorate it with"):
        spmd.plan(train_step.function, nn.Linear(2, 2), gpus=8)


REST = [pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("shard", "stages")]  # others below have them, too


@pytest.mark.parametrize("kind", ["context", "recompute", "interleaved", *REST])
def test_modes_run_as_they_are_pasted(kind: str) -> None:
    found = attending() if kind == "context" else searched(8, "100KB" if kind == "recompute" else None, 4)
    tests: dict[str, Callable[[Layout], bool]] = {
        "context": lambda each: each.context > 1,
        "shard": lambda each: each.shard == 4,
        "recompute": lambda each: each.recompute == "full",
        "stages": lambda each: each.schedule == "zb-h1" and each.style == "shard_optimizer",
        "interleaved": lambda each: each.chunks > 1 and each.style == "fully_shard",
    }
    chosen = next(each for each in (*found.layouts, *found.front) if tests[kind](each.layout))
    text = found.python(chosen).replace('"cuda"', '"cpu"')
    made: dict[str, Any] = {"spmd": spmd, "init_device_mesh": init_device_mesh, "step": train_step.function}
    blocks = model(4)
    rows = 16 // (chosen.layout.data // chosen.layout.context)
    args = (blocks, torch.optim.Adam(blocks.parameters()), torch.zeros(rows, TOKENS, dtype=torch.long))
    with simulated_world(8, None, "cpu"):
        exec(text, made)
        program = partitioned(made["step"], lambda _: made["mode"], args, {}, {"dp": 8})
    assert math.prod(axis.size for axis in program.mesh.axes) == 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trains_blocks.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FILE holds is captured already."""
    monkeypatch.setattr(plan_command, "CapturedStep", lambda *_: captured())


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *argv])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_table_and_the_mode_are_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{file}:train_step", "--gpus", "8", "--gpu", "A100", "--per-host", "1") == 0
    out = capsys.readouterr().out
    assert "8 A100, 1 a host, 16 rows a step" in out
    assert "mode = spmd.DataParallel(" in out


@pytest.mark.usefixtures("known")
def test_json_has_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{file}:train_step", "--gpus", "8", "--json", "--top", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layouts"]) == 2
    first = found["layouts"][0]
    assert sum(first["seconds_by_cause"].values()) == pytest.approx(first["seconds"])
    assert first["tokens_per_second"] == pytest.approx(16 * TOKENS / first["seconds"])


@pytest.mark.usefixtures("known")
def test_it_ends_with_one_where_nothing_fits_and_two_for_a_wrong_argument(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{file}:train_step", "--gpus", "8", "--memory", "10KB") == 1
    assert run(f"{file}:other", "--gpus", "8") == 2
    assert run(f"{file}:train_step", "--gpus", "7") == 2
    assert run(f"{file}:train_step", "--gpus", "8", "--table", str(file)) == 2  # no table
    assert run(f"{file}:train_step", "--gpus", "8", "--gpu", "A100,H100", "--table", str(file)) == 2
    assert "expected --table with one kind of GPUs" in capsys.readouterr().err


@pytest.mark.usefixtures("known")
def test_rates_that_were_measured_are_those_of_the_plan(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = file.with_name("costs.json")
    replace(BUILT_IN, compute=BUILT_IN_CPU).write(costs)
    given = ("--gpus", "2", "--gpu", "CPU", "--json")
    assert run(f"{file}:train_step", *given) == run(f"{file}:train_step", *given, "--table", str(costs)) == 0
    built_in, measured = (json.loads(each) for each in re.split(r"(?<=^})\n(?={)", capsys.readouterr().out, flags=re.M))
    assert built_in["layouts"] == measured["layouts"]
    assert measured["notes"][-1] == "compute and links are as fast as costs.json says"
    assert 'init_device_mesh("cpu", (2,)' in measured["layouts"][0]["python"]


@pytest.mark.usefixtures("known")
def test_a_plan_is_compared_with_an_earlier_one(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier, step = file.with_name("plan.json"), f"{file}:train_step"
    assert run(step, "--gpus", "8", "--json", "--top", "100") == 0
    earlier.write_text(capsys.readouterr().out)
    assert run(step, "--gpus", "8", "--against", str(earlier)) == 0
    assert "since then: the fastest layout, its time and its memory are the same" in capsys.readouterr().out
    assert run(step, "--gpus", "16", "--rows", "65536", "--json", "--against", str(earlier)) == 0
    asked, rows, takes, *_, memory = json.loads(capsys.readouterr().out)["changes"]
    assert (asked, rows) == ("GPUs: 16 instead of 8", "rows: 65536 instead of 16")
    assert "of the tokens a second" in takes and "longer: " in takes
    assert memory.startswith("memory: ") and " instead of " in memory
    assert run(step, "--gpus", "8,16", "--against", str(earlier)) == 2
    assert run(step, "--gpus", "8", "--against", str(file)) == 2
    earlier.write_text("{}")
    assert run(step, "--gpus", "8", "--against", str(earlier)) == 2
    assert "expected one plan as spmd plan --json prints it, but it has no 'gpu'" in capsys.readouterr().err


@torch.library.custom_op("plans::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@scan.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


scan.register_autograd(lambda ctx, gradient: gradient)


def test_an_op_without_a_cost_is_named_with_what_depends_on_it() -> None:
    made = nn.Linear(WIDTH, WIDTH)

    @spmd.compile
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = scan(model(x)).square().sum() + torch.linalg.inv(model.weight).sum()
        loss.backward()
        return loss

    notes = spmd.plan(step, made, torch.zeros(8, WIDTH), gpus=1).notes
    assert any(note.startswith("plans.scan.default has no cost: it counts as the bytes that it") for note in notes)
    assert any(note.startswith("aten.linalg_inv_ex.default has no cost") for note in notes)
    assert not any("aten.mm" in note or "aten.addmm" in note for note in notes)


@pytest.mark.usefixtures("known")
def test_machines_are_compared_in_a_table_and_on_a_page(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = file.with_name("plans.html")
    assert run(f"{file}:train_step", "--gpus", "4..16", "--gpu", "A100,H100", "--page", str(page)) == 0
    out = capsys.readouterr().out
    assert [line.split("│")[1].strip() for line in out.splitlines() if "│" in line] == [
        f"{gpus} {gpu}" for gpu in ("A100", "H100") for gpus in (4, 8, 16)
    ]
    text = page.read_text()
    assert text.count("<svg") == 7 and text.count("<polyline") == 2  # one of scaling, with a line for each kind
    clicks, entries = (set(re.findall(each, text)) for each in (r'href="#([\w-]+)"', r'details id="([\w-]+)"'))
    assert clicks == entries and len(clicks) > 6
    assert "mode = spmd.DataParallel(" in text
    assert plan_command._counts("4,16..64,6") == [4, 16, 32, 64, 6]
    for wrong in ("many", "64..8", "8..", "4,"):
        assert run(f"{file}:train_step", "--gpus", wrong) == 2
    capsys.readouterr()
    assert run(f"{file}:train_step", "--gpus", "8", "--page", str(file.with_name("none") / "plans.html")) == 2
    assert "expected a file that can be written" in capsys.readouterr().err


def test_state_is_that_of_a_whole_model_whose_blocks_are_trained_and_whose_ends_are_frozen() -> None:
    made = model(6)
    blocks = [each for name, each in made.named_parameters() if name.startswith("1.")]
    ends = [each.requires_grad_(False) for name, each in made.named_parameters() if not name.startswith("1.")]
    args = made, torch.optim.Adam(blocks), torch.zeros(16, TOKENS, dtype=torch.long)
    work = CapturedStep(train_step, args, {}).of().work
    numbers = sum(each.count * each.parameters for each in work.plain)
    trained, frozen = (4 * sum(each.numel() for each in listed) for listed in (blocks, ends))
    assert work.state.weight * numbers == pytest.approx(trained + frozen)
    assert work.state.gradient * numbers == pytest.approx(trained)
    assert work.state.optimizer * numbers == pytest.approx(2 * trained, rel=0.01)  # and a count of steps


@spmd.compile
def flat_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def early() -> nn.Sequential:
    """Parts of which the first ones keep most for backward, and the last ones have most parameters."""
    first = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8), nn.Flatten()
    return nn.Sequential(*first, nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))


EQUAL = train_step, lambda: model(4), torch.zeros(16, TOKENS, dtype=torch.long)
UNEQUAL = flat_step, early, torch.zeros(64, 32, 8)


@pytest.mark.parametrize(
    "step, made, x, style, micro_batches",
    [
        pytest.param(*EQUAL, "replicate", 1, marks=pytest.mark.exhaustive),
        (*EQUAL, "shard_optimizer", 2),
        (*UNEQUAL, "replicate", 1),
    ],
)
def test_memory_is_what_our_programs_plan(
    step: Any, made: Callable[[], nn.Module], x: torch.Tensor, style: Style, micro_batches: int
) -> None:
    def args(rows: int) -> tuple[Any, ...]:
        return (one := made()), torch.optim.Adam(one.parameters()), x[:rows]

    rows = len(x) // 2  # of each of two ranks
    layout = Layout(2, style, rows / micro_batches, micro_batches)
    machine = Machine(GPUS["H100"], "H100", 8, SOFTWARE["aten"], CONSTANTS)
    found = estimate(CapturedStep(step, args(len(x)), {}).of().work, layout, machine)

    def mode(mesh: DeviceMesh) -> spmd.DataParallel:
        sharded = style == "shard_optimizer"
        return spmd.DataParallel("replicate", mesh=mesh, shard_optimizer=sharded, micro_batches=micro_batches)

    pipeline = passes.default() if micro_batches == 1 else with_micro_batches(passes.default())
    program = passes.run(partitioned(step, mode, args(rows), {}, {"dp": 2}), pipeline, check=False)
    planned = sum(each.peak for each in planned_memory(program).values())
    assert found.peak == pytest.approx(planned, rel=0.12)


def test_no_more_blocks_are_recomputed_than_memory_asks_for() -> None:
    fastest, work = searched(1, rows=2).best, captured().of().work
    assert fastest is not None and fastest.layout.recompute == "none"
    machine = Machine(GPUS["H100"], "H100", 8, Software(), CONSTANTS)
    whole = [estimate(work, replace(fastest.layout, recompute=each), machine).peak for each in ("none", "full")]
    assert whole[1] < whole[0]
    memory = int(0.3 * whole[1] + 0.7 * whole[0])
    (found,) = recomputed(work, fastest.layout, machine, memory)
    assert found.estimate.peak <= memory
    assert found.layout.recomputed == (0.5,)  # of 4 blocks: one saves less than it should, and three more
