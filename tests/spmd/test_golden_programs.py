"""Whole programs as text, before the passes and as they run: what a change of the compiler must not change unseen.

``pytest tests/spmd/test_golden_programs.py --renew`` writes them anew, for review as a diff. The header of a dump, with
options and counts of edits, is left out. ``Realise`` takes the backend for gloo, so that it has something to do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt
import pytest
import tensor_parallel
import torch
import train_gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import passes
import spmd
from passes.ir.collectives import waits_of
from passes.ir.read_program import read_program
from spmd.lowering.codegen import writes_to_inputs
from tests.harness.fake import fake_world

TORCH = "2.13."  # other versions decompose some ops differently
PIPELINE = tuple(passes.Realise(backend="gloo") if isinstance(p, passes.Realise) else p for p in passes.default())
CONFIG = gpt.Config(width=32, layers=2, heads=4, context=8, vocabulary=16)


def transformer(split_sequence: bool = False) -> tuple[Any, ...]:
    model = gpt.GPT(CONFIG)
    if split_sequence:
        tensor_parallel.split_sequence(model)
    tokens = torch.zeros(2, CONFIG.context, dtype=torch.long)
    return train_gpt.train_step, model, torch.optim.AdamW(model.parameters()), tokens, tokens


def convolutions() -> tuple[Any, ...]:
    blocks = [(nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for width in (3, 8)]
    model = nn.Sequential(*[layer for block in blocks for layer in block], nn.Flatten(), nn.Linear(128, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return classify, model, optimizer, torch.zeros(4, 3, 4, 4), torch.zeros(4, dtype=torch.long)


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def on_two_axes() -> spmd.DataParallel:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return spmd.DataParallel("replicate", mesh=mesh, params=tensor_parallel.placements(CONFIG))


CASES: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[[], spmd.DataParallel]]] = {
    "gpt_replicate": (transformer, lambda: spmd.DataParallel("replicate")),
    "gpt_fully_shard": (transformer, lambda: spmd.DataParallel("fully_shard", reshard_after_forward=True)),
    "gpt_kept_whole": (transformer, lambda: spmd.DataParallel("fully_shard", reshard_after_forward=False)),
    "gpt_shard_optimizer": (transformer, lambda: spmd.DataParallel("replicate", shard_optimizer=True)),
    "gpt_tensor_and_sequence": (lambda: transformer(split_sequence=True), on_two_axes),
    "convolutions": (convolutions, lambda: spmd.DataParallel("replicate")),
}


@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason="the golden programs are those of torch 2.13")
@pytest.mark.parametrize("name", CASES)
def test_programs_are_the_golden_ones(name: str, tmp_path: Path, golden: Callable[..., None]) -> None:
    build, mode = CASES[name]
    with fake_world(4):
        step, *arguments = build()
        compiled = spmd.compile(step, parallel_mode=mode(), passes=PIPELINE, dump=tmp_path)
        compiled(*arguments)
    folder = tmp_path / step.__name__ / "program-0"
    for stage in ("01_partition", "99_lowered"):
        text = (folder / f"{stage}.py").read_text()
        golden(text[text.index("def program(") :], f"{name}.{stage}")
    assert compiled.program is not None
    assert gradients_awaited_after_the_first_write(compiled.program) == []
    read, edited = read_program(text, compiled.program)
    assert edited == 0 and passes.print_program(read) == text


def gradients_awaited_after_the_first_write(program: passes.Program) -> list[str]:
    """A call that fails before its first write leaves state whole, so all gradients should have come by then."""
    nodes = list(program.graph.nodes)
    rest = nodes[nodes.index(next(iter(writes_to_inputs(program)))) :]
    starts = [node for node in program.collectives() if node.meta["collective"].role is passes.Role.GRADIENT]
    return [wait.name for start in starts for wait in waits_of(start) if wait in rest]
