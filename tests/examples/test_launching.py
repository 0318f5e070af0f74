"""The files for Slurm, Ray and Kubernetes, run where these are installed: two hosts of Slurm, and workers of Ray."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ..harness import programs
from ..harness.meeting import free_port
from .test_train_gpt import ROOT, environment

pytestmark = pytest.mark.processes

SLURM = ("slurmctld", "slurmd", "sbatch", "unshare")
HOSTS = ("node0", "node1")
CONFIGURATION = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/linear
NodeName=node0 NodeAddr=127.0.0.1 Port={port0} CPUs=1
NodeName=node1 NodeAddr=127.0.0.1 Port={port1} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""
SCRIPT = """
import socket, sys
import torch
import spmd

torch.manual_seed(0)
rank, ranks = spmd.world().get_rank(), spmd.world().size()
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@spmd.compile(parallel_mode="fully_shard")
def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

draw = torch.Generator().manual_seed(1)
for _ in range(5):
    x = torch.randn(8, 4, generator=draw, dtype=torch.float64)
    loss = step(model, optimizer, x.tensor_split(ranks)[rank])
sys.stdout.write(f"rank {rank} of {ranks} on {socket.gethostname()}: {float(loss):.9f}\\n")
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A controller and two hosts of Slurm, each with a name of its own; yields the environment of its commands."""
    if not all(map(shutil.which, SLURM)) or os.geteuid() != 0:
        pytest.skip("needs slurmctld, slurmd and slurm-client of Debian, and root, who may name hosts")
    (tmp_path / "state").mkdir()
    hosts, file = tmp_path / "hosts", tmp_path / "slurm.conf"
    hosts.write_text(Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {name}\n" for name in HOSTS))
    ports = {name: free_port() for name in ("port", "port0", "port1")}
    file.write_text(CONFIGURATION.format(host=socket.gethostname(), folder=tmp_path, **ports))
    env = environment() | {"SLURM_CONF": str(file), "PATH": f"{tmp_path}:{os.environ['PATH']}", "SPMD_QUIET": "1"}
    named = f"mount --bind {hosts} /etc/hosts && exec slurmd -D"
    commands = [["slurmctld", "-D"]]
    commands += [["unshare", "--uts", "--mount", "sh", "-c", f"hostname {name} && {named}"] for name in HOSTS]
    daemons = []
    try:
        for command in commands:
            with (tmp_path / f"daemon{len(daemons)}").open("w") as log:
                daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            time.sleep(0.5)
        _until_idle(env, tmp_path)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def _until_idle(env: dict[str, str], folder: Path) -> None:
    for _ in range(100):
        found = subprocess.run(["sinfo", "--noheader", "--format=%D %t"], env=env, capture_output=True, text=True)
        if found.stdout.strip() == "2 idle":
            return
        time.sleep(0.2)
    raise AssertionError("".join(path.read_text() for path in folder.glob("daemon*")))


def _state(job: str, options: dict[str, Any]) -> str:
    shown = subprocess.check_output(["scontrol", "show", "job", job], **options)
    return re.findall(r"JobState=(\w+)", shown)[0]


def test_two_hosts_of_slurm(slurm: dict[str, str], tmp_path: Path) -> None:
    script, command = tmp_path / "train.py", tmp_path / "spmd"
    script.write_text(SCRIPT)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m spmd "$@"\n')
    command.chmod(0o755)
    env = slurm | {"RANKS": "1", "SCRIPT": str(script)}
    options: dict[str, Any] = {"cwd": tmp_path, "env": env, "text": True, "timeout": 60}
    submit = ["sbatch", "--parsable", "--output=printed", str(ROOT / "examples" / "slurm.sh")]
    job = subprocess.check_output(submit, **options).strip()
    while (state := _state(job, options)) in ("PENDING", "RUNNING", "COMPLETING"):  # `sbatch --wait` looks rarely
        time.sleep(0.3)
    printed = (tmp_path / "printed").read_text()
    assert state == "COMPLETED", printed
    found = re.findall(r"rank (\d) of 2 on (\w+): ([\d.]+)\n", printed)
    assert {rank for rank, *_ in found} == {"0", "1"} and {host for _, host, _ in found} == set(HOSTS)
    alone = programs.run([script], env)
    assert {loss for *_, loss in found} == {alone.stdout.rpartition(" ")[2].strip()}, printed


@pytest.mark.exhaustive  # Ray takes a minute to start and to end
def test_workers_of_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    command = [sys.executable, "examples/ray_train.py", "--workers", "2", "--steps", "5", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:]
    assert float(done.stdout.splitlines()[-1].split()[-1]) == pytest.approx(loss_on_one_device(5), abs=1e-11)


def loss_on_one_device(steps: int) -> float:
    """What ``examples/ray_train.py`` computes, in plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.rand(64, 1, generator=random, dtype=torch.float64) * 6 - 3
        loss = F.mse_loss(model(x), torch.sin(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_the_file_for_kubernetes_fits_its_schema() -> None:
    models = pytest.importorskip("kubeflow.training.models")
    yaml = pytest.importorskip("yaml")
    given = yaml.safe_load((ROOT / "examples" / "pytorchjob.yaml").read_text())
    assert not list(misfits(given, "KubeflowOrgV1PyTorchJob", models, "job"))
    given["spec"]["elasticPolicy"]["minReplica"] = 2
    given["spec"]["nprocPerNode"] = 8
    found = list(misfits(given, "KubeflowOrgV1PyTorchJob", models, "job"))
    assert set(found) == {"job.spec.elasticPolicy.minReplica: unknown", "job.spec.nprocPerNode: expected str, got 8"}


def misfits(given: Any, kind: str, models: Any, path: str) -> Iterator[str]:
    """What differs from a type of the Kubernetes API, as its client has it: unknown keys, and values of other types."""
    if found := re.fullmatch(r"list\[(.+)\]|dict\(str, (.+)\)", kind):
        items = enumerate(given) if found[1] else given.items()
        for key, each in items:
            yield from misfits(each, found[1] or found[2], models, f"{path}.{key}")
    elif kind in ("str", "int", "bool"):
        if type(given).__name__ != kind:
            yield f"{path}: expected {kind}, got {given!r}"
    elif kind != "object":
        client = __import__("kubernetes.client", fromlist=["models"])
        model = getattr(models, kind, None) or getattr(client, kind)
        names = {model.attribute_map[name]: of for name, of in model.openapi_types.items()}
        for key, each in given.items():
            if key in names:
                yield from misfits(each, names[key], models, f"{path}.{key}")
            else:
                yield f"{path}.{key}: unknown"
