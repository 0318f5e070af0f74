"""Tensor parallel in the example: Megatron-LM's collectives, no rank with a whole table, and one device's numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import gpt
import pytest
import tensor_parallel
import torch
import train_gpt
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import spmd
from tests.harness.fake import fake_world
from tests.harness.oracle import Case, all_unequal, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow

LAYERS, ROWS, TIME, WIDTH, VOCABULARY = 2, 4, 128, 512, 1024


@dataclass(frozen=True)
class Bytes(Case):
    """The example's model and step."""

    config: gpt.Config
    sequence: bool = False

    def build(self) -> tuple[Any, ...]:
        model = gpt.GPT(self.config).double()
        if self.sequence:
            tensor_parallel.split_sequence(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x = torch.randint(self.config.vocabulary, (2, self.config.context + 1), generator=random_generator(rank, step))
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    step = staticmethod(train_gpt.train_step)


# Numbers


def run_on_two_axes(rank: int, world: int, case: Bytes, style: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mode = spmd.DataParallel(style, mesh=mesh, params=tensor_parallel.placements(case.config))
    _, got = compiled_run(rank // 2, case, 3, parallel_mode=mode)
    return all_unequal(plain_run(case, 2, 3), got, rank // 2, 2)


EVEN = gpt.Config(width=16, layers=2, heads=4, context=6, vocabulary=12)
# Neither heads nor positions nor the vocabulary divide by two.
UNEVEN = gpt.Config(width=15, layers=1, heads=3, context=5, vocabulary=7)


@pytest.mark.parametrize(
    "case, style",
    [
        pytest.param(Bytes(replace(EVEN, layers=1)), "replicate", marks=pytest.mark.exhaustive),
        pytest.param(Bytes(EVEN, sequence=True), "fully_shard", marks=pytest.mark.exhaustive),
        pytest.param(Bytes(UNEVEN, sequence=True), "replicate", marks=pytest.mark.exhaustive),
        (Bytes(UNEVEN, sequence=True), "fully_shard"),
    ],
    ids=["even", "even, sequence", "uneven", "uneven, sequence"],
)
def test_losses_and_parameters_are_those_of_one_device(ranks: Ranks, case: Bytes, style: str) -> None:
    assert ranks.run(4, run_on_two_axes, case, style) == [[]] * 4


# Structure


@cache
def program(sequence: bool, tied: bool = False, layers: int = LAYERS) -> Any:
    """The program of the first of 8 x 8 ranks."""
    config = gpt.Config(WIDTH, layers, heads=8, context=TIME, vocabulary=VOCABULARY, tied=tied)
    with fake_world(64):
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
        model = gpt.GPT(config)
        if sequence:
            tensor_parallel.split_sequence(model)
        mode = spmd.DataParallel("replicate", mesh=mesh, params=tensor_parallel.placements(config))
        step = spmd.compile(parallel_mode=mode, passes=())(train_gpt.train_step)
        x = torch.zeros(ROWS, TIME, dtype=torch.long)
        step(model, torch.optim.AdamW(model.parameters()), x, x)
    assert len(step.report().every) == len(step.program.collectives())
    assert all(each.why and each.bytes for each in step.report().every)
    return step.program


def activations(found: Any) -> Counter[tuple[str, str]]:
    """How often each kind of collective moves activations over "tp" in each phase, those of numbers a row left out."""
    collectives = [(node, node.meta["collective"]) for node in found.collectives()]
    return Counter(
        (str(node.meta["phase"]), str(each.kind))
        for node, each in collectives
        if each.axis == "tp" and each.role == "activation" and shape(node.args[0])[-1:] == (WIDTH,)
    )


def shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def test_two_all_reduces_a_block_in_forward_and_two_in_backward() -> None:
    found = program(sequence=False)
    # One more in forward for the embedding, and one in backward for the head.
    assert activations(found) == {
        ("forward", "all_reduce"): 2 * LAYERS + 1,
        ("backward", "all_reduce"): 2 * LAYERS + 1,
    }
    assert_nothing_large_is_whole(found)


def test_their_halves_where_the_sequence_is_split() -> None:
    found = program(sequence=True)
    # The head gathers what the last norm gives; the two embeddings gather their gradients rather than their tables'.
    assert activations(found) == {
        ("forward", "all_gather"): 2 * LAYERS + 1,
        ("forward", "reduce_scatter"): 2 * LAYERS + 1,
        ("backward", "all_gather"): 2 * LAYERS + 2,
        ("backward", "reduce_scatter"): 2 * LAYERS + 1,
    }
    assert_nothing_large_is_whole(found)


def assert_nothing_large_is_whole(found: Any) -> None:
    """No rank has the table, its gradient or all scores of a row, and nothing of a split weight moves over "tp"."""
    shapes = {shape(node) for node in found.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    assert (ROWS * TIME, VOCABULARY // 8) in shapes and (VOCABULARY // 8, WIDTH) in shapes
    assert not [each for each in shapes if VOCABULARY in each]
    collectives = [node.meta["collective"] for node in found.collectives()]
    split = {i.name for i in found.inputs if i.role == "parameter" and i.placement[1].is_shard()}
    assert len(split) == 4 * LAYERS + 2
    assert not [each for each in collectives if each.axis == "tp" and split & set(each.of)]


def test_small_reductions_are_all_that_a_split_vocabulary_needs() -> None:
    found = program(sequence=False)
    rows = [node for node in found.collectives() if shape(node.args[0]) == (ROWS * TIME, 1)]
    assert [(node.meta["phase"], node.meta["collective"].reduction) for node in rows] == [
        ("forward", "max"),
        ("forward", "sum"),
        ("backward", "sum"),
    ]


@pytest.mark.parametrize("sequence", [False, True])
def test_one_matrix_for_reading_and_writing(sequence: bool) -> None:
    found = program(sequence, tied=True, layers=1)
    shapes = {shape(node) for node in found.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    assert not [each for each in shapes if VOCABULARY in each]
