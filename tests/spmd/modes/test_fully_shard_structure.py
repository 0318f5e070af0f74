"""Split parameters: one gather each before its first use, one reduce_scatter each, updates on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spmd
from tests.harness.cases import MLP
from tests.harness.structure import compile_on_fake_ranks, counts, regression, shapes
from tests.spmd.numbers.test_modules import Tied, TiedWeights


def compiled_with(world: int, *sizes: int, style: str = "fully_shard", passes: Any = ()) -> spmd.CompiledStep:
    mode = spmd.DataParallel(style)
    model, *rest = regression(*sizes)
    return compile_on_fake_ranks(world, MLP.step, (model, *rest), parallel_mode=mode, passes=passes)


@pytest.mark.parametrize("world", [2, 4, 8, 64])
@pytest.mark.parametrize("sizes", [(50, 36, 20), (15, 17, 3, 1)], ids=str)
def test_one_gather_and_one_reduce_scatter_per_parameter(world: int, sizes: tuple[int, ...]) -> None:
    parameters = 2 * (len(sizes) - 1)
    expected = {"all_reduce": 1, "all_gather": parameters, "reduce_scatter": parameters}
    assert counts(compiled_with(world, *sizes)) == expected


def test_a_tied_weight_is_gathered_and_reduced_once() -> None:
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = spmd.DataParallel("fully_shard")
    batch = TiedWeights().part(0, 0)
    compiled = compile_on_fake_ranks(4, TiedWeights.step, (model, optimizer), *batch, parallel_mode=mode, passes=())
    assert counts(compiled) == {"all_reduce": 2, "all_gather": 4, "reduce_scatter": 4}


def test_a_frozen_parameter_is_gathered_but_not_reduced() -> None:
    model, *rest = regression(50, 36, 20)
    model[0].weight.requires_grad_(False)
    mode = spmd.DataParallel("fully_shard")
    compiled = compile_on_fake_ranks(4, MLP.step, (model, *rest), parallel_mode=mode, passes=())
    assert counts(compiled) == {"all_reduce": 1, "all_gather": 4, "reduce_scatter": 3}


def test_the_update_sees_shards_only() -> None:
    compiled = compiled_with(4, 50, 36, 20)
    whole = {(36, 50), (36,), (20, 36), (20,)}
    assert shapes(compiled.program, "update") & whole == set()


def test_no_rank_holds_a_global_activation() -> None:
    compiled = compiled_with(4, 50, 36, 20)
    assert {shape for shape in shapes(compiled.program) if 4 * 7 in shape} == set()


def test_bytes_count_padding() -> None:
    compiled = compiled_with(4, 50, 36, 18)  # the last layer's 18 rows are 5, 5, 5 and 3
    shard = 8 * (9 * 50 + 9 + 5 * 36 + 5)
    assert compiled.report().bytes("all_gather") == shard
    assert compiled.report().bytes("reduce_scatter") == 4 * shard


def test_the_default_passes_merge_each_kind_and_keep_the_loss_apart() -> None:
    compiled = compiled_with(4, 50, 36, 36, 20, passes=None)
    assert counts(compiled) == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}


def test_the_default_style_splits_parameters_that_divide_evenly() -> None:
    compiled = compiled_with(4, 50, 36, 17, style="default")
    assert counts(compiled) == {"all_reduce": 2 + 1, "all_gather": 2, "reduce_scatter": 2}
    split = {i.name for i in compiled.program.inputs if i.role == "parameter" and i.placement[0].is_shard()}  # type: ignore[union-attr]
    assert split == {"model.0.weight", "model.0.bias"}


def test_the_inputs_of_a_program_have_their_placements() -> None:
    compiled = compiled_with(4, 50, 36, 20)
    assert compiled.program is not None
    by_name = {declared.name: declared for declared in compiled.program.inputs}
    weight, x = by_name["model.0.weight"], by_name["x"]
    assert (weight.shape, weight.role, weight.placement[0].is_shard(0)) == ((36, 50), "parameter", True)
    assert (x.shape, x.role, x.placement[0].is_shard(0)) == ((28, 50), "batch", True)


def test_a_compiled_model_keeps_its_parameter_names() -> None:
    model, *rest = regression(50, 36, 20)
    names = list(model.state_dict())
    mode = spmd.DataParallel("fully_shard")
    compile_on_fake_ranks(4, MLP.step, (model, *rest), parallel_mode=mode, passes=())
    assert list(model.state_dict()) == names
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
