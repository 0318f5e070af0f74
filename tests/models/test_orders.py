"""Ranks whose sets have different orders compile the same programs: no second process group is needed to see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .catalog import ENTRIES

ROOT = Path(__file__).parents[2]
# In every run one that iterates over a set, with all layers, and one that writes, with one layer. `--exhaustive` takes
# all, with all layers.
USUAL = ("ModernBert", "Qwen3")
SEEDS = ("1", "3")  # for which {"full_attention", "sliding_attention"} has two orders

pytestmark = pytest.mark.processes


def start(seed: str, names: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.models.orders", *names]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def together(names: list[str]) -> list[dict[str, list[str]]]:
    """The texts of both ranks; what one sends on the way goes to both."""
    ranks = [start(seed, names) for seed in SEEDS]
    try:
        while True:
            lines = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout]
            if any("texts" in line for line in lines):
                return [line["texts"] for line in lines]
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write(json.dumps([line["text"] for line in lines]) + "\n")
                rank.stdin.flush()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_the_seeds_give_sets_other_orders() -> None:
    code = "print(list({'full_attention', 'sliding_attention'}))"
    found = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True).stdout
        for seed in SEEDS
    }
    assert len(found) == len(SEEDS)


@pytest.mark.timeout(900)  # for each model a compile or two in each process
def test_programs_do_not_depend_on_the_order_of_sets(request: pytest.FixtureRequest) -> None:
    exhaustive = request.config.getoption("exhaustive")
    names = [entry.name for entry in ENTRIES] if exhaustive else USUAL
    first, second = together(names if exhaustive else ["--shallow", *names])
    assert [name for name in names if first[name] != second[name]] == []
