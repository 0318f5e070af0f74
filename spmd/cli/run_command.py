"""Start a training script on ranks: torchrun underneath, quiet, and one error instead of one from each rank.

For example:

    spmd run -n 2 train.py --steps 100
    spmd run -n 8 --nnodes 2 --rdzv-endpoint host0:29500 train.py    (the same on both hosts)
    spmd run -n 4 -m package.train

Where PET_NNODES and others are set, as by Kubeflow, they are the defaults. Options after the script are the script's.
Output of all ranks goes to the terminal. The first rank of a host to raise prints its traceback; others that raise the
same, or because that one is gone, print nothing. The exit code is that of the rank that failed, 130 after Ctrl-C. After
SIGTERM, which the ranks get, too, it is 0 if all of them end with 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from .rank import ENDED, FAILED, FOLDER, FOLLOWED

_PASSED_ON = {
    "nnodes": "hosts, such as 2, or 1:4 with hosts that join and leave (1)",
    "node-rank": "the number of this host, needed without --rdzv-endpoint only",
    "rdzv-endpoint": "where the hosts find each other: HOST:PORT, on one of them",
    "rdzv-backend": "c10d, etcd or static (c10d with --rdzv-endpoint)",
    "rdzv-id": "a name of the job, the same on all hosts",
    "rdzv-conf": "more settings of the rendezvous, KEY=VALUE,KEY=VALUE",
    "master-addr": "the host of rank 0, without --rdzv-endpoint",
    "master-port": "a port of it",
    "local-addr": "the address of this host",
    "max-restarts": "times that all ranks start again after one has failed (0)",
}
_MOST_THREADS = 8


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``run`` to its parser."""
    command.add_argument(
        "-n", "--nproc-per-node", metavar="N", help="ranks on this host; by default one for each GPU, or one"
    )
    for name, purpose in _PASSED_ON.items():
        command.add_argument(f"--{name}", metavar=name.rpartition("-")[2].upper(), help=purpose)
    command.add_argument("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    command.add_argument("script", metavar="SCRIPT", help="a Python file")
    command.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the script on all ranks of this host; returns the exit code."""
    if not arguments.module and not Path(arguments.script).is_file():
        parser.error(f"expected a Python file, got {arguments.script!r}; a module is started with -m")
    hosts = os.environ.get("SLURM_STEP_NUM_NODES", "1")
    if hosts != "1" and _is_alone(arguments):
        parser.error(
            f"srun has started this on {hosts} hosts, each of which would train by itself: pass --nnodes {hosts} and "
            "--rdzv-endpoint HOST:PORT, or, if that is meant, --nnodes 1"
        )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # peers that are gone are no news; torch reads it once
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        return _run_torchrun(_torchrun_options(arguments), Path(folder))


def _torchrun_options(given: argparse.Namespace) -> list[str]:
    passed = _passed_on(given)
    if "rdzv-endpoint" in passed:
        passed.setdefault("rdzv-backend", "c10d")
    if {"nnodes", "max-restarts"} <= passed.keys():
        # Ranks that start again get a store of their own: in torchrun's they would read addresses of the ranks before.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if "PET_NPROC_PER_NODE" not in os.environ or given.nproc_per_node is not None:
        passed["nproc-per-node"] = given.nproc_per_node or str(_gpus() or 1)
    listed = [f"--{name}={value}" for name, value in passed.items()]
    start = ["-m", "spmd.cli.rank", "module" if given.module else "file", given.script, *given.arguments]
    return [*listed, *(["--standalone"] if _is_alone(given) else []), *start]


def _passed_on(given: argparse.Namespace) -> dict[str, str]:
    """The options for torchrun that were given, by their names there."""
    found = {name: getattr(given, name.replace("-", "_")) for name in _PASSED_ON}
    return {name: value for name, value in found.items() if value is not None}


def _is_alone(given: argparse.Namespace) -> bool:
    """Whether nothing names other hosts; torchrun reads ``PET_NNODES`` and its like as defaults of its options."""
    variables = [f"PET_{name.replace('-', '_').upper()}" for name in _PASSED_ON if name != "max-restarts"]
    return not _passed_on(given).keys() - {"max-restarts"} and not any(name in os.environ for name in variables)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _run_torchrun(options: list[str], folder: Path) -> int:
    import logging

    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    parsed = torchrun.parse_args(options)
    count = torchrun.determine_local_world_size(parsed.nproc_per_node)
    last = folder / f"{FAILED}-{parsed.max_restarts}"  # has text if a rank of the last start has printed why it failed
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(_cores() // count, _MOST_THREADS))))
    logging.disable()  # in this process alone; the ranks log for themselves
    try:
        torchrun.run(parsed)
    except SignalException as stopped:
        if stopped.sigval == signal.SIGTERM and len([*folder.glob(f"{ENDED}-*")]) == count:
            return 0
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if not _has_text(last):
            _explain(rank, failure.exitcode, folder)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except (RendezvousError, DistError) as lost:  # such as where the host that has torchrun's store has ended
        if not _has_text(last):
            print(_lost(lost, torchrun.get_rdzv_endpoint(parsed)), file=sys.stderr)
        return 1
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _has_text(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _lost(error: Exception, endpoint: str) -> str:
    from .._torch import joined_hosts

    found = joined_hosts(error)
    if found is not None:
        joined, count, seconds = found
        return (
            f"spmd run: expected {count} hosts at {endpoint}, {len(joined)} joined within {seconds:g} s: "
            f"{' '.join(joined)}; start the same command on the others, with the same --rdzv-endpoint and --rdzv-id "
            "(--rdzv-conf join_timeout=SECONDS waits for longer)"
        )
    reason = str(error.__cause__ or error).partition("\n")[0] or type(error).__name__  # some have no text
    return (
        f"spmd run: no connection to the other hosts at {endpoint} ({reason}); start the same command on those that do "
        "not run it; if a rank of another host has failed, that host prints why"
    )


def _explain(rank: int, exit_code: int, folder: Path) -> None:
    """Print why a rank failed, where no rank of this host did: it was killed, or follows one of another host."""
    followed = sorted(folder.glob(f"{FOLLOWED}-*"))
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        print(f"spmd run: rank {rank} was killed by signal {-exit_code} ({name})", file=sys.stderr)
    elif followed:
        print(followed[0].read_text(), file=sys.stderr)
    else:
        print(f"spmd run: rank {rank} ended with exit code {exit_code}", file=sys.stderr)
