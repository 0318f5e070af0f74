"""``shard_optimizer=True``: parameters are whole, and each rank updates its part of them with its part of the state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, NARROW
from tests.harness.memory import arena_bytes, live_bytes
from tests.harness.oracle import Case, all_unequal, assert_agrees, compiled_run, plain_run, snapshot, unequal
from tests.harness.pool import Ranks
from tests.spmd.call.test_grad_scaler import Clipped, Scaled
from tests.spmd.call.test_several import Adversaries, OneForBoth, OneWithinAnother, TwoOptimizers
from tests.spmd.capture.test_accumulation import EveryThird, EveryThirdToZero, Listed
from tests.spmd.capture.test_averages import Averaged, TeacherAndStudent
from tests.spmd.capture.test_frozen import Adversarial, FrozenInTurns
from tests.spmd.capture.test_optimizers import CountsInPython, With, WithOneOfMine
from tests.spmd.numbers.test_clipping import ByHandOnData, ByNorm, InTwoParts
from tests.spmd.numbers.test_modules import BatchNorm, TiedWeights, Unused


class UpdatedOutside(MLP):
    """The optimizer is in the step to clear gradients, and updates after it, on whole parameters."""

    sizes = (5, 4, 3)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[1].step()


MODE = {"parallel_style": "replicate", "shard_optimizer": True}
EACH = MODE | {"reduce_gradients": "each"}
NARROW_ADAMW = replace(NARROW, optimizer="AdamW")
CASES: list[tuple[Case, int, dict[str, Any]]] = [
    (NARROW, 3, MODE),
    (replace(NARROW, optimizer="AdamW fused"), 2, MODE),
    (ByNorm(), 2, MODE),
    (InTwoParts(), 2, MODE),  # gradients are there after the step
    (EveryThird(), 2, MODE),
    (Listed(), 2, EACH),
    (UpdatedOutside(optimizer="AdamW"), 2, MODE),
]
OTHERS: list[tuple[Case, int, dict[str, Any]]] = [
    (With(optimizer="Adafactor"), 2, MODE),  # in every run with parameters that are sent narrow, in test_wire_dtypes.py
    (Clipped(), 2, MODE),
    (Adversaries(), 2, MODE),
    (With(optimizer="Muon"), 2, MODE),
    (Averaged("ema"), 2, MODE),
    (TiedWeights(), 4, MODE),
    (replace(NARROW, optimizer="SGD momentum foreach"), 2, MODE),
    (With(optimizer="Rprop"), 2, MODE),
    (WithOneOfMine(kind=CountsInPython), 2, MODE),
    (ByHandOnData(), 2, MODE),
    (Scaled(), 4, MODE),
    (TeacherAndStudent(), 2, MODE),
    (EveryThirdToZero(), 2, EACH),
    (BatchNorm(), 2, MODE),
    (Unused(), 2, MODE),
    (FrozenInTurns(), 2, MODE),
    (Adversarial(), 2, MODE),
    (TwoOptimizers(), 4, MODE),
    (OneForBoth(), 2, MODE),
    (OneWithinAnother(), 2, MODE),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        grid = CASES + (OTHERS if metafunc.config.getoption("--exhaustive") else [])
        metafunc.parametrize("case, world, mode", grid, ids=named)


def named(value: Any) -> str | None:
    return f"{type(value).__name__} {getattr(value, 'optimizer', '')}".strip() if isinstance(value, Case) else None


# Numbers


def test_it_trains_as_the_plain_step(ranks: Ranks, case: Case, world: int, mode: dict[str, Any]) -> None:
    assert_agrees(ranks, world, case, mode, steps=5)


def on_two_axes(rank: int, world: int) -> list[str]:
    """The batch over one axis, the hidden layer over the other: nothing divides by the ranks of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = {"model.0.*": {"tp": Shard(0)}, "model.2.weight": {"tp": Shard(1)}}
    case = MLP(sizes=(15, 7, 3), rows=5, optimizer="SGD momentum")
    mode = spmd.DataParallel("replicate", mesh=mesh, params=params, shard_optimizer=True)
    compiled, got = compiled_run(rank // 2, case, 4, parallel_mode=mode)
    (state,) = [i for i in compiled.programs[-1].inputs if i.name == "optimizer.momentum_buffer[model.0.weight]"]
    assert state.placement == (Shard(1), Shard(0)), "tp has the rows, so dp has the columns"
    return all_unequal(plain_run(case, 2, 4), got, rank // 2, 2)


def test_in_a_split_model_the_first_free_dim_is_split(ranks: Ranks) -> None:
    assert ranks.run(4, on_two_axes) == [[]] * 4


# State


def state_of(model: nn.Module, optimizer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, its state) for all state of a parameter's shape."""
    entries = [(p, value) for p in model.parameters() for value in optimizer.state[p].values()]
    return [(p, value) for p, value in entries if value.shape == p.shape]


def kinds_of_tensors(rank: int, world: int) -> None:
    model, optimizer = NARROW_ADAMW.build()
    before = list(model.parameters())
    step = spmd.compile(parallel_mode=spmd.DataParallel(**MODE))(NARROW_ADAMW.step)
    for k in range(3):
        step(model, optimizer, *NARROW_ADAMW.part(rank, k))
    assert len(step.programs) == 1
    assert all(
        now is then and not isinstance(now, DTensor) for now, then in zip(model.parameters(), before, strict=True)
    )
    for parameter, state in state_of(model, optimizer):
        assert isinstance(state, DTensor) and state.placements == (Shard(0),)
        rows = [len(part) for part in parameter.chunk(world)] + [0] * world
        assert len(state.to_local()) == rows[rank]


def test_parameters_are_the_same_plain_objects_and_state_is_split(ranks: Ranks) -> None:
    ranks.run(3, kinds_of_tensors)


def memory(rank: int, world: int) -> tuple[int, int]:
    """Bytes that came to be alive but for the arena that programs compute in, and those of the parameters."""
    before, case = live_bytes(), MLP(sizes=(256, 512, 128), rows=8, optimizer="AdamW")
    model, optimizer = case.build()
    step = spmd.compile(parallel_mode=spmd.DataParallel(**MODE))(case.step)
    for k in range(3):
        step(model, optimizer, *case.part(rank, k))
    return live_bytes() - before - arena_bytes(step), sum(p.numel() * 8 for p in model.parameters())


def test_a_rank_has_its_part_of_the_state(ranks: Ranks) -> None:
    for grown, parameters in ranks.run(2, memory):
        needed = parameters + 2 * parameters // 2  # two averages
        assert needed <= grown < 1.05 * needed


def handed_on(rank: int, world: int) -> list[str]:
    """Two steps each: replicated, in parts, from the state dict of that, from the state dict of a plain optimizer."""
    case, found = NARROW_ADAMW, []
    expected = plain_run(case, world, 8)
    torch.manual_seed(0)
    model, optimizer = case.build()
    step: Any = None
    for k in range(8):
        if k == 4:  # what state_dict() gives is loaded by another optimizer
            optimizer = reloaded(model, optimizer.state_dict())
        elif k == 6:  # as is what a run on one device saved
            whole = optimizer.state_dict()
            for values in whole["state"].values():
                values |= {key: x.full_tensor() for key, x in values.items() if isinstance(x, DTensor)}
            optimizer = reloaded(model, whole)
        if k in (0, 2):
            mode = spmd.DataParallel(**(MODE if k else {}))
            step = spmd.compile(parallel_mode=mode)(case.step)
        result = step(model, optimizer, *case.part(rank, k))
        found += unequal(expected[k], snapshot(result, (model, optimizer)), rank, world)
        assert all(isinstance(state, DTensor) == (k >= 2) for _, state in state_of(model, optimizer))
    return found


def reloaded(model: nn.Module, state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(state)
    return optimizer


def test_state_is_handed_on_between_steps_and_through_state_dicts(ranks: Ranks) -> None:
    assert ranks.run(2, handed_on) == [[]] * 2
