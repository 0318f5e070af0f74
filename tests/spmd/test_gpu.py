"""The whole path on one CUDA device, a world of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import spmd
from tests.harness.cases import MLP, NARROW, STYLES, WIDE
from tests.harness.oracle import all_unequal, compiled_run, plain_run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone")]


@pytest.mark.parametrize("passes", [None, ()], ids=["default passes", "no passes"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW", "AdamW foreach", "AdamW fused"])
@pytest.mark.parametrize("case", [WIDE, NARROW], ids=["50-32-8", "15-17-1"])
def test_five_steps_equal_the_plain_ones(case: Any, optimizer: str, style: str, passes: Any) -> None:
    case = replace(case, optimizer=optimizer, device="cuda")
    mode = spmd.DataParallel(style)
    _, got = compiled_run(0, case, 5, parallel_mode=mode, passes=passes)
    assert all_unequal(plain_run(case, 1, 5), got, 0, 1) == []


@pytest.mark.parametrize("options", [
    {"cuda_graphs": True},
    {"cuda_graphs": True, "backend": "inductor"},
], ids=["graphs", "graphs of kernels"])  # fmt: skip
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("style", STYLES)
def test_steps_that_are_launched_as_graphs_equal_the_plain_ones(
    style: str, micro_batches: int, options: dict[str, Any]
) -> None:
    case = replace(WIDE, optimizer="AdamW fused", device="cuda")
    mode = spmd.DataParallel(style, micro_batches=micro_batches)
    _, got = compiled_run(0, case, 5, parallel_mode=mode, **options)
    assert all_unequal(plain_run(case, 1, 5), got, 0, 1) == []


class ModelOnHost(MLP):
    """The model is on the CPU, the batch on the GPU."""

    def build(self) -> tuple[Any, ...]:
        """The model and its optimizer."""
        return MLP.build(replace(self, device="cpu"))


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_offloaded_steps_equal_the_plain_ones(style: str, pin_memory: bool) -> None:
    case = ModelOnHost(NARROW.sizes, NARROW.rows, "AdamW", "cuda")
    mode = spmd.DataParallel(style, offload_policy=spmd.OffloadPolicy(pin_memory))
    compiled, got = compiled_run(0, case, 5, parallel_mode=mode)
    on_cpu = [{name: x.cpu() if isinstance(x, Tensor) else x for name, x in each.items()} for each in got]
    assert all_unequal(plain_run(replace(case, device="cpu"), 1, 5), on_cpu, 0, 1) == []
    memory = compiled.report().memory
    assert memory["cpu"].roles["offloaded"] and not memory["cuda:0"].roles["parameters"]


def test_the_world_is_that_of_the_model_s_device() -> None:
    case = replace(NARROW, device="cuda")
    compiled, _ = compiled_run(0, case, 1)
    assert spmd.world("cuda").device_type == "cuda"
    assert compiled.program is not None and compiled.program.collectives() == []
