"""``python -m spmd calibrate``: measurements, the file, the printed tables, and errors in its arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import passes
import spmd.cli.calibrate
from passes import Axis, Mesh, Table
from passes.analysis.collective_algorithms import ALGORITHMS, algorithms_along
from spmd.cli import calibrate_command
from spmd.cli.calibrate import calibrate
from spmd.cli.commands import main
from tests.harness.pool import Ranks

SIZES = (4096, 65536)
SHARED = Axis("dp", 2, "0", shared=True)


def measured(rank: int, world: int) -> tuple[Table, list[str]]:
    """The table of 2 x 2 ranks, and the reported progress."""
    reports: list[str] = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return calibrate(mesh, SIZES, 2, lambda what, done, total: reports.append(f"{done}/{total} {what}")), reports


def test_every_algorithm_of_every_axis_is_measured_and_all_ranks_know_the_same(ranks: Ranks) -> None:
    (table, reports), *others = ranks.run(4, measured)
    assert all(other == (table, reports) for other in others)
    assert [(link.axis, link.ranks, link.backend) for link in table.links] == [("dp", 2, "gloo"), ("tp", 2, "gloo")]
    for link in table.links:
        assert set(link.curves) == {(k, each) for k in ALGORITHMS for each in algorithms_along(SHARED, k, "gloo")}
        for points in link.curves.values():
            assert [point.bytes for point in points] == list(SIZES)
            assert all(point.seconds > 0 for point in points)
    assert all(rate > 0 for rate in table.compute.values())
    families = {"matmul", "memory", "transcendental", "launches", "views"}
    assert {name.split()[0] for name in table.compute} == families
    assert {"matmul float32", "matmul float32 64", "matmul bfloat16 256", "memory 65536"} <= table.compute.keys()
    assert reports[0] == "0/17 all_reduce over dp, 4,096 bytes" and reports[-1] == "17/17 done"


def measured_as_nccl(rank: int, world: int) -> Table:
    """The table of two ranks whose backend is described as NCCL."""
    described = spmd.cli.calibrate.describe
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    try:
        spmd.cli.calibrate.describe = lambda mesh: Mesh(tuple(replace(a, backend="nccl") for a in described(mesh).axes))
        return calibrate(mesh, SIZES, 2)
    finally:
        spmd.cli.calibrate.describe = described


def test_on_nccl_coalesced_collectives_are_measured(ranks: Ranks) -> None:
    table, other = ranks.run(2, measured_as_nccl)
    assert table == other
    (link,) = table.links
    known = {(kind, each) for kind, algorithms in ALGORITHMS.items() for each in algorithms}
    assert set(link.curves) == {(kind, each) for kind, each in known if each in ("native", "coalesced")}
    assert all(point.seconds > 0 for points in link.curves.values() for point in points)


@pytest.mark.processes
def test_the_command_starts_ranks_and_writes_a_table(tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "costs.json"
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--rounds", "1", "--max-bytes", "4096", "--out", str(out), "--json"])
    assert ended.value.code == 0
    assert json.loads(capfd.readouterr().out) == json.loads(out.read_text())
    calibrate_command._print(Table.read(out), out)
    output = capfd.readouterr().out
    link = Table.read(out).links[0]
    assert (link.axis, link.ranks) == ("dp", 2)
    assert "dp: 2 ranks, gloo" in output and "GFLOP/s" in output
    assert len(passes.default(table=Table.read(out))) == len(passes.default())
    assert {kind for kind, _ in link.curves} == set(ALGORITHMS)


@pytest.mark.parametrize("arguments, message", [
    (["--ranks", "1"], "expected a mesh of all ranks, at least 2, got (1,) for 1 ranks"),
    (["--ranks", "4", "--mesh", "2x3"], "got (2, 3) for 4 ranks"),
    (["--mesh", "two"], "expected --mesh as numbers of ranks, such as 2x8, got 'two'"),
    (["--ranks", "4", "--mesh", "2x2", "--axes", "dp"], "expected a name for each of 2 axes, got 'dp'"),
    (["--axes", "dp,tp"], "expected a name for each of 1 axes, got 'dp,tp'"),
])  # fmt: skip
def test_arguments_that_do_not_fit_together_are_refused(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", *arguments])
    assert message in capsys.readouterr().err
