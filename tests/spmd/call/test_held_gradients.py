"""What the user keeps of a gradient stays as it is, whatever later calls leave behind in ``param.grad``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack, to_dlpack

import spmd
from spmd.lowering import codegen
from tests.harness.cases import MLP
from tests.harness.oracle import differences
from tests.harness.pool import Ranks


def local(gradient: Tensor) -> Tensor:
    """This rank's part."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


KEEP: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(gradient.shape),
    "detached": lambda gradient: gradient.detach(),
    "this rank's part": local,
    "numpy": lambda gradient: local(gradient).numpy(),
    "dlpack": lambda gradient: to_dlpack(local(gradient)),
    "data": lambda gradient: gradient.data,
    "storage": lambda gradient: local(gradient).untyped_storage(),
}


def values(kept: Any) -> Tensor:
    """A copy of this rank's part of what was kept."""
    if isinstance(kept, torch.UntypedStorage):
        return torch.tensor(kept.tolist())
    if not isinstance(kept, Tensor):
        kept = torch.as_tensor(kept) if hasattr(kept, "shape") else from_dlpack(kept)
    return local(kept).clone()


@dataclass(frozen=True)
class Held(MLP):
    """Each parameter's gradient is kept in another way after each call; those of the last layer are not kept.

    An optimizer that the step does not know reads the gradients after each call.
    """

    sizes: tuple[int, ...] = (9, 8, 7, 6, 5, 4)
    rows: int = 4
    kept: list[tuple[str, Any, Tensor]] = field(default_factory=list)

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        """Keep the gradients, and update with them once more."""
        for (how, keep), parameter in zip(KEEP.items(), objects[0].parameters(), strict=False):
            assert parameter.grad is not None
            before = values(keep(parameter.grad))
            self.kept.append((f"{how} after call {step}", keep(parameter.grad), before))
        torch.optim.SGD(objects[0].parameters(), lr=0.01).step()

    def changed(self) -> list[str]:
        """What was kept, and is no longer what it was."""
        return [name for name, kept, before in self.kept if not torch.equal(values(kept), before)]

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Clears first."""
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss


@dataclass(frozen=True)
class AddedTo(Held):
    """Between calls the user adds to gradients, to which every other step adds its own."""

    def build(self) -> tuple[Any, ...]:
        """A model that counts."""
        model, optimizer = super().build()
        model.accumulates = False
        return model, optimizer

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        """Add."""
        for parameter in objects[0].parameters():
            assert parameter.grad is not None
            parameter.grad.add_(1)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Clears every other time."""
        if not model.accumulates:
            optimizer.zero_grad()
        model.accumulates = not model.accumulates
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss


def found(rank: int, world: int, case: Held, mode: dict[str, Any]) -> list[str]:
    """What differs from the plain run, and what was kept and has changed."""
    return differences(rank, world, case, mode, steps=5) + case.changed()


def addresses(rank: int, world: int, mode: dict[str, Any]) -> tuple[list[list[bool]], list[bool]]:
    """Of each parameter, in which calls its gradient lies where it lay before; the first one's is kept in call 2.

    And whether gradients lie in memory that other processes see, in the call after one whose gradients are moved there,
    as a queue of ``torch.multiprocessing`` moves what it sends.
    """
    case, kept, lay, found = Held(), [], [0] * 10, []
    model, optimizer = case.build()
    step = spmd.compile(case.step, parallel_mode=spmd.DataParallel(**mode))
    for k in range(6):
        step(model, optimizer, *case.part(rank, k))
        lies = [local(parameter.grad).data_ptr() for parameter in model.parameters()]
        found.append([one == other for one, other in zip(lies, lay, strict=True)])
        kept += [next(model.parameters()).grad] if k == 2 else []
        lay = lies
    for parameter in model.parameters():
        local(parameter.grad).share_memory_()
    step(model, optimizer, *case.part(rank, 6))
    return found, [local(parameter.grad).is_shared() for parameter in model.parameters()]


MODES: dict[str, dict[str, Any]] = {
    "replicate": {"parallel_style": "replicate"},
    "fully_shard": {"parallel_style": "fully_shard"},
    "kept whole": {"parallel_style": "fully_shard", "reshard_after_forward": False},
    "shard_optimizer": {"shard_optimizer": True},
    "micro-batches": {"parallel_style": "fully_shard", "micro_batches": 2},
}


USUAL = [pytest.param(mode, marks=pytest.mark.exhaustive) if mode == "kept whole" else mode for mode in MODES]


@pytest.mark.parametrize("mode", USUAL)
def test_a_kept_gradient_stays_as_it_is(ranks: Ranks, mode: str) -> None:
    assert not [line for lines in ranks.run(2, found, Held(), MODES[mode]) for line in lines]


@pytest.mark.parametrize("mode", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_what_is_added_to_a_gradient_between_calls_counts(ranks: Ranks, mode: str) -> None:
    assert not [line for lines in ranks.run(2, found, AddedTo(), MODES[mode]) for line in lines]


@pytest.mark.parametrize("mode", USUAL)
def test_a_gradient_lies_where_that_of_the_call_before_lay_unless_others_may_see_it(ranks: Ranks, mode: str) -> None:
    """It is kept, or is in memory that other processes may see."""
    for found, shared in ranks.run(2, addresses, MODES[mode]):
        assert found == [[False] * 10, *[[True] * 10] * 2, [False, *[True] * 9], *[[True] * 10] * 2]
        assert shared == [False] * 10


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, update: bool) -> Tensor:
    """Adds to gradients, until a call updates and clears."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def bound_in_each_update(rank: int, world: int, style: Any, calls: int) -> list[bool]:
    """Whether a program is bound to its state anew in each of five updates."""
    case, bound = MLP(), list[bool]()
    model, optimizer = case.build()
    step = spmd.compile(accumulates, parallel_mode=spmd.DataParallel(style))
    for _ in range(5):
        with mock.patch.object(codegen, "_check_aligned", wraps=codegen._check_aligned) as check:
            for k in range(calls):
                step(model, optimizer, *case.part(rank, k), update=k == calls - 1)
        bound.append(check.called)
    return bound


@pytest.mark.parametrize(("style", "calls"), [("replicate", 3), ("fully_shard", 2)])
def test_programs_that_add_to_gradients_are_bound_once(ranks: Ranks, style: str, calls: int) -> None:
    for bound in ranks.run(2, bound_in_each_update, style, calls):
        assert bound[2:] == [False] * 3  # the first ones are compiled, and then come to share an arena
