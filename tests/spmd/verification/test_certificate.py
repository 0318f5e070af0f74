"""Certificates: clean programs are shown, wrong ones never are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import passes
import spmd
from passes import Kind
from spmd.verification.certificate import Certificate, certify_programs
from spmd.verification.stages import after_each

from .prepared import MODES, mutated, prepared
from .test_mutants import MUTANTS, reduced_by
from .test_verify import arguments, train_step

pytestmark = pytest.mark.slow


def certificate(base: str, pipeline: list[passes.Pass] | None = None) -> Certificate:
    given = prepared(base)
    final = [each.final for each in given.programs]
    if pipeline is not None:
        final = [after_each(each.transformed, pipeline)[1] for each in given.programs]
    with torch.no_grad():
        return certify_programs(given.captured, final)


@pytest.mark.parametrize("base", MODES)
def test_a_clean_program_is_shown(base: str) -> None:
    found = certificate(base)
    assert found, found
    assert found.outputs >= 25


@cache
def of_mutant(name: str) -> Certificate:
    base, edit, behind = MUTANTS[name]
    return certificate(base, mutated(edit, behind))


def cases() -> list[Any]:
    """Every sixth mutant, and the one whose nodes declare another dtype than they compute; all with --exhaustive."""
    always = {"a gradient in a narrower dtype", *list(MUTANTS)[::6]}
    return [name if name in always else pytest.param(name, marks=pytest.mark.exhaustive) for name in MUTANTS]


@pytest.mark.parametrize("name", cases())
def test_a_wrong_program_is_never_shown(name: str) -> None:
    found = of_mutant(name)
    assert not found
    assert found.node and (found.why or found.derived)


@pytest.mark.parametrize("name", ["an update is lost", "updates change places", "reduction 7 is dropped"])
def test_what_is_wrong_is_distinguished_from_what_cannot_be_shown(name: str) -> None:
    assert of_mutant(name).outcome == "wrong"


def test_the_node_is_named() -> None:
    found = certificate("replicate", mutated(reduced_by(Kind.ALL_REDUCE, "max", 2)))
    assert found.outcome == "cannot show" and "max" in found.why and "loss.backward()" in found.line


def test_a_step_is_certified() -> None:
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel("fully_shard"))
    assert spmd.certify(step, *arguments(), world=3)
    with pytest.raises(ValueError, match="16 ranks"):
        spmd.certify(step, *arguments(), world=17)
