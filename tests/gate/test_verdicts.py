"""Verdicts on figures whose ratio and scatter are known."""

from __future__ import annotations

import numpy as np

from benchmarks.gate.verdicts import LEAST, judge


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
