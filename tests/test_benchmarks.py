"""The benchmarks run, and say what they promise to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_calls(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/calls.py", "--parameters", "4", "--rounds", "40", "--json", tmp_path / "out"]
    run = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "out").read_text())
    assert "an empty loop over the same 16 tensors" in found
    assert found["the checks of a call"] < found["a call"]
    assert all(name in run.stdout for name in found)


def test_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/compiler.py", "--smoke", "--json", tmp_path / "out"]
    run = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=True)
    (found,) = json.loads((tmp_path / "out").read_text())
    assert {"capture: trace", "partition", "check after each pass", "pass UpdateInPlace"} <= found["seconds"].keys()
    assert found["nodes"]["partitioned"] > found["nodes"]["captured"] > 100
    assert all(name in run.stdout for name in ("capture: trace", "total for a layer", "GB, peak"))
