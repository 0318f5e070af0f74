"""The training program as a user runs it: on one rank, on two, with wrong options, and ended by Ctrl-C."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import train_gpt
from safetensors.torch import load_file
from torch.utils._pytree import tree_map

import spmd
from tests.harness import programs
from tests.harness.meeting import free_port
from tests.harness.pool import RankError, Ranks

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "train_gpt.py")
LAUNCH = ["-m", "spmd", "run", "-n", "2"]
TINY = (
    "--width 16 --layers 1 --heads 2 --context 16 --steps 6 --log-every 1 --checks 2 --sample-bytes 20 "
    "--text-bytes 200000 --device cpu --dtype float64"
).split()


def environment() -> dict[str, str]:
    """Our environment, without the variables that make this process a rank."""
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SPMD_DUMP")}
    return ours | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def run(command: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run one of our programs to its end, in a process that has imported torch."""
    return programs.run([*command, *options], environment())


def losses(output: str) -> list[str]:
    return re.findall(r"step \d+/6 +loss (\d+\.\d{3}) bits/byte", output)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What one rank with twice the batch prints, and its dumps."""
    dump = tmp_path_factory.mktemp("alone")
    done = run([EXAMPLE], *TINY, "--batch", "8", "--dump", str(dump))
    assert done.returncode == 0, done.stderr
    return done.stdout, dump


def test_one_rank_prints_what_is_promised(alone: tuple[str, Path]) -> None:
    printed, dump = alone
    assert len(losses(printed)) == 6
    assert re.search(r"loss \d\.\d+ bits/byte +[\d,]+ tokens/s +\d+ ms/step", printed)
    assert re.search(r"held-out text, bits per byte: \d\.\d+ before, \d\.\d+ after training", printed)
    assert re.search(r"8\.000 for a uniform guess, \d\.\d+ for a table of byte frequencies", printed)
    assert "a sample" in printed and "def " in printed
    assert str(dump) in printed


def test_the_graphs_of_every_stage_are_where_it_says(alone: tuple[str, Path]) -> None:
    names = {path.name for path in alone[1].rglob("*") if "train_step" in str(path)}
    assert {"00_capture.py", "01_partition.py", "report.json"} <= names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        more = ["replicate", "default"] if metafunc.config.getoption("--exhaustive") else []
        metafunc.parametrize("mode", ["fully_shard", *more])


def printed_by_main(rank: int, world: int, options: list[str]) -> str:
    """What the program prints on a rank."""
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as printed:
        patched.setenv("RANK", str(rank))
        patched.setenv("WORLD_SIZE", str(world))
        train_gpt.main(options)
    return printed.getvalue()


def test_two_ranks_and_one_with_twice_the_batch_print_the_same_losses(
    mode: str, alone: tuple[str, Path], ranks: Ranks, tmp_path: Path
) -> None:
    options = [*TINY, "--batch", "4", "--mode", mode, "--dump", str(tmp_path)]
    first, second = ranks.run(2, printed_by_main, options)
    assert losses(first) == losses(alone[0])
    assert first.count("a sample") == 1
    assert second == ""  # rank 0 alone speaks


def test_the_plain_step_prints_the_same_losses_too(alone: tuple[str, Path]) -> None:
    done = run([EXAMPLE], *TINY, "--batch", "8", "--eager")
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == losses(alone[0])


def test_the_ranks_share_one_global_batch() -> None:
    def draw(rows: int, rank: int, ranks: int) -> torch.Tensor:
        data = bytes(range(256)) * 4
        return torch.stack(train_gpt.Batches(data, rows, 16, rank, ranks, torch.device("cpu"), seed=1).draw())

    parts = [draw(7, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat(parts, dim=1), draw(7, 0, 1))
    x, y = parts[0]
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_the_schedule_warms_up_and_falls() -> None:
    factors = [train_gpt.warmup_then_cosine(100)(done) for done in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert math.isclose(factors[-1], 0.05, rel_tol=0.02)


def test_an_optimizer_in_parts_is_asked_for() -> None:
    options = train_gpt.parse(["--shard-optimizer"])
    assert train_gpt.parallel_mode(options, None, train_gpt.gpt.GPT(options.model)).shard_optimizer


def test_help_shows_every_option_once() -> None:
    done = run([EXAMPLE], "--help")
    assert done.returncode == 0
    assert done.stdout.count("usage:") == 1
    for option in "text width layers heads context batch steps lr mode device dtype seed dump eager resume".split():
        assert f" --{option} " in done.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--mode sideways", "'replicate', 'fully_shard', 'default'"),
        ("--steps 0", "0 is not above zero"),
        ("--width 10 --heads 4", "a width of 10 does not divide into 4 heads"),
        ("--mesh 4", "4 is not of the form 2x4"),
        ("--mode fully_shard --shard-optimizer", "--shard-optimizer goes with --mode replicate"),
        ("--tensor-parallel", "--mesh and --tensor-parallel go together"),
        ("--sequence-parallel", "--sequence-parallel needs both"),
    ],
)
def test_a_wrong_option_is_refused_with_a_sentence(
    options: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train_gpt.parse(options.split())
    assert ended.value.code == 2
    assert sentence.replace("'", "") in capsys.readouterr().err.replace("'", "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_text_that_is_not_there_is_one_sentence_from_all_ranks(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first to exit makes the launcher end the others: they leave rank 0 time to print."""
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as ended:
        train_gpt.main(["--text", str(tmp_path / "nowhere")])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and "Traceback" not in printed.err
    assert (printed.err.count("there is no text at"), len(slept)) == ((1, 0) if rank == 0 else (0, 1))


def run_until(
    rank: int, world: int, options: list[str], folder: Path, ended: int = 0, end: signal.Signals = signal.SIGTERM
) -> str:
    """What is printed by a run that evaluates nothing, which would compile another program.

    Its second rank gets a signal when it draws the batch of the step ``ended``, if that is given.
    """
    draw, drawn = train_gpt.Batches.draw, []

    def counts(batches: train_gpt.Batches) -> tuple[torch.Tensor, torch.Tensor]:
        drawn.append(batches)
        if rank == 1 and len(drawn) == ended:
            os.kill(os.getpid(), end)
        return draw(batches)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_gpt, "held_out_bits", lambda *_: 0.0)
        patched.setattr(train_gpt.Batches, "draw", counts)
        return printed_by_main(rank, world, [*options, "--sample-bytes", "0", "--checkpoints", str(folder)])


def test_a_run_that_was_ended_or_killed_goes_on_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    more = "--batch 4 --mode fully_shard --save-every 2 --resume --dump".split()
    options = [*TINY, *more, str(tmp_path / "d")]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first, _ = ranks.run(2, run_until, options, whole)  # there is nothing to resume yet
    ended, _ = ranks.run(2, run_until, options, parts, 3, signal.SIGTERM)
    assert f"ended by SIGTERM after step 3, saved in {parts}" in ended
    with pytest.raises(RankError, match="exit code -9"):
        ranks.run(2, run_until, options, parts, 2, signal.SIGKILL)
    assert {path.name for path in parts.iterdir()} == {"step-3", "step-4"}
    last, _ = ranks.run(2, run_until, options, parts)
    assert "resumed after step 4" in last and losses(ended) + losses(last) == [*losses(first)[:3], *losses(first)[4:]]
    assert contents(whole / "step-6") == contents(parts / "step-6")


def contents(checkpoint: Path, files: int = 3) -> dict[str, Any]:
    """What each file holds, as plain numbers: nan is not among them. Without the folder's name, which is random."""

    def plain(leaf: Any) -> Any:
        return leaf.tolist() if isinstance(leaf, torch.Tensor) and not leaf.is_meta else str(leaf)

    found = {path.name: torch.load(path) for path in checkpoint.glob("data-*/values.pt")}
    found |= {path.name: load_file(path) for path in checkpoint.glob("data-*/*.safetensors")}
    assert len(found) == files
    assert checkpoint / found["values.pt"].pop("folder") in [*checkpoint.iterdir()]
    return tree_map(plain, found)  # type: ignore[no-any-return]


def state_in(checkpoint: Path) -> dict[str, Any]:
    """The model, and the place in the data, as one process loads them."""
    options = train_gpt.parse(TINY)
    model = train_gpt.gpt.GPT(options.model).double()
    batches = train_gpt.Batches(bytes(64), 1, 16, 0, 1, torch.device("cpu"), 0)
    assert spmd.load(checkpoint, model=model, batches=batches) == 6
    return {"batches": batches.state_dict(), **model.state_dict()}


@pytest.mark.exhaustive
def test_a_run_goes_on_with_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank has as many rows as make up the same global batch, of twelve."""
    options = [*TINY, "--checks", "1", "--mode", "fully_shard", "--save-every", "6", "--dump", str(tmp_path / "d")]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    (first,) = ranks.run(1, printed_by_main, [*options, "--batch", "12", "--checkpoints", str(whole)])
    options += ["--resume"]
    four, *_ = ranks.run(4, run_until, [*options, "--batch", "3"], parts, 2)
    two, _ = ranks.run(2, run_until, [*options, "--batch", "6"], parts, 2)
    three, *_ = ranks.run(3, printed_by_main, [*options, "--batch", "4", "--checkpoints", str(parts)])
    assert [losses(each) for each in (four, two, three)] == [losses(first)[k : k + 2] for k in (0, 2, 4)]
    torch.testing.assert_close(state_in(parts), state_in(whole), rtol=1e-9, atol=1e-12)


def rank_of(launcher: int, rank: int) -> int:
    """The process that is a rank of a launcher."""
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for child in children.read_text().split():
            if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
                return int(child)
    raise LookupError(f"{launcher} has no rank {rank}")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_torchrun_restarts_a_run_whose_ranks_are_killed(ranks: Ranks, tmp_path: Path) -> None:
    """It goes on where it last saved; SIGTERM ends it with status 0, and another run goes on from there."""
    more = "--batch 4 --checks 1 --mode fully_shard --save-every 2 --resume --steps 60".split()
    options = [*TINY, *more, "--dump", str(tmp_path / "d"), "--checkpoints"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(2, printed_by_main, [*options, str(whole)])
    command = [sys.executable, *LAUNCH, "--max-restarts", "4", EXAMPLE, *options, str(parts)]
    ends = {5: (1, signal.SIGKILL), 21: (0, signal.SIGKILL), 30: (None, signal.SIGTERM)}
    resumed = []
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if found := re.match(r"resumed after step (\d+)", line):
                resumed.append(int(found[1]))
            if (found := re.match(r"step (\d+)/60", line)) and int(found[1]) >= min(ends, default=61):
                victim, end = ends.pop(min(ends))
                os.kill(program.pid if victim is None else rank_of(program.pid, victim), end)
    assert program.returncode == 0 and not ends
    assert len(resumed) == 2 and resumed[0] >= 4 and resumed[1] >= 20, resumed
    ranks.run(2, printed_by_main, [*options, str(parts)])
    assert contents(whole / "step-60") == contents(parts / "step-60")


@pytest.mark.timeout(900)  # on a loaded machine: ranks that import torch start four times, one after the other
def test_hosts_join_and_fail_and_no_step_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    """Two launchers of a rank each: the second one joins after three steps, and is killed with its rank two later.

    Losses, and with equal bits all that is saved in the end, are those of one rank that nothing happens to.
    """
    options = [*TINY, *"--checks 1 --steps 7 --batch 8 --same-bits --save-every 7".split()]
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
    command = ["-m", "spmd", "run", "-n", "1", "--nnodes", "1:2", "--max-restarts", "1", "--rdzv-conf"]
    command += [
        conf,
        "--rdzv-endpoint",
        f"localhost:{free_port()}",
        str(ROOT / "tests" / "examples" / "elastic_gpt.py"),
    ]
    dump = ["--dump", str(tmp_path / "d")]
    command += [*options, *dump, "--elastic", "--checkpoints", str(tmp_path / "c")]
    ours = environment() | {"JOINED": str(tmp_path / "joined")}
    ours["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    with ThreadPoolExecutor() as pool:
        staying = pool.submit(programs.run, command, ours, 500)
        while not staying.done() and not (tmp_path / "joined").exists():
            time.sleep(0.05)
        fails, stays = programs.run(command, ours | {"FAILS": "yes"}, 500), staying.result()
    assert (stays.returncode, fails.returncode) == (0, -signal.SIGKILL), stays.stderr
    found = stays.stdout + fails.stdout
    assert sorted(re.findall(r"resumed after step (\d+)", found)) == ["3", "5"], found  # either may be rank 0
    (whole,) = ranks.run(1, printed_by_main, [*options, *dump, "--checkpoints", str(tmp_path / "one")])
    assert contents(tmp_path / "c" / "step-7", 2) == contents(tmp_path / "one" / "step-7", 2)
    assert sorted(re.findall(r"step (\d)/7 +loss (\S+)", found)) == re.findall(r"step (\d)/7 +loss (\S+)", whole)


@pytest.mark.parametrize(
    ("command", "moment"),
    [
        pytest.param([sys.executable, EXAMPLE], "text: ", id="one rank that compiles"),
        pytest.param(
            [sys.executable, *LAUNCH, EXAMPLE], "step 3/", id="two ranks that train", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_ctrl_c_ends_it_with_a_message(command: list[str], moment: str, tmp_path: Path) -> None:
    endless = [*command, *TINY, "--steps", "1000000", "--dump", str(tmp_path)]
    with subprocess.Popen(
        endless, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith(moment):
                break
        program.send_signal(signal.SIGINT)
        printed, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert printed.endswith("Stopped by Ctrl-C.\n")
    assert "Traceback" not in errors
