"""Steps that share a model: training and evaluation, in any order; and optimizers whose state is loaded."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from spmd.ranks.standing import StateError
from tests.harness.cases import MLP
from tests.harness.fake import fake_world
from tests.harness.oracle import Snapshot, all_unequal, snapshot
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 7), rows=6, optimizer="SGD momentum")


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """No optimizer, no gradients; the outputs are this rank's rows."""
    with torch.no_grad():
        outputs = model(x)
        return F.mse_loss(outputs, y), outputs


def shared(rank: int, world: int, style: str, train_first: bool) -> tuple[list[str], int, int]:
    """What differs over training and evaluation in turns, and the number of programs of each."""
    mode = spmd.DataParallel(style)
    train, test = spmd.compile(parallel_mode=mode)(CASE.step), spmd.compile(parallel_mode=mode)(evaluate)

    def run(train: Any, test: Any, batches: list[Any]) -> list[Snapshot]:
        torch.manual_seed(0)
        model, optimizer = CASE.build()
        seen = []
        for k, batch in enumerate(batches):
            tests = (k % 2 == 0) is not train_first
            model.train(not tests)
            result = test(model, *batch) if tests else train(model, optimizer, *batch)
            seen.append(snapshot(result, (model, optimizer)))
        return seen

    parts = [[CASE.part(r, k) for r in range(world)] for k in range(6)]
    expected = run(CASE.step, evaluate, [CASE.whole(part) for part in parts])
    differ = all_unequal(expected, run(train, test, [part[rank] for part in parts]), rank, world)
    return differ, len(train.programs), len(test.programs)


@pytest.mark.parametrize("style, train_first", [
    pytest.param("replicate", True, marks=pytest.mark.exhaustive), ("fully_shard", True), ("fully_shard", False),
])  # fmt: skip
def test_an_evaluation_shares_the_model(ranks: Ranks, style: str, train_first: bool) -> None:
    assert ranks.run(2, shared, style, train_first) == [([], 1, 1)] * 2


def loaded(rank: int, world: int, style: str, at: int) -> list[str]:
    """What differs when the state of another training is loaded before call ``at``."""
    torch.manual_seed(3)
    other = CASE.build()
    for k in range(2):
        CASE.step(*other, *CASE.part(7, k))
    saved = other[1].state_dict()

    def run(step: Any, batches: list[Any]) -> list[Snapshot]:
        torch.manual_seed(0)
        model, optimizer = CASE.build()
        seen = []
        for k, batch in enumerate(batches):
            if k == at:
                optimizer.load_state_dict(deepcopy(saved))
            elif k == at + 2:
                optimizer.load_state_dict(optimizer.state_dict())  # its own, split or not
            seen.append(snapshot(step(model, optimizer, *batch), (model, optimizer)))
        return seen

    parts = [[CASE.part(r, k) for r in range(world)] for k in range(5)]
    expected = run(CASE.step, [CASE.whole(part) for part in parts])
    compiled = spmd.compile(parallel_mode=spmd.DataParallel(style))(CASE.step)
    return all_unequal(expected, run(compiled, [part[rank] for part in parts]), rank, world)


@pytest.mark.parametrize("style, at", [("replicate", 2), ("fully_shard", 0), ("fully_shard", 2)])
def test_optimizer_state_is_loaded_before_the_first_call_or_between_calls(ranks: Ranks, style: str, at: int) -> None:
    assert ranks.run(2, loaded, style, at) == [[], []]


def _evaluate(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def test_threads_take_turns() -> None:
    """Programs of one step compute in the same memory."""
    models = [nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))) for _ in range(2)]
    x = torch.rand(64, 128)
    step = spmd.compile(_evaluate)
    with fake_world(1), torch.no_grad(), ThreadPoolExecutor(2) as threads:
        wanted = [step(model, x) for model in models]

        def agrees(model: nn.Module, result: Tensor) -> bool:
            with torch.no_grad():
                return all(torch.equal(step(model, x), result) for _ in range(200))

        assert all(threads.map(agrees, models, wanted))


def copied(rank: int, world: int, style: str) -> tuple[list[str], int, int]:
    """The differences where model, optimizer and step are copied, and the copies train on other batches."""
    parts = [[CASE.part(r, k) for r in range(world)] for k in range(6)]

    def run(step: Any, batches: list[Any]) -> tuple[list[Snapshot], Any]:
        torch.manual_seed(0)
        ours = CASE.build()
        for batch in batches[:2]:
            step(*ours, *batch)
        theirs, other = deepcopy(ours), deepcopy(step)
        seen = [snapshot(step(*ours, *batch), ours) for batch in batches[2:4]]
        seen += [snapshot(other(*theirs, *batch), theirs) for batch in batches[3:]]
        return [*seen, snapshot(None, ours)], other

    expected, _ = run(CASE.step, [CASE.whole(part) for part in parts])
    compiled = spmd.compile(parallel_mode=spmd.DataParallel(style, mesh=spmd.world()))(CASE.step)
    got, other = run(compiled, [part[rank] for part in parts])
    return all_unequal(expected, got, rank, world), len(compiled.programs), len(other.programs)


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_copies_are_trained_for_themselves(ranks: Ranks, style: str) -> None:
    assert ranks.run(2, copied, style) == [([], 1, 1)] * 2


class Holding(nn.Linear):
    """A model that has its step."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.step = spmd.compile(_evaluate)


def test_a_copy_of_a_model_has_a_copy_of_its_step() -> None:
    model, x = Holding(), torch.ones(1, 2)
    with fake_world(1), torch.no_grad():
        wanted = model.step(model, x)
        twin = deepcopy(model)
        model.weight.zero_()
        assert torch.equal(twin.step(twin, x), wanted)
        assert not torch.equal(model.step(model, x), wanted)
    assert twin.step is not model.step
    assert len(twin.step.programs) == len(model.step.programs) == 1


class Trainer:
    """Holds a step that is one of its methods."""

    def __init__(self) -> None:
        self.step = spmd.compile(self.run)

    def run(self, x: Tensor) -> Tensor:
        return x + 1


def test_a_copied_method_belongs_to_the_copy() -> None:
    trainer = Trainer()
    twin = deepcopy(trainer)
    assert twin.step.__wrapped__.__self__ is twin


def test_a_step_can_be_pickled() -> None:
    """What it has compiled stays behind."""
    step = spmd.compile(_evaluate)
    with fake_world(1), torch.no_grad():
        step(nn.Linear(2, 2), torch.ones(1, 2))
    again = pickle.loads(pickle.dumps(step))
    assert again.__wrapped__ is _evaluate
    assert again.programs == ()


def fails() -> None:
    """An op that fails after the step has written state."""
    raise ArithmeticError("after the update")


def failing_last(gm: Any) -> Any:
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(fails)
    gm.recompile()
    return gm


@pytest.mark.usefixtures("alone")
def test_only_the_steps_of_a_model_that_is_partly_updated_are_stopped() -> None:
    broken, whole = CASE.build(), CASE.build()
    saved = [each.state_dict() for each in map(deepcopy, broken)]
    batch = CASE.part(0, 0)
    with pytest.raises(ArithmeticError):
        spmd.compile(CASE.step, gm_transformation=failing_last)(*broken, *batch)
    train = spmd.compile(CASE.step)
    for _ in range(2):
        train(*whole, *batch)
        with pytest.raises(StateError, match=r"partly updated.*after the update"):
            spmd.compile(CASE.step)(*broken, *batch)
    for each, state in zip(broken, saved, strict=True):
        each.load_state_dict(state)
    train(*broken, *batch)
