"""Pages that compiling has freed go back to the kernel, once for each program."""

from __future__ import annotations

import sys

import pytest
import torch

import spmd
from benchmarks.peers.memory import status
from spmd.lowering.lower import Executable
from spmd.state.freed_pages import return_freed_pages
from tests.harness.fake import fake_world


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and other C libraries keep no pages")
def test_freed_blocks_are_no_resident_memory_any_more() -> None:
    blocks = [torch.ones(2048, dtype=torch.float64) for _ in range(4096)]  # 64 MB, in blocks that malloc keeps
    del blocks[::2]
    kept = status("RssAnon")
    return_freed_pages()
    assert kept - status("RssAnon") > 24_000_000 and all(each[0] == 1 for each in blocks)


def test_each_program_gives_pages_back_before_it_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr("spmd.running.compiled.return_freed_pages", lambda: events.append("given back"))

    run = Executable.__call__
    monkeypatch.setattr(Executable, "__call__", lambda self, inputs: (events.append("run"), run(self, inputs))[1])

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with fake_world(1):
        for size in (2, 2, 3, 2):
            step(torch.ones(size))
    assert events == ["given back", "run", "run", "given back", "run", "run"]
