"""When a step compiles, how often, and with which backend and passes."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx

import spmd
from passes import Role
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks


@dataclass
class Noting:
    """A gm_transformation that notes each graph it gets."""

    graphs: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.graphs.append(gm)
        return gm


def small(optimizer: str) -> MLP:
    return MLP(sizes=(15, 7), rows=6, optimizer=optimizer)


def compilations(rank: int, world: int, optimizer: str, style: str) -> list[tuple[int, int]]:
    """After each of five calls: how often gm_transformation was called, how many programs there are."""
    case, noting, counted = small(optimizer), Noting(), []
    step = spmd.compile(gm_transformation=noting, parallel_mode=spmd.DataParallel(style))(case.step)
    objects = case.build()
    for k in range(5):
        step(*objects, *case.part(rank, k))
        counted.append((len(noting.graphs), len(step.programs)))
    return counted


@pytest.mark.parametrize("optimizer, style", [
    ("SGD", "fully_shard"), ("SGD momentum", "replicate"), ("Adam", "fully_shard"), ("AdamW fused", "replicate"),
])  # fmt: skip
def test_from_the_second_call_on_nothing_compiles(ranks: Ranks, optimizer: str, style: str) -> None:
    assert ranks.run(2, compilations, optimizer, style) == [[(1, 1)] * 5] * 2


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("collected", [False, True])
def test_gradients_of_a_model_with_a_new_layer_are_no_state_whenever_the_old_one_is_noticed_gone(
    collected: bool,
) -> None:
    @spmd.compile
    def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    step(model, torch.optim.SGD(model.parameters()), torch.ones(2, 3))
    old, model[1] = model[1], torch.nn.Linear(4, 2)
    if collected:
        del old
        gc.collect()
    step(model, torch.optim.SGD(model.parameters()), torch.ones(2, 3))
    assert not [each.name for each in step.program.inputs if each.role is Role.GRADIENT]  # ranks notice it on their own


def doubled(gm: fx.GraphModule) -> fx.GraphModule:
    """Doubles the first result."""
    output = gm.graph.output_node()
    first, *others = output.args[0]
    with gm.graph.inserting_before(output):
        twice = gm.graph.call_function(torch.ops.aten.mul.Tensor, (first, 2.0))
    output.args = ((twice, *others),)
    gm.recompile()
    return gm


@pytest.mark.usefixtures("alone")
def test_gm_transformation_changes_what_runs() -> None:
    case = small("SGD")
    plain = spmd.compile(case.step)(*_objects(case), *case.part(0, 0))
    changed = spmd.compile(gm_transformation=doubled)(case.step)(*_objects(case), *case.part(0, 0))
    torch.testing.assert_close(changed, 2 * plain)


def with_backend(rank: int, world: int) -> tuple[list[str], list[bool]]:
    case, examples = small("AdamW"), []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        examples.append(len(placeholders) == len(example_inputs))
        return gm

    _, got = compiled_run(rank, case, 5, backend=backend)
    return all_unequal(plain_run(case, world, 5), got, rank, world), examples


def test_a_backend_of_one_s_own_runs_the_regions(ranks: Ranks) -> None:
    assert ranks.run(2, with_backend) == [([], [True] * 3)] * 2


@pytest.mark.usefixtures("alone")
def test_the_given_passes_run() -> None:
    case = small("SGD")
    mode = spmd.DataParallel("replicate", custom_passes=())
    bare = spmd.compile(parallel_mode=mode)(case.step)
    default = spmd.compile(case.step)
    bare(*_objects(case), *case.part(0, 0))
    default(*_objects(case), *case.part(0, 0))
    assert len(bare.program.history) < len(default.program.history)


def _objects(case: MLP) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return case.build()
