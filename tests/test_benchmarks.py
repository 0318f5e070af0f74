"""The benchmarks run, and their tables and JSON have the figures they promise."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from benchmarks import checkpoints, compiler, publishing, resident, roles
from benchmarks.peers import memory
from benchmarks.peers.models import SMOKE, build
from benchmarks.peers.network import NoNetworkError, connect
from benchmarks.peers.race import Result, compare
from benchmarks.peers.systems import System, eager
from benchmarks.peers.table import speedup, table
from benchmarks.peers.team import SystemFailedError
from tests.harness import programs
from tests.harness.fake import fake_world
from tests.harness.pool import PRELOADED, Ranks

pytestmark = pytest.mark.processes


def test_calls_measures_the_overhead_of_a_call(tmp_path: Path) -> None:
    command = ["benchmarks/calls.py", "--parameters", "4", "--rounds", "40", "--json", tmp_path / "out"]
    run = programs.run(command)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert "an empty loop over the same 16 tensors" in found
    assert found["the checks of a call"] < found["a call"]
    assert all(name in run.stdout for name in found)


def checkpoints_main(rank: int, world: int, out: Path) -> None:
    checkpoints.main(["--width", "8", "--layers", "1", "--rounds", "1", "--json", str(out)])


def test_checkpoints_are_measured_beside_dcp(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, checkpoints_main, tmp_path / "out")
    found = json.loads((tmp_path / "out").read_text())
    assert list(found) == ["spmd.save", "DCP save", "spmd.load", "DCP load", "spmd.export"]
    assert all(seconds > 0 for seconds, _ in found.values())


def publishing_main(rank: int, world: int, out: Path) -> None:
    sizes = ["--width", "16", "--layers", "1", "--rounds", "1", "--steps", "2"]
    publishing.main([*sizes, "--json", str(out)])


@pytest.mark.costly("compiles a GPT on two ranks")
def test_publications_are_measured_beside_steps_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, publishing_main, tmp_path / "out")
    found = json.loads((tmp_path / "out").read_text())
    assert {"a step", "a step with spmd.publish", "spmd.publish until it is complete"} <= found.keys()
    assert all(value > 0 for value in found.values())
    assert found["MB of its segments"] > 2 * found["MB of parameters of a rank"] > 0


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh processes are forked from the server of the ranks: to import torch anew would take most of the time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


@pytest.mark.usefixtures("forked")
def test_roles_are_raced_beside_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["", "sequences", "--smoke", "--rounds", "1", "--json", str(tmp_path / "out")])
    roles.main()
    found = json.loads((tmp_path / "out").read_text())["sequences"]
    assert list(found) == ["one rank", "one rank, twice at once", "gather"]
    assert all(len(each["ms"]) == 1 and each["peak"] > 0 for each in found.values())


def test_gpu_day_runs_without_a_gpu(tmp_path: Path) -> None:
    own = ["--systems", "eager", "spmd", "spmd, CUDA graphs", "--dtypes", "fp32"]
    own += ["--parts", "steps", "stages", "--clears", "first"]
    run = programs.run(["-m", "benchmarks.gpu_day", "--smoke", "--out", tmp_path / "day", *own])
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "day.json").read_text())
    rows = found["steps"]["smoke fp32, cleared first"]
    assert [row["system"] for row in rows] == own[1:4] and not any(row["failed"] for row in rows)
    assert rows[1]["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)
    assert [(row["schedule"], row["failed"]) for row in found["stages"]] == [("1f1b", "")]
    assert "spmd, CUDA graphs" in (tmp_path / "day.html").read_text()


def test_compiler_measures_all_stages(tmp_path: Path) -> None:
    run = programs.run(["-m", "benchmarks.compiler", "--smoke", "--json", tmp_path / "out"])
    assert run.returncode == 0, run.stdout + run.stderr
    (found,) = json.loads((tmp_path / "out").read_text())
    assert {"capture: trace", "partition", "check after each pass", "pass UpdateInPlace"} <= found["seconds"].keys()
    assert found["nodes"]["partitioned"] > found["nodes"]["captured"] > 100
    assert all(name in run.stdout for name in ("capture: trace", "total per layer", "GB, peak"))


@pytest.mark.parametrize("power", [1.0, 1.5])
def test_the_exponent_of_nodes_in_seconds_is_found(power: float) -> None:
    found = [{"nodes": {"final": nodes}, "total": 3e-3 * nodes**power} for nodes in (100, 400, 900)]
    assert compiler.exponent(found) == pytest.approx(power) and compiler.exponent(found[:1]) is None


def test_a_share_of_many_ranks_is_estimated_without_them() -> None:
    options = ["--ranks", "64", "--layers", "1", "--width", "512", "--tokens", "128", "--experts", "8"]
    run = programs.run(["-m", "benchmarks.many_ranks", *options])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 layers of width 512, 128 tokens a rank, 64 H100s:" in run.stdout
    assert "1 layers of 8 experts, sorted of width 512, 128 tokens a rank, 64 H100s:" in run.stdout
    assert re.search(r"estimated step \d+ ms, of which [\d.]+ ms \([\d.]+%\) are exposed communication", run.stdout)


def test_estimates_stand_beside_measured_steps(tmp_path: Path) -> None:
    run = programs.run(["-m", "benchmarks.estimates", "--smoke", "--json", tmp_path / "out"])
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "out").read_text())
    (row,) = found["rows"]
    assert row["measured"] >= row["fastest"] > 0 and row["estimated"] > row["exposed"] > 0
    assert "matmul float32 64" in found["compute"] and "ratio" in run.stdout


@pytest.mark.parametrize(("clears", "systems"), [
    ("kept", ["DDP", "FSDP2 per block, fused AdamW", "spmd, replicate"]),
    pytest.param("last", ["*"], marks=pytest.mark.exhaustive),
    pytest.param("first", ["*"], marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_peers_measures_systems(clears: str, systems: list[str], tmp_path: Path) -> None:
    options = ["--smoke", "--clears", clears, "--systems", *systems]
    run = programs.run(["-m", "benchmarks.peers", *options, "--json", tmp_path / "out"])
    assert run.returncode == 0, run.stdout + run.stderr
    (race,) = json.loads((tmp_path / "out").read_text())["races"]
    found = {each["system"]: each for each in race["systems"]}
    assert {"DDP", "FSDP2 per block, fused AdamW", "spmd, replicate"} <= found.keys()
    assert not any(each["failed"] for each in found.values())
    assert all(name in run.stdout for name in found)
    parameters = sum(each.nbytes for each in build(SMOKE, torch.device("cpu")).parameters())
    for name, each in found.items():
        assert each["first_seconds"] > each["median"] > 0
        assert each["peak_bytes"] > 3 * parameters / 2  # of a half of each, itself and AdamW's two averages
        by_messages = each["family"] != "no communication" and not name.startswith("spmd")  # which shares memory
        assert (each["received_bytes"] > 0) == by_messages, name
    assert found["DDP"]["received_bytes"] == pytest.approx(parameters, rel=0.1)  # of two ranks, each gradient once


def test_auto_is_raced_beside_all_styles(tmp_path: Path) -> None:
    run = programs.run(["-m", "benchmarks.auto", "--smoke", "--adapt", "--json", tmp_path / "out"])
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "out").read_text())
    (times,) = found["ms"].values()
    assert list(times) == ["spmd.Auto", "replicate"]
    assert all(each > 0 for each in times.values())
    assert "beside the best" in run.stdout


@pytest.mark.usefixtures("forked")
def test_resident_memory_is_that_of_a_whole_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--smoke", "--systems", "spmd, replicate", "--clears", "first", "--steps", "2"]
    monkeypatch.setattr("sys.argv", ["", *options, "--json", str(tmp_path / "out")])
    resident.main()
    (found,) = json.loads((tmp_path / "out").read_text())["first"]
    parameters = sum(each.nbytes for each in build(SMOKE, torch.device("cpu")).parameters())
    figures = found["bytes"]
    assert figures["PSS"] >= figures["later"] > figures["planned"] > figures["parameters"] == parameters
    assert figures["gradients"] == parameters and 2 * parameters <= figures["optimizer"] < 3 * parameters
    assert figures["rest"] == figures["later"] - figures["planned"] and figures["VmHWM"] > 0 < figures["idle"]
    assert found["system"] in capsys.readouterr().out


@pytest.mark.usefixtures("alone")
def test_buckets_of_ddp_beside_gradients_count_as_memory() -> None:
    def used() -> int:
        return memory.peak(lambda: None, torch.device("cpu"))

    with fake_world(1):
        model = torch.nn.Linear(2000, 1000)
        before = used()
        replica = DistributedDataParallel(model)
        assert used() - before == pytest.approx(4 * 2_001_000, rel=0.1)
        del replica
        assert used() == pytest.approx(before, rel=0.1)


def test_a_system_with_other_losses_fails() -> None:
    compare([5.5, 5.4], [5.5, 5.4 * (1 + 1e-6)])
    with pytest.raises(SystemFailedError, match=r"the loss of step 2 is 5\.300000, but 5\.400000"):
        compare([5.5, 5.3], [5.5, 5.4])


def test_the_best_peer_is_the_fastest_of_the_same_family_that_did_not_fail() -> None:
    peers = [System("slow", "a", eager), System("wrong", "a", eager), System("other", "b", eager)]
    slow, wrong, other = (Result(peer, seconds=[took]) for peer, took in zip(peers, (4.0, 1.0, 1.0), strict=True))
    wrong.failed = "wrong: a loss"
    mine = Result(System("mine", "a", eager, ours=True), seconds=[1.0, 2.0, 3.0])
    results = [slow, wrong, other, mine]
    assert speedup(mine, results) == 2.0
    assert speedup(wrong, results) is None
    console = Console(width=140)
    with console.capture() as shown:
        console.print(table("title", results, counts_wire=True))
    assert "2.00x" in shown.get()
    assert "wrong: wrong: a loss" in shown.get()


def test_the_hosts_of_a_network_are_removed() -> None:
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(connect("1gbit"))
        except NoNetworkError as missing:
            pytest.skip(str(missing))
        assert "rate 1Gbit" in network.on(1, "tc", "qdisc")
        assert all(map(runs, network.hosts))
    assert not any(map(runs, network.hosts))
    with pytest.raises(NoNetworkError, match="fast") as refused, connect("fast"):
        pass  # not a rate to tc
    (host,) = map(int, re.findall(r"--target (\d+)", str(refused.value)))
    assert not runs(host)


def runs(process: int) -> bool:
    return Path(f"/proc/{process}").exists()
