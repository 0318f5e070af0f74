"""Recipes: which parameters ranks along a tensor axis split, and how, of models whose best division is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import spmd
from benchmarks.anchors.models import Dims, Model
from benchmarks.anchors.models import train_step as step
from spmd.planning.capture import partitioned
from spmd.planning.step_work import CapturedStep
from spmd.verification.world import simulated_world

pytestmark = pytest.mark.slow


def arguments(arch: str, rows: int = 4) -> tuple[Any, ...]:
    with torch.device("meta"):
        model = Model(Dims(arch, 1024, 4096, 8, 8, 128, 8192, 512)).bfloat16()
    text = torch.empty(rows, 512, dtype=torch.long)
    return model, text, text


def test_a_gated_block_is_divided_by_columns_then_rows() -> None:
    found = CapturedStep(spmd.compile(step), arguments("llama"), {}).recipe
    names = ("attention.qkv", "mlp.up", "mlp.gate", "attention.out", "mlp.down", "head")
    dims = [next(dim for pattern, dim in found.items() if pattern.endswith(f"{name}.weight")) for name in names]
    assert dims == [0, 0, 0, 1, 1, 0]
    assert not any("norm" in name for name in found)


def test_the_mode_of_a_recipe_runs_as_it_is_pasted() -> None:
    plans = spmd.plan(spmd.compile(step), *arguments("gpt"), gpus=4, per_host=2, top=100)
    chosen = next(each for each in plans.layouts if each.layout.tensor == 2 and each.layout.stages == 1)
    made: dict[str, Any] = {"spmd": spmd, "init_device_mesh": init_device_mesh, "step": step, "Shard": Shard}
    with simulated_world(4, None, "cpu"):
        exec(plans.python(chosen).replace('"cuda"', '"cpu"'), made)
        program = partitioned(made["step"], lambda _: made["mode"], arguments("gpt", rows=2), {}, {"dp": 4})
    assert [axis.name for axis in program.mesh.axes] == ["dp", "tp"]
    split = {each.name.partition("blocks.1.")[2]: each.placement[1] for each in program.inputs if each.placement}
    assert (split["mlp.up.weight"], split["mlp.up.bias"], split["mlp.down.weight"]) == (Shard(0), Shard(0), Shard(1))
