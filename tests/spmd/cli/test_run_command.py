"""``spmd run``: ranks of one host and of two, one error for all, exit codes; and ``spmd --help`` without torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import spmd
from spmd.cache.surroundings import is_read
from spmd.cli.commands import main

from ...harness import programs
from ...harness.meeting import free_port

# Without torch, so that ranks start at once. ``follow``: a rank fails, and the other raises what its step does.
# ``left``: both raise one error, and rank 1, which would leave it to rank 0, is there first.
SCRIPT = """
import atexit, os, sys, time, types
rank, world, how = os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1]
sys.stdout.write(f"rank {rank} of {world}, {sys.argv}, {__name__}, threads {os.environ['OMP_NUM_THREADS']}\\n")
class RankFailedError(Exception): ...
sys.modules["passes.errors"] = types.SimpleNamespace(RankFailedError=RankFailedError)
if how == "all":
    raise ValueError(f"bad configuration")
if how == "one" and rank == "1":
    raise ValueError("bad row")
if how == "follow" and rank == sys.argv[2]:
    atexit.register(open(sys.argv[3], "w").close)  # its error has been printed
    raise ValueError("bad row")
if how == "follow" and rank == "1":
    time.sleep(60)  # until its host has lost rank 0's
if how == "follow":
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    raise RankFailedError("rank 1 failed")
if how == "left" and rank == "0":
    while not os.path.exists(os.path.join(os.environ["SPMD_RUN_FOLDER"], "failed-0")):
        time.sleep(0.01)
    raise ValueError("no room")
if how == "left":
    from spmd.ranks.printed_errors import leave_to_first_rank
    sys.excepthook = lambda *error: (time.sleep(0.5), sys.__excepthook__(*error))  # as one that looks for source lines
    leave_to_first_rank(error := ValueError("no room"), first=0, rank=1)
    raise error
if how == "message":
    sys.exit("nothing to train")
if how == "killed" and rank == "0":
    os.kill(os.getpid(), 9)
if how in ("again", "again, other") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("bad start")
if how == "again, other":
    os._exit(3)
if how in ("one", "killed", "wait"):
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def environment() -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")}
    return ours | {"PYTHONPATH": str(programs.ROOT)}


def launched(*options: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "spmd", "run", *options], environment() | variables)


@pytest.mark.processes
@pytest.mark.parametrize(
    "how, code, expected",
    [
        ("well", 0, ""),
        ("all", 1, "ValueError: bad configuration\non rank "),
        ("one", 1, "ValueError: bad row\non rank 1 of 2\n"),
        ("left", 1, "ValueError: no room\non rank 1 of 2\n"),
        ("message", 1, "nothing to train\n"),
        ("killed", 137, "spmd run: rank 0 was killed by signal 9 (SIGKILL)\n"),
    ],
)
def test_ranks_of_one_host(how: str, code: int, expected: str, script: Path) -> None:
    done = launched("-n", 2, script, how, "--steps", 3)
    assert (done.returncode, done.stderr.count("Traceback")) == (code, int("ValueError" in expected))
    assert expected in done.stderr and len(done.stderr.splitlines()) <= 6, done.stderr
    if how == "well":
        threads = max(1, min(len(os.sched_getaffinity(0)) // 2, 8))
        lines = [f"rank {k} of 2, {[str(script), how, '--steps', '3']}, __main__, threads {threads}" for k in (0, 1)]
        assert sorted(done.stdout.splitlines()) == lines


@pytest.mark.processes
def test_ranks_that_start_again(script: Path) -> None:
    done = launched("-n", 2, "--max-restarts", 1, script, "again")
    assert done.returncode == 0 and done.stderr.count("ValueError: bad start") == 1
    assert len(done.stdout.splitlines()) in (3, 4)  # torchrun may end a rank before it has printed


@pytest.mark.processes
def test_the_last_start_has_a_reason_too(script: Path) -> None:
    done = launched("-n", 1, "--max-restarts", 1, script, "again, other")
    assert done.returncode == 3 and done.stderr.count("ValueError: bad start") == 1
    assert done.stderr.endswith("spmd run: rank 0 ended with exit code 3\n"), done.stderr


@pytest.mark.processes
def test_hosts_that_never_join(script: Path) -> None:
    """The host that is there is named; without a rendezvous, torch counts those that have joined."""
    port = free_port()
    hosts = "-n", 1, "--nnodes", 2, "--local-addr", "node7"
    found = launched(*hosts, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "join_timeout=1", script, "well")
    assert found.returncode == 1 and found.stderr.startswith(
        f"spmd run: expected 2 hosts at localhost:{port}, 1 joined within 1 s: node7; start the same command on"
    ), found.stderr
    by_address = "--node-rank", 0, "--master-addr", "localhost", "--master-port", port, "--rdzv-conf", "timeout=1"
    found = launched(*hosts, *by_address, script, "well")
    assert found.returncode == 1 and "clients. 1/2 clients joined.); start the same command" in found.stderr
    assert len(found.stderr.splitlines()) == 1, found.stderr


def wait_until_bound(endpoint: str) -> None:
    host, port = endpoint.split(":")
    for _ in range(6000):
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.01)
    raise TimeoutError(f"nothing listens on {endpoint}")


@pytest.mark.processes
@pytest.mark.parametrize("fails", [0, 1])
def test_hosts_that_find_each_other(fails: int, script: Path, tmp_path: Path) -> None:
    """The host that starts first has rank 0 and torchrun's store: once it has ended, the other one has lost that."""
    endpoint = f"localhost:{free_port()}"
    arguments = [script, "follow", fails, tmp_path / "failed"]
    variables = {"NNODES": "2", "NPROC_PER_NODE": "1", "RDZV_BACKEND": "c10d", "RDZV_ENDPOINT": endpoint}  # by Kubeflow
    with ThreadPoolExecutor() as pool:
        one = pool.submit(launched, "-n", 1, "--nnodes", 2, "--rdzv-endpoint", endpoint, *arguments)
        wait_until_bound(endpoint)
        two = pool.submit(launched, *arguments, **{f"PET_{name}": value for name, value in variables.items()})
        done = [one.result(), two.result()]
    assert [each.returncode for each in done] == [1, 1]
    errors = [each.stderr for each in done]
    where = [text.endswith(f"ValueError: bad row\non rank {fails} of 2\n") for text in errors]
    assert sorted(where) == [False, True], errors
    own, other = (errors[where.index(is_own)] for is_own in (True, False))
    assert own.count("Traceback") == 1, own
    expected = ["if a rank of another host has failed, that host prints why\n", "RankFailedError: rank 1 failed\n"]
    assert "Traceback" not in other and other.endswith(expected[fails]), other


@pytest.mark.processes
@pytest.mark.parametrize("end, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_all_ranks_quietly(end: signal.Signals, code: int, script: Path) -> None:
    command = [sys.executable, "-u", "-m", "spmd", "run", "-n", "2", str(script), "wait"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        for _ in range(2):
            program.stdout.readline()
        time.sleep(0.2)
        program.send_signal(end)
        errors = program.communicate(timeout=60)[1].decode()
    assert (program.returncode, errors) == (code, "")


def test_what_is_no_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "-n", "2", "nothing.py"])
    assert end.value.code == 2 and "expected a Python file, got 'nothing.py'" in capsys.readouterr().err


def test_hosts_of_slurm_that_would_train_by_themselves_are_refused(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    with pytest.raises(SystemExit) as end:
        main(["run", "-n", "2", str(script)])
    assert end.value.code == 2 and "pass --nnodes 2 and --rdzv-endpoint HOST:PORT" in capsys.readouterr().err


def test_torch_logs_errors_alone(script: Path) -> None:
    """It reads the variable once: peers that are gone would be printed with its own stack behind a rank's error."""
    code = (
        "import os, sys, types; from spmd.cli.commands import main; "
        "end = lambda name, *_: sys.exit(os.environ['TORCH_CPP_LOG_LEVEL']) if name == 'torch' else None; "
        f"sys.meta_path.insert(0, types.SimpleNamespace(find_spec=end)); main(['run', '-n', '1', {str(script)!r}])"
    )
    ours = {k: v for k, v in environment().items() if k != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=ours, capture_output=True, text=True)
    assert done.stderr == "ERROR\n"


@pytest.mark.parametrize("command", ["--help", "--version", "run --help"])
def test_help_and_version_do_not_import_torch(command: str) -> None:
    code = (
        "import sys, atexit; from spmd.cli.commands import main; "
        f"atexit.register(lambda: print('torch' in sys.modules)); main({command.split()})"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("False\n"), done.stderr
    assert command != "--version" or done.stdout.startswith(f"spmd {spmd.__version__}\n")


@pytest.mark.processes
@pytest.mark.parametrize("launcher", ["spmd run", "torch.distributed.run"])
def test_no_variable_that_each_launch_sets_anew_is_in_the_key_of_a_kept_step(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import json, os\nprint(json.dumps(dict(os.environ)))")
    command = ["-m", *launcher.split(), "--nproc-per-node", 1, script]
    found = [json.loads(programs.run(command, environment()).stdout.splitlines()[-1]) for _ in "12"]
    assert found[0]["TORCHELASTIC_RUN_ID"] and found[0] != found[1]
    first, second = ({name: value for name, value in each.items() if is_read(name)} for each in found)
    assert first == second
