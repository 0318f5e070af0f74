"""``step.profile``: calls that are measured node by node compute the same, and their times are in the report."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import spmd
from passes import Report
from passes.measured import collective_of
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, plain_run, snapshot
from tests.harness.pool import Ranks

CASE = MLP(sizes=(6, 6, 2), rows=4, optimizer="SGD momentum")


def trained(
    rank: int, world: int, profiles: Mapping[int, int], measuring: tuple[int, ...]
) -> tuple[list[Tensor], list[Report]]:
    """Parameters after six calls, and the report after each; call k begins to measure ``profiles[k]`` steps."""
    model, optimizer = CASE.build()
    step = spmd.compile(CASE.step, parallel_mode=spmd.DataParallel("fully_shard"))
    reports = []
    for call in range(6):
        if rank in measuring and call in profiles:
            step.profile(steps=profiles[call])
        step(model, optimizer, *CASE.part(rank, call))
        reports.append(step.report())
        assert step.program is not None
        if (measured := reports[-1].measured) is not None:
            nodes = list(step.program.graph.nodes)
            assert measured.nodes.keys() <= {node.name for node in nodes}
            assert {each.node for each in reports[-1].every} == {c.name for c in map(collective_of, nodes) if c}
    with spmd.unshard(model):
        return [parameter.detach().clone() for parameter in model.parameters()], reports


def test_measured_calls_compute_the_same_also_where_one_rank_measures(ranks: Ranks) -> None:
    (both, reports), _ = ranks.run(2, trained, {3: 2}, (0, 1))
    (one, reports_0), (_, reports_1) = ranks.run(2, trained, {1: 4}, (0,))
    assert all(torch.equal(a, b) for a, b in zip(both, one, strict=True))
    assert [report.measured.calls if report.measured else 0 for report in reports] == [0, 0, 0, 1, 2, 2]
    assert [report.measured.calls if report.measured else 0 for report in reports_0] == [0, 1, 2, 3, 4, 4]
    assert [report.measured for report in reports_1] == [None] * 6
    assert reports[5].measured == reports[4].measured
    check_sums(reports[3])
    assert "one step, measured in 1 calls" in str(reports[3])


def check_sums(report: Report) -> None:
    """Of one measured call: all that it took is in the sums, and each collective was measured."""
    measured = report.measured
    assert measured is not None and report.timeline is not None
    assert measured.seconds == pytest.approx(sum(measured.nodes.values()))
    assert measured.seconds == pytest.approx(measured.compute + measured.communication)
    assert measured.compute == pytest.approx(sum(row.measured for row in measured.ops))
    assert measured.communication == pytest.approx(sum(one.measured for one in report.every))
    assert measured.communication == pytest.approx(sum(row.measured for row in report.traffic))
    assert report.every and all(one.measured > 0 for one in report.every)
    collectives = {one.node for one in report.every}
    computed = sum(span.end - span.start for span in report.timeline.spans if span.node not in collectives)
    assert sum(row.estimated for row in measured.ops) == pytest.approx(computed)
    assert Report.from_dict(report.to_dict()) == report
    assert report.scalars()["measured/communication"] == measured.communication


def of_stages(rank: int, world: int) -> tuple[list[str], Report]:
    """What differs from plain steps where rank 0 measures two of four calls; its report."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
    mode = spmd.DataParallel(mesh=mesh, axes={"stages": "pp"}, micro_batches=4, stages=["2"])
    torch.manual_seed(0)
    objects, step = CASE.build(), spmd.compile(CASE.step, parallel_mode=mode)
    for call in range(4):
        if call == 1 and rank == 0:
            step.profile(steps=2)
        result = step(*objects, *CASE.part(0, call))
    return all_unequal(plain_run(CASE, 1, 4)[-1:], [snapshot(result, objects)], 0, 1), step.report()


def test_each_run_of_a_stage_is_measured(ranks: Ranks) -> None:
    (differ, report), (differ_too, other) = ranks.run(2, of_stages)
    assert differ == differ_too == [] and other.measured is None
    measured = report.measured
    assert measured is not None and measured.calls == 2
    runs = {name.partition(": ")[0] for name in measured.nodes}
    assert runs >= {"update.0", *(f"{part}.0 of {k}" for part in ("forward", "backward") for k in range(4))}
    counts = {row.op: row.count for row in measured.ops}
    assert counts["forward.0: tanh"] == counts["backward.0: tanh_backward"] == 4
    estimated = {row.op: row.estimated for row in measured.ops}
    assert estimated["forward.0: tanh"] > 0 and all(row.measured > 0 for row in measured.ops)
    assert report.every and all(one.measured > 0 for one in report.every)
    assert sum(one.measured for one in report.every) == pytest.approx(measured.communication, rel=0.3)  # of medians


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_each_program_has_its_own_calls() -> None:
    compiled, (model, optimizer) = spmd.compile(CASE.step), CASE.build()
    batches = [CASE.part(0, 0), MLP(CASE.sizes, rows=3).part(0, 0)]
    for batch in batches:  # a program each, and another one once the optimizer has state
        compiled(model, optimizer, *batch)
    compiled(model, optimizer, *batches[0])
    compiled.profile(steps=5)
    calls = []
    for k in (0, 1, 0, 1, 1):
        compiled(model, optimizer, *batches[k])
        measured, program = compiled.report().measured, compiled.program
        assert measured is not None and program is not None
        assert measured.nodes.keys() <= {node.name for node in program.graph.nodes}
        calls.append(measured.calls)
    assert calls == [1, 1, 2, 2, 3] and len(compiled.programs) >= 2


def test_what_cannot_be_measured_is_refused() -> None:
    for steps in (-1, 1.5, True):
        with pytest.raises(ValueError, match="expected the number of steps to measure, got"):
            spmd.compile(CASE.step).profile(steps)
