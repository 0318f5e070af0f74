"""``defer_updates=True``: a call leaves its update to the next one, and whoever looks at state finds it done."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from spmd.ranks import local_ranks
from tests.harness.cases import MLP
from tests.harness.oracle import Snapshot, all_unequal, plain_run, snapshot
from tests.harness.pool import RankError, Ranks

CASE = MLP(sizes=(15, 7, 7, 5), rows=6, optimizer="SGD momentum")


@dataclass(frozen=True)
class Scheduled(MLP):
    """Gradients are clipped, and the learning rate is another in each step."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[1].param_groups[0]["lr"] *= 0.5

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@contextmanager
def messages(rank: int) -> Iterator[None]:
    """Let ranks take each other for ranks of other hosts: through shared memory nothing would be in flight."""
    host, local_ranks._host = local_ranks._host, lambda: f"host {rank}"
    try:
        yield
    finally:
        local_ranks._host = host


class Training:
    """A compiled step on one rank, and how many calls of it were made."""

    def __init__(self, rank: int, case: MLP = CASE, **mode: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.case, self.calls = rank, case, 0
        self.objects = case.build()
        self.step = spmd.compile(parallel_mode=spmd.DataParallel(**{"defer_updates": True, **mode}))(case.step)

    def call(self, times: int = 1, **options: Any) -> Any:
        for _ in range(times):
            result = self.step(*self.objects, *self.case.part(self.rank, self.calls), **options)
            self.case.after(self.objects, self.calls)
            self.calls += 1
        return result

    def state(self) -> Snapshot:
        """As it lies in memory, which no hook sees."""
        return {name: _plain(p).clone() for name, p in self.objects[0].named_parameters()}

    def is_pending(self) -> bool:
        return any(compiled.has_pending for compiled in self.step._dispatch.programs)

    def unequal(self, world: int, result: Any) -> list[str]:
        """What differs from the plain step after as many calls; the update is no longer pending."""
        assert not self.is_pending()
        expected = plain_run(self.case, world, self.calls)[-1:]
        return all_unequal(expected, [snapshot(result, self.objects)], self.rank, world)


def _plain(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def trained(rank: int, world: int, case: MLP, mode: dict[str, Any], calls: int) -> tuple[list[str], bool, list[str]]:
    """What differs from the plain step, whether bits are those of the step that defers nothing, and the programs."""
    with messages(rank):
        training, other = Training(rank, case, **mode), Training(rank, case, **mode, defer_updates=False)
        result = [each.call(calls) for each in (training, other)][0]
        assert training.is_pending()
        training.step.flush()
        equal = all(torch.equal(value, other.state()[name]) for name, value in training.state().items())
        names = [program.name.rpartition("-")[2] for program in training.step.programs]
        return training.unequal(world, result), equal, names


MODES: list[dict[str, Any]] = [{}, {"parallel_style": "fully_shard"}, {"shard_optimizer": True}]


@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("optimizer, mode", [("SGD", MODES[0]), ("SGD", MODES[1]), ("AdamW", MODES[2])])
def test_the_numbers_are_those_of_the_plain_step(
    ranks: Ranks, optimizer: str, mode: dict[str, Any], calls: int
) -> None:
    case = Scheduled(sizes=(15, 7, 7, 5), rows=6, optimizer=optimizer)
    expected = ([], True, ["first", "steady", "finish"])
    assert ranks.run(2, trained, case, mode, calls) == [expected] * 2


def looked_at(rank: int, world: int, look: Callable[[Training, str], Any], folder: str) -> tuple[bool, list[str]]:
    """Whether the update was pending before somebody looked, and what differs afterwards, and after two more calls."""
    with messages(rank):
        training = Training(rank)
        result = training.call(2)
        was_pending = training.is_pending()
        look(training, folder)
        differ = training.unequal(world, result)
        result = training.call(2)
        training.step.flush()
        return was_pending, differ + training.unequal(world, result)


def _evaluate(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


LOOKS: dict[str, Callable[[Training, str], Any]] = {
    "flush": lambda t, _: t.step.flush(),
    "state_dict": lambda t, _: t.objects[0].state_dict(),
    "state_dict of a part": lambda t, _: t.objects[0][2].state_dict(),
    "state_dict of the optimizer": lambda t, _: t.objects[1].state_dict(),
    "load_state_dict": lambda t, _: t.objects[0].load_state_dict(_values(t.objects[0])),
    "load_state_dict of the optimizer": lambda t, _: t.objects[1].load_state_dict(t.objects[1].state_dict()),
    "forward": lambda t, _: t.objects[0](t.case.part(0, 0)[0]),
    "forward of a part": lambda t, _: t.objects[0][0](t.case.part(0, 0)[0]),
    "step of the optimizer": lambda t, _: t.objects[1].step(),
    "deepcopy": lambda t, _: copy.deepcopy(t.objects[0]),
    "pickle": lambda t, _: pickle.dumps(t.objects[0]),
    "torch.save": lambda t, _: torch.save(t.objects[0], io.BytesIO()),
    "another step": lambda t, _: spmd.compile(_evaluate)(t.objects[0], t.case.part(0, 0)[0]),
    "another program": lambda t, _: (t.objects[0].eval(), t.objects[0].train()),
    "save": lambda t, folder: spmd.save(folder, model=t.objects[0]),
    "export": lambda t, folder: spmd.export(folder, t.objects[0]),
    "unshard": lambda t, _: _unshard(t.objects[0]),
}


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _unshard(model: nn.Module) -> None:
    with spmd.unshard(model):
        pass
