"""Verdicts on figures whose ratio and scatter are known, and on recorded pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gate.verdicts import LEAST, Verdict, judge

# Pairs of one checkout with itself, and with itself and 3% of busy work: 200 each, of two ranks on two cores beside
# another process that kept half a core busy. A second run of 90 pairs of each, ten minutes, had the same verdicts. The
# wall time of compiling scatters most: 200 pairs cannot tell 3% there, and its CPU time can. To record them again:
#   make gate A="--clears last" B="--clears last --slower 0.03" \
#     ARGS="--pairs 200 --beside 0.5 --model width64x1 --figures step compile import --json tests/gate/slower.json"
# and without --slower to same.json.
RECORDED = {name: json.loads(Path(__file__).with_name(f"{name}.json").read_text()) for name in ("same", "slower")}
FIGURES = ("step, cleared last", "step, cleared last: CPU", "compile: CPU", "import")
PAIRS, VERDICTS = 200, 20


def drawn(name: str, figure: str) -> list[Verdict]:
    """Verdicts of runs that draw their pairs from those recorded."""
    a, b = (np.array(RECORDED[name][figure][arm]) for arm in "ab")
    picks = np.random.default_rng(0).integers(len(a), size=(VERDICTS, PAIRS))
    return [judge(a[each], b[each]) for each in picks]


@pytest.mark.parametrize("figure", FIGURES)
def test_three_percent_are_found_in_nine_of_ten_runs(figure: str) -> None:
    assert sum(verdict.slower for verdict in drawn("slower", figure)) >= 0.9 * VERDICTS


@pytest.mark.parametrize("figure", [*FIGURES, "compile"])
def test_the_same_checkout_is_never_called_slower(figure: str) -> None:
    assert not any(verdict.slower for verdict in drawn("same", figure))


def scattered(pairs: int, scatter: float, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(scale=scatter, size=pairs))


def test_the_three_answers() -> None:
    a, noise = np.ones(60), scattered(60, 0.02)
    assert judge(a, a * noise).answer == "not slower"
    assert judge(a, 1.03 * noise).answer == "slower"
    wide = judge(a, 1.03 * scattered(60, 0.2))
    assert not wide.slower and not wide.not_slower and f"about {wide.needed:,} pairs would tell" in wide.answer


def test_a_slow_machine_in_both_arms_changes_nothing() -> None:
    machine, noise = scattered(60, 0.5, seed=1), scattered(60, 0.02)
    assert judge(machine, machine * noise) == judge(np.ones(60), noise)


def test_pairs_that_are_far_out_count_no_more_than_others() -> None:
    noise = scattered(60, 0.01)
    disturbed = noise.copy()
    disturbed[:4] *= 40
    assert judge(np.ones(60), disturbed).answer == "not slower"


def test_as_many_pairs_as_needed_do_tell() -> None:
    few = judge(np.ones(20), 1.03 * scattered(20, 0.04))
    assert "cannot tell" in few.answer and 20 < few.needed < 200
    assert judge(np.ones(2 * few.needed), 1.03 * scattered(2 * few.needed, 0.04)).slower


def test_too_few_pairs_tell_nothing() -> None:
    verdict = judge(np.ones(LEAST - 1), np.full(LEAST - 1, 2.0))
    assert verdict.answer == f"cannot tell (about {LEAST} pairs would tell)"
