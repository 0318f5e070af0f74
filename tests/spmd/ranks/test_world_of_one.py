"""One rank without torchrun: the same numbers, no collective, no network port."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import spmd
from tests.harness.cases import NARROW, STYLES
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks


def sockets() -> set[str]:
    """The network sockets of this process, as (table, inode)."""
    links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    ours = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6", "udp", "udp6")]
    rows = [(table.name, line.split()) for table in tables for line in table.read_text().splitlines()[1:]]
    return {f"{name} {row[1]} {row[9]}" for name, row in rows if row[9] in ours}


def run(rank: int, world: int, style: str) -> tuple[list[str], int, set[str], list[str]]:
    """Differences, the size of the world, new sockets, collectives of the programs."""
    before = sockets()
    case = replace(NARROW, optimizer="AdamW")
    compiled, got = compiled_run(0, case, 5, parallel_mode=spmd.DataParallel(style))
    collectives = [str(node) for program in compiled.programs for node in program.collectives()]
    return all_unequal(plain_run(case, 1, 5), got, 0, 1), dist.get_world_size(), sockets() - before, collectives


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("style", STYLES)
def test_a_world_of_one_opens_no_port_and_has_no_collective(ranks: Ranks, style: str) -> None:
    assert ranks.run(1, run, style, process_group=False) == [([], 1, set(), [])]


def size_of_world(rank: int, world: int) -> int:
    return spmd.world().size()


def test_world_uses_the_current_process_group(ranks: Ranks) -> None:
    for world in (2, 4, 2, 1, 4):
        assert ranks.run(world, size_of_world) == [world] * world
