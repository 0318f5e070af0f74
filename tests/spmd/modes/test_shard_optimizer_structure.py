"""The communication and computation of ``shard_optimizer=True``, counted on fake ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, make_optimizer
from tests.harness.fake import fake_world
from tests.harness.structure import computes, counts, is_memory, regression
from tests.spmd.capture.test_averages import Averaged
from tests.spmd.numbers.test_clipping import ByNorm, InTwoParts

pytestmark = pytest.mark.slow


def compiled_with(
    world: int, case: Any, objects: tuple[Any, ...], batch: Any, calls: int = 2, passes: Any = (), **options: Any
) -> spmd.CompiledStep:
    """The step after ``calls`` calls on a fake rank 0; the program is that of an optimizer with state."""
    mode = spmd.DataParallel("replicate", shard_optimizer=True, **options)
    with fake_world(world):
        compiled: spmd.CompiledStep = spmd.compile(parallel_mode=mode, passes=passes)(case.step)
        for _ in range(calls):
            compiled(*objects, *batch)
    return compiled


def mlp_with(world: int, *sizes: int, optimizer: str = "AdamW", **options: Any) -> spmd.CompiledStep:
    model, _, *batch = regression(*sizes)
    return compiled_with(world, MLP, (model, make_optimizer(optimizer, model.parameters())), batch, **options)


@pytest.fixture(scope="module")
def compiled() -> spmd.CompiledStep:
    """AdamW on four ranks; everything divides by four."""
    return mlp_with(4, 50, 36, 20)


@pytest.mark.parametrize("world, optimizer", [(2, "AdamW"), (64, "SGD")])
def test_each_gradient_is_scattered_and_each_parameter_gathered_once(world: int, optimizer: str) -> None:
    compiled = mlp_with(world, 15, 17, 3, 1, optimizer=optimizer)
    assert counts(compiled) == {"all_reduce": 1, "reduce_scatter": 6, "all_gather": 6}
    assert [row.role for row in compiled.report().traffic if row.kind == "all_reduce"] == ["result"]


def test_the_default_passes_merge_them_and_fuse_the_update() -> None:
    compiled = mlp_with(4, 50, 36, 20, passes=None)
    assert counts(compiled) == {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}
    assert compiled.program is not None
    assert len(compiled.program.graph.find_nodes(op="call_function", target=torch.ops.aten._fused_adamw_.default)) == 1


def test_bytes_are_those_of_an_all_reduce(compiled: spmd.CompiledStep) -> None:
    report = compiled.report()
    parameters = 8 * (36 * 50 + 36 + 20 * 36 + 20)
    assert report.bytes("reduce_scatter") == parameters  # what a rank sends in, 3/4 of which go elsewhere
    assert report.bytes("all_gather") == parameters // 4  # which goes to three others


def test_state_is_this_rank_s_part_and_parameters_are_whole(compiled: spmd.CompiledStep) -> None:
    assert compiled.program is not None
    sizes: dict[str, int] = dict.fromkeys(("parameter", "optimizer state"), 0)
    for node, declared in zip(compiled.program.placeholders, compiled.program.inputs, strict=True):
        if declared.shape and declared.role in sizes:
            sizes[str(declared.role)] += node.meta["val"].numel()
    parameters = 36 * 50 + 36 + 20 * 36 + 20
    assert sizes == {"parameter": parameters, "optimizer state": 2 * parameters // 4}


def test_the_update_computes_parts_only(compiled: spmd.CompiledStep) -> None:
    """Whole is what is cut and what was gathered, never what is computed."""
    assert compiled.program is not None
    whole = {(36, 50), (36,), (20, 36), (20,)}
    updating = [n for n in compiled.program.graph.nodes if n.op == "call_function" and n.meta.get("phase") == "update"]
    computed = [n for n in updating if getattr(n.meta["val"], "shape", None) in whole and not is_memory(n)]
    assert {str(computes(n)) for n in computed} == {
        "_c10d_functional.wait_tensor.default",
        "_c10d_functional.all_gather_into_tensor.default",
    }


def test_a_norm_of_gradients_takes_one_all_reduce() -> None:
    case = ByNorm(sizes=(15, 17, 4), optimizer="AdamW")
    compiled = compiled_with(4, case, case.build(), case.part(0, 0), passes=None)
    assert counts(compiled) == {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


def test_gradients_left_in_grad_are_reduced_whole_and_reported(compiled: spmd.CompiledStep) -> None:
    case = InTwoParts(optimizer="AdamW")
    keeping = compiled_with(4, case, case.build(), case.part(0, 0), passes=None)
    assert counts(keeping) == {"all_reduce": 2, "all_gather": 1}
    assert ["4 gradients stay in .grad after the step" in note for note in keeping.report().notes] == [True]
    assert not compiled.report().notes


def test_ops_after_the_update_read_the_gathered_parameters() -> None:
    case = Averaged("ema")
    compiled = compiled_with(4, case, case.build(), case.part(0, 0), calls=3)
    assert counts(compiled)["all_gather"] == len(list(case.build()[0].parameters())), "the average is not gathered"


class InTwoHalves(MLP):
    """Two backward passes, one update."""

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        for weight in (0.25, 0.75):
            (weight * F.mse_loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("reduce, times", [("once", 1), ("each", 2)])
def test_gradients_of_micro_batches_are_scattered_once_or_each_time(reduce: str, times: int) -> None:
    model, optimizer, *batch = regression(50, 36, 20)
    compiled = compiled_with(4, InTwoHalves, (model, optimizer), batch, reduce_gradients=reduce)
    assert counts(compiled) == {"reduce_scatter": 4 * times, "all_gather": 4}


def test_a_frozen_parameter_takes_no_traffic() -> None:
    model, optimizer, *batch = regression(50, 36, 20)
    model[0].weight.requires_grad_(False)
    compiled = compiled_with(4, MLP, (model, optimizer), batch)
    assert counts(compiled) == {"all_reduce": 1, "reduce_scatter": 3, "all_gather": 3}


def test_on_one_rank_nothing_is_split() -> None:
    model, _, *batch = regression(5, 3)
    optimizer = make_optimizer("AdamW", model.parameters())
    assert counts(compiled_with(1, MLP, (model, optimizer), batch)) == {}


def test_options_that_do_not_go_together_are_refused() -> None:
    for style in ("fully_shard", "default"):
        with pytest.raises(ValueError, match=rf'shard_optimizer=True with parallel_style="replicate", got "{style}"'):
            spmd.DataParallel(style, shard_optimizer=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected shard_optimizer to be True or False, got 1"):
        spmd.DataParallel("replicate", shard_optimizer=1)  # type: ignore[arg-type]
