"""``spmd doctor``: each finding, where things work and where they do not."""

from __future__ import annotations

import json
import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd.cli import doctor_command, known_bits
from spmd.cli.commands import main
from tests.harness import programs


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *argv])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    run("--no-ranks", "--json")
    return {each["what"]: each for each in json.loads(capsys.readouterr().out)}


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(1, "Operation not permitted")


def test_versions_are_those_of_the_project() -> None:
    oldest, newest = doctor_command.TESTED
    major, minor = newest.split(".")
    asked = f'"torch>={oldest},<{major}.{int(minor) + 1}"'
    assert asked in (Path(__file__).parents[3] / "pyproject.toml").read_text()


@pytest.mark.processes
def test_two_ranks_train_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "spawn", programs.spawn)
    assert run("--json") == 0
    found = {each["what"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["two ranks"]["state"] == "works" and "over shared memory" in found["two ranks"]["found"]
    assert found["versions"]["state"] == found["shared memory"]["state"] == "works"
    assert found['bits="same"']["state"] == ("works" if known_bits.this_kind() in known_bits.KNOWN else "not here")


def test_bits_are_compared_with_those_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = known_bits.this_kind()
    monkeypatch.delitem(known_bits.KNOWN, kind, raising=False)
    assert doctor_command._bits("ab").so == "no hash is known for this kind to compare it with"
    monkeypatch.setitem(known_bits.KNOWN, kind, "ab")
    assert (doctor_command._bits("ab").state, doctor_command._bits("cd").state) == ("works", "fails")


def test_a_torch_that_was_not_tested_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert run("--no-ranks") == 1
    assert "fails" in capsys.readouterr().out
    assert findings(capsys)["versions"]["so"] == "spmd is tested with torch 2.11 to 2.15: install one of these"


@pytest.mark.parametrize("owner, name, value, what, found", [
    (os, "memfd_create", refuse, "shared memory", "Operation not permitted"),
    (socket, "gethostbyname", refuse, "network", "has no address"),
    (resource, "getrlimit", lambda which: (256, 256), "open files", "256 for a process"),
    (torch, "get_num_threads", lambda: 8, "threads", "OMP_NUM_THREADS is not set"),
], ids=["memory", "host name", "files", "threads"])  # fmt: skip
def test_what_is_slower_says_what_follows(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    value: Any,
    what: str,
    found: str,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda which: {0, 1}, raising=False)
    monkeypatch.setattr(owner, name, value)
    seen = findings(capsys)[what]
    assert seen["state"] == "slower" and found in seen["found"] and seen["so"]


def test_an_interface_that_is_not_there_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    assert findings(capsys)["network"]["state"] == "fails"


def test_dumps_that_cannot_be_written_are_slower(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPMD_DUMP", str(tmp_path / "file" / "runs"))
    assert findings(capsys)["dumps"]["state"] == "slower"


def failing_rank(rank: int, folder: str) -> None:
    """Stands for a rank whose gloo finds no interface."""
    raise RuntimeError("Unable to find address for: nothing0")


@pytest.mark.processes
@pytest.mark.exhaustive  # the error of one rank takes three imports of torch
def test_ranks_that_cannot_train_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "_train", failing_rank)
    run("--json")
    found = {each["what"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["two ranks"]["state"] == "fails" and "nothing0" in found["two ranks"]["found"]


class NeverEnds:
    """Stands for ranks that wait for each other."""

    processes = ()

    def join(self, timeout: float) -> bool:
        return False


def test_ranks_that_do_not_end_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "spawn", lambda *_, **__: NeverEnds())
    monkeypatch.setattr(doctor_command, "_RANKS_WITHIN", 0.0)
    assert run() == 1
    assert "they had not ended" in " ".join(capsys.readouterr().out.split())
