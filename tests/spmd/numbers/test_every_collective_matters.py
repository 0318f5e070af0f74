"""The oracle sees each collective: take any one of them away and the numbers are wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from torch import fx

import spmd
from passes.ir.collectives import is_collective
from tests.harness.cases import NARROW
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks

CASE = replace(NARROW, sizes=(15, 17, 1))
COLLECTIVES = 4 + 1  # a gradient each, and the loss


@dataclass
class Without:
    """A gm_transformation that skips the collective at one position."""

    position: int

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        collectives = [node for node in gm.graph.nodes if is_collective(node)]
        assert len(collectives) == COLLECTIVES
        collective = collectives[self.position]
        collective.replace_all_uses_with(collective.args[0])
        gm.graph.erase_node(collective)
        gm.recompile()
        return gm


def run(rank: int, world: int, position: int) -> list[str]:
    mode = spmd.DataParallel("replicate")
    _, got = compiled_run(rank, CASE, 5, parallel_mode=mode, passes=(), gm_transformation=Without(position))
    return all_unequal(plain_run(CASE, world, 5), got, rank, world)


@pytest.mark.parametrize("position", range(COLLECTIVES))
def test_without_one_collective_the_numbers_differ(ranks: Ranks, position: int) -> None:
    for differ in ranks.run(2, run, position):
        assert differ != []
