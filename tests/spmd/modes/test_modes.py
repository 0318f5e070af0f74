"""Modes other than the three styles: ``DTensorExpand``, the default mode, a mode and a plan of the user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import passes
import spmd
from tests.harness.cases import WIDE
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks

CASE = replace(WIDE, rows=8, optimizer="SGD momentum")


class Wrapped(spmd.ParallelMode):
    """A mode from the base class alone."""

    def partition(self, program: passes.Program) -> passes.Program:
        """Partition as the replicate style does."""
        return spmd.DataParallel("replicate").partition(program)


class Planned(spmd.PlannedMode):
    """A mode of one plan: another mode's, whose weights of the last layer are split."""

    def plan(self, program: passes.Program) -> spmd.Plan:
        """The replicate style's plan with one change."""
        plan = spmd.DataParallel("replicate").plan(program)
        return replace(plan, placements={**plan.placements, "model.2.weight": (Shard(0),)})


def two_axes() -> spmd.ParallelMode:
    """Data parallel over one axis, the hidden layer split over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = {
        "model.0.*": {"tp": Shard(0)},
        "model.2.weight": {"tp": Shard(1)},
    }
    return spmd.DTensorExpand(mesh=mesh, params=params)


MODES: dict[str, Any] = {
    "none": lambda: None,
    "expand": lambda: spmd.DTensorExpand(),
    "expand, one weight split": lambda: spmd.DTensorExpand(params={"model.0.weight": Shard(0)}),
    "expand, all inputs replicated": lambda: spmd.DTensorExpand(inputs={"x": Replicate(), "y": Replicate()}),
    "a mode of one's own": lambda: Wrapped(),
    "a plan of one's own": lambda: Planned(),
}


def run(rank: int, world: int, mode: str) -> list[str]:
    _, got = compiled_run(rank, CASE, 5, parallel_mode=MODES[mode]())
    return all_unequal(plain_run(CASE, world, 5), got, rank, world)


def run_replicated(rank: int, world: int, mode: str) -> list[str]:
    """Every rank passes the same batch."""
    _, got = compiled_run(0, CASE, 5, parallel_mode=MODES[mode]())
    return all_unequal(plain_run(CASE, 1, 5), got, 0, 1)


def run_two_axes(rank: int, world: int) -> list[str]:
    mode = two_axes()
    _, got = compiled_run(rank // 2, CASE, 5, parallel_mode=mode)
    return all_unequal(plain_run(CASE, 2, 5), got, rank // 2, 2)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "replicated" not in mode])
def test_every_mode_computes_the_same(ranks: Ranks, mode: str) -> None:
    assert ranks.run(2, run, mode) == [[]] * 2


def test_inputs_that_every_rank_has_in_full(ranks: Ranks) -> None:
    assert ranks.run(2, run_replicated, "expand, all inputs replicated") == [[]] * 2


def test_parameters_split_over_another_axis_than_the_batch(ranks: Ranks) -> None:
    assert ranks.run(4, run_two_axes) == [[]] * 4
