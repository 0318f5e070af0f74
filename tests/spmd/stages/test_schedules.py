"""Schedules of pipelines: their files, the choice of "auto", and what reports, traces and the proof know of them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import passes
import spmd
from passes import MemoryBudgetError, Mesh, PassError, Program, Report
from passes.analysis.collective_algorithms import BUILT_IN, Algorithm, Link, Point
from passes.ir.bundle import Bundle, messages_of
from passes.ir.check_bundle import check_bundle
from passes.ir.collectives import Kind, communicate_in, kind_of, peer_of
from passes.schedule.happens_before import check_streams
from passes.schedule.streams import assign_streams
from spmd.lowering.run_stages import ends_on_nccl
from spmd.stages.schedule_files import Actions, schedule_text
from spmd.stages.schedules import SCHEDULES, ended_role, orders, role_of, started_role, with_ends, with_starts
from tests.harness.cpu_time import count_calls
from tests.harness.fake import fake_world
from tests.harness.on_cuda import OnCuda


class Scale(nn.Module):
    """A parameter before all others, so that the first stage has a gradient to compute, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled(ranks: int, rows: int = 64, layers: int = 1, width: int = 64, **mode: Any) -> spmd.CompiledStep:
    """A step of equal stages, or of ``layers`` for each, on rank 0."""
    model = nn.Sequential(Scale(width), *(nn.Linear(width, width, bias=False) for _ in range(ranks * layers)))
    options: dict[str, Any] = {"axes": {"stages": "pp"}, "micro_batches": 4} | mode
    if "stages" not in options:
        options["stages"] = [str(k) for k in range(2, ranks * layers + 1)][layers - 1 :: layers][: ranks - 1]
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
        given = {key: options.pop(key) for key in ("memory", "passes") if key in options}
        made = spmd.compile(step, parallel_mode=spmd.DataParallel(mesh=mesh, **options), **given)
        made(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(rows, width))
    return made


def schedules_of(made: spmd.CompiledStep) -> tuple[str, ...]:
    assert made.program is not None
    return made.program.schedules


# Files


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_schedule_that_is_written_is_read_back(schedule: str, tmp_path: Path) -> None:
    program = compiled(2, schedule=schedule).program
    assert program is not None
    path = tmp_path / "schedule.csv"
    path.write_text(schedule_text(program.stages))
    again = compiled(2, schedule=path).program
    assert again is not None
    assert schedule_text(again.stages) == path.read_text()
    assert again.stages.calls == program.stages.calls
    assert Actions.read(path, 4).splits_backward == (schedule == "zb-h1")


def test_torch_reads_what_is_written() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    program = compiled(2, schedule="1f1b").program
    assert program is not None
    rows = schedule_text(program.stages).splitlines()
    actions = [[schedules._Action.from_str(each) for each in row.split(",")] for row in rows]
    assert [str(each) for each in actions[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    assert [each.stage_index for each in actions[1]] == [1] * 8


# The choice


def test_auto_takes_the_fastest_and_of_equals_the_one_that_keeps_less() -> None:
    assert schedules_of(compiled(2, rows=1024, schedule="auto"))[0] == "zb-h1"
    found = schedules_of(compiled(2, rows=1024, schedule="auto", stages=None, layers=2))
    assert set(found) == set(SCHEDULES)
    assert found.index("1f1b") < found.index("gpipe")


def test_auto_takes_what_fits_the_budget() -> None:
    peaks, options = {}, {"rows": 2048, "micro_batches": 8}
    for schedule in ("1f1b", "gpipe"):
        report = compiled(2, schedule=schedule, **options).report()
        peaks[schedule] = max(lane.peak for lane in report.lanes)
    assert peaks["1f1b"] < 0.8 * peaks["gpipe"]
    fits = compiled(2, schedule="auto", memory=1 << 30, **options)
    assert any("planned of" in note for note in fits.report().notes)
    with pytest.raises(MemoryBudgetError, match="expected memory= to be at least"):
        compiled(2, schedule="auto", memory=1 << 20, **options)
    with pytest.raises(MemoryBudgetError, match=r"compiling\), got .*; its peak is in .*, in \w+\.\d.*MB of"):
        compiled(2, schedule="auto", memory=fits_least(fits), **options)


def fits_least(step: Any) -> int:
    """A budget that is too small, and larger than state and graphs."""
    (note,) = [note for note in step.report().notes if "planned of" in note]
    return int(float(note.split()[1]) * 1e6) - 100_000


# What is simulated


@pytest.mark.parametrize(
    ("schedule", "virtual", "waits"), [("1f1b", 1, 1.0), ("interleaved", 2, 0.5), ("zb-h1", 1, None)]
)
def test_programs_wait_as_long_as_the_formulas_say(schedule: str, virtual: int, waits: float | None) -> None:
    ranks, count = 4, 8
    stages = None if virtual == 1 else [str(k) for k in range(2, ranks * virtual + 1)]
    options: dict[str, Any] = {} if stages is None else {"stages": stages}
    made = compiled(ranks, 8 * 128, virtual, 1024, schedule=schedule, micro_batches=count, **options)
    assert made.program is not None
    point = (Point(1, 0.0, 0.0),)  # messages take no time
    free = Link("gloo", "", ranks, {(kind, Algorithm.NATIVE): point for kind in (Kind.SEND, Kind.RECV)})
    report = Report.of(made.program, costs=replace(BUILT_IN, links=(free,)))
    seconds = {part: _seconds(report, part) for part in ("forward", "backward", "weights")}
    work = sum(seconds.values()) * virtual
    bubble = (ranks - 1) * (work * waits if waits else seconds["forward"] + seconds["backward"] - seconds["weights"])
    ends = max(bar.end for lane in report.lanes for bar in lane.bars if bar.micro_batch is not None)
    assert ends == pytest.approx(count * work + bubble, rel=0.05)


def _seconds(report: Report, part: str) -> float:
    bars = [bar.end - bar.start for lane in report.lanes for bar in lane.bars if bar.role.startswith(part)]
    return sum(bars) / max(1, len(bars))


def test_programs_do_not_depend_on_the_number_of_micro_batches() -> None:
    """Nor does compiling, but for the orders, and for the walk that proves them."""
    texts = []
    for count in (4, 16):
        program = compiled(2, rows=8 * count, micro_batches=count).program
        assert program is not None
        found = program.stages.programs
        texts.append({role: [str(node.target) for node in each.graph.nodes] for role, each in found.items()})
    assert texts[0] == texts[1]


def calls_to_compile(axis: str, **mode: Any) -> int:
    """The functions that are called to compile a step of two ranks."""
    return count_calls(lambda: compile_on_two(axis, **mode))


def compile_on_two(axis: str, **mode: Any) -> None:
    model = nn.Sequential(Scale(16), *(nn.Linear(16, 16) for _ in range(4)))
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
        made = spmd.compile(step, parallel_mode=spmd.DataParallel(mesh=mesh, **mode))
        made(model, torch.optim.AdamW(model.parameters()), torch.randn(64, 16))


@pytest.mark.slow
def test_a_pipeline_takes_at_most_1_3_times_as_long_to_compile() -> None:
    compile_on_two("dp")  # torch's tables are made once
    plain = calls_to_compile("dp")
    few, many = (calls_to_compile("pp", axes={"stages": "pp"}, micro_batches=count) for count in (4, 32))
    assert few < 1.3 * plain and many < 1.05 * few, (plain, few, many)


def test_the_report_has_a_lane_for_each_rank(tmp_path: Path) -> None:
    report = compiled(2, rows=1024, schedule="1f1b").report()
    assert [lane.name for lane in report.lanes] == ["pp=0", "pp=1"]
    bars = [bar for bar in report.lanes[0].bars if bar.role == "forward.0"]
    assert [bar.micro_batch for bar in bars] == [0, 1, 2, 3]
    for lane in report.lanes:
        assert all(one.end <= other.start for one, other in zip(lane.bars, lane.bars[1:], strict=False))
    assert report.count("send") == 4 and report.count("recv") == 5  # of micro-batches, and the loss
    assert report.estimated is not None and 0.1 < report.bubble < 0.9
    assert report.memory["cpu"].peak == report.lanes[0].peak
    assert "pp=1" in str(report) and Report.from_dict(json.loads(json.dumps(report.to_dict()))).lanes == report.lanes
    report.save(tmp_path / "report.html")
    assert '["forward.0 of 3", "pp=0", ' in (tmp_path / "report.html").read_text().replace("\\u0022", '"')
    report.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"forward.0 of 3", "backward.1 of 0", "update.1"} <= {each["name"] for each in events}


# The proof


def many(bundle: Bundle, ranks: int, count: int, backend: str = "gloo") -> Bundle:
    """Forward and backward of a pipeline of three stages, with as many copies of the middle one as ranks need."""
    programs = {}
    for rank in range(ranks):
        like = 0 if rank == 0 else 2 if rank == ranks - 1 else 1
        for part in ("forward", "backward"):
            role = role_of(part, like)
            for each in {role, ended_role(role), started_role(role)} & bundle.programs.keys():
                programs[each.replace(f".{like}", f".{rank}")] = moved(
                    bundle.programs[each], rank - like, rank, ranks, backend
                )
    receivers = {role_of("forward", k): [role_of("forward", k + 1)] for k in range(ranks - 1)}
    receivers |= {role_of("backward", k): [role_of("backward", k - 1)] for k in range(1, ranks)}
    senders = {receiver: [sender] for sender, (receiver,) in receivers.items()}
    calls = with_ends(orders("1f1b", ranks, 1, count, role_of), receivers, senders)
    calls = [with_starts(order, senders) for order in calls]
    return Bundle.of("many", programs, {"step": calls}, "pp", micro_batches=bundle.micro_batches)


def moved(program: Program, by: int, rank: int, ranks: int, backend: str) -> Program:
    """A program for another rank, of so many. A message is named after its direction and its sender."""
    (axis,) = program.mesh.axes
    made = program.copy()
    made.mesh = Mesh((replace(axis, size=ranks, coordinate=rank, backend=backend, gathers="back"),))
    for node in messages_of(made):
        peer = peer_of(node) + by
        sender = rank if kind_of(node) is Kind.SEND else peer
        forward = (peer > rank) == (sender == rank)
        group = "back" if backend == "nccl" and not forward else axis.group
        node.args = (*node.args[:-3], peer, f"{'forward' if forward else 'backward'}.{sender}", group)
    for each in ("inputs", "outputs"):
        found = getattr(made, each)
        setattr(made, each, [replace(o, name=f"{o.name}@{rank}") if o.role.is_of_channel else o for o in found])
    return made


def on_gpus(schedule: str, ranks: int = 2) -> Bundle:
    """The bundle of a step on GPUs that send by NCCL, after all passes."""
    seen: list[Program] = []

    class Seen(OnCuda):
        """Keeps its program, and ends the call."""

        def partition(self, program: Program) -> Program:
            """That of the mode."""
            (axis,) = program.mesh.axes
            mesh = Mesh((replace(axis, backend="nccl", gathers="back"),))
            seen.append(super().partition(replace(program, mesh=mesh)))
            raise PassError("seen")

    model = nn.Sequential(Scale(64), *(nn.Linear(64, 64, bias=False) for _ in range(2 * ranks)))
    with fake_world(ranks), pytest.raises(PassError, match="seen"):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
        mode = Seen(mesh=mesh, axes={"stages": "pp"}, micro_batches=2 * ranks, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        spmd.compile(clipped, parallel_mode=mode)(model, optimizer, torch.randn(4 * ranks, 64))
    return passes.run(seen[0], passes.default()).stages


def clipped(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_gpus_exchange_ends_for_each_schedule(schedule: str, ranks: int) -> None:
    """NCCL runs the messages of a group in one line: what goes to earlier ranks has a group of its own."""
    bundle = on_gpus(schedule, ranks)
    check_bundle(bundle)
    for program in bundle.programs.values():
        check_streams(program, assign_streams(program))


def test_ranks_connect_in_one_order() -> None:
    """NCCL blocks a rank until the other one connects, too: in the order of programs, ranks could wait in a circle."""
    found = ends_on_nccl(on_gpus("1f1b", 4))
    ends = [each[1:] for each in found]
    assert ends == sorted(ends) and {(0, 1), (1, 0), (3, 2)} <= {*ends}
    assert all((group == "back") == (target < source) for group, source, target in found)


def test_one_group_would_wait_for_ever_on_gpus() -> None:
    """A rank that sends forward while the next one sends backward."""
    bundle = on_gpus("1f1b")
    for program in bundle.programs.values():
        for node in messages_of(program):
            communicate_in(node, program.mesh.axes[0].group)
    with pytest.raises(PassError, match="would never end"):
        check_bundle(bundle)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("ranks", [64, pytest.param(1024, marks=pytest.mark.exhaustive)])
def test_the_proof_of_many_ranks_takes_seconds(ranks: int, backend: str) -> None:
    program = compiled(3, passes=()).program
    assert program is not None
    bundle = many(program.stages, ranks, 2, backend)
    start = time.process_time()
    check_bundle(bundle)
    assert time.process_time() - start < 20
    small = many(program.stages, 16, 4)
    orders_of = list(small.calls["step"])
    orders_of[8] = tuple(role for role in orders_of[8] if role != "forward.8")
    with pytest.raises(PassError):
        check_bundle(small.with_orders({"step": tuple(orders_of)}))
