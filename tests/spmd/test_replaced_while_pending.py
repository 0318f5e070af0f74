"""State that a person replaces while its update is pending: the update is of what was there, as in the plain loop."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import spmd
from tests.harness.cases import MLP, mlp
from tests.harness.messages import messages
from tests.harness.oracle import all_unequal, plain_run, snapshot
from tests.harness.pool import Ranks

CASE = MLP(sizes=(5, 4, 3), rows=4, optimizer="SGD momentum")


def _zeros(model: nn.Module) -> dict[Any, dict[str, Any]]:
    return {p: {"momentum_buffer": torch.zeros(p.shape, dtype=p.dtype)} for p in model.parameters()}


def _other() -> nn.Module:
    torch.manual_seed(5)
    return mlp(*CASE.sizes)


def _entry(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[model[0].weight]["momentum_buffer"] = _zeros(model)[model[0].weight]["momentum_buffer"]


def _entries_of_one(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[model[0].weight] = _zeros(model)[model[0].weight]


def _all_entries(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict, _zeros(model))


def _data(model: nn.Module, _: Optimizer) -> None:
    model[0].weight.data = _other()[0].weight.data.clone()  # type: ignore[index]


def _all_data(model: nn.Module, _: Optimizer) -> None:
    vector = nn.utils.parameters_to_vector(_other().parameters())
    nn.utils.vector_to_parameters(vector.detach(), model.parameters())


def _data_for_a_while(model: nn.Module, _: Optimizer) -> None:
    kept = [p.data for p in model.parameters()]
    for p, other in zip(model.parameters(), _other().parameters(), strict=True):
        p.data = other.data.clone()
    model.state_dict()
    for p, data in zip(model.parameters(), kept, strict=True):
        p.data = data


def _follow(model: nn.Module, optimizer: Optimizer) -> None:
    """Let the optimizer have the model's parameters, with the entries of those whose place they took."""
    pairs = list(zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    optimizer.state = defaultdict(dict, {now: optimizer.state[before] for before, now in pairs})
    optimizer.param_groups[0]["params"] = [now for _, now in pairs]


def _parameter(model: nn.Module, optimizer: Optimizer) -> None:
    model[0].weight = nn.Parameter(_other()[0].weight.data.clone())  # type: ignore[index,operator]
    _follow(model, optimizer)


def _module(model: nn.Module, optimizer: Optimizer) -> None:
    model[2] = _other()[2]  # type: ignore[index,operator]
    _follow(model, optimizer)


def _load(model: nn.Module, _: Optimizer) -> None:
    model.load_state_dict(_other().state_dict())


def _load_by_assignment(model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict({k: v.clone() for k, v in _other().state_dict().items()}, assign=True)
    _follow(model, optimizer)


def _load_into_optimizer(_: nn.Module, optimizer: Optimizer) -> None:
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["momentum_buffer"] = torch.zeros_like(entry["momentum_buffer"])
    optimizer.load_state_dict(state)


def _group(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.3, "momentum": 0.5}


def _groups(_: nn.Module, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    parts = (group["params"][:1], group["params"][1:])
    optimizer.param_groups = [{**group, "params": each, "lr": lr} for each, lr in zip(parts, (0.2, 0.3), strict=True)]


def _convert(model: nn.Module, _: Optimizer) -> None:
    model.float().double()


def _initialise(model: nn.Module, _: Optimizer) -> None:
    torch.manual_seed(3)
    model.apply(lambda each: each.reset_parameters() if isinstance(each, nn.Linear) else None)


def _copy_optimizer(_: nn.Module, optimizer: Optimizer) -> None:
    copied = copy.deepcopy(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 * float(sum(e["momentum_buffer"].norm() for e in copied.state.values()))


# The last ones compile another program.
REPLACED: tuple[Callable[[Any, Optimizer], None], ...] = (
    *(_entry, _entries_of_one, _all_entries, _data, _all_data, _data_for_a_while, _load, _load_into_optimizer),
    *(_group, _convert, _initialise, _copy_optimizer, _parameter, _module, _load_by_assignment, _groups),
)


class Replaces(MLP):
    """After each step state is replaced in another spelling."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        if step % 2 and step < 2 * len(REPLACED):  # so that a call finds the state of the one before in between
            REPLACED[step // 2](*objects)


CALLS = 2 * len(REPLACED) + 2


def replaces(rank: int, world: int, mode: dict[str, Any], by_messages: bool) -> list[str]:
    """The losses that differ from the plain step's, each after a spelling, and the state that does in the end."""
    case = Replaces(CASE.sizes, CASE.rows, CASE.optimizer)
    expected, found = plain_run(case, world, CALLS), list[str]()
    with messages(rank) if by_messages else nullcontext():
        torch.manual_seed(0)
        objects = case.build()
        step = spmd.compile(case.step, parallel_mode=spmd.DataParallel(**mode, defer_updates=True))
        for k in range(CALLS):
            loss = step(*objects, *case.part(rank, k))
            if abs(float(loss) - float(expected[k]["result"])) > 1e-10:
                found.append(f"loss {k}, after {REPLACED[max(k // 2 - 1, 0)].__name__}")
            if k < CALLS - 1:
                case.after(objects, k)
        pending = step._dispatch.programs.deferred()
        assert any(each.has_pending for each in pending) == by_messages
        step.flush()
        return found + all_unequal(expected[-1:], [snapshot(loss, objects)], rank, world)


@pytest.mark.parametrize(
    "mode, by_messages",
    [
        ({}, True),
        ({}, False),
        ({"parallel_style": "fully_shard"}, True),
        pytest.param({"shard_optimizer": True}, True, marks=pytest.mark.exhaustive),
    ],
)
def test_an_update_is_of_the_state_that_was_there(ranks: Ranks, mode: dict[str, Any], by_messages: bool) -> None:
    assert ranks.run(2, replaces, mode, by_messages) == [[]] * 2


class ReplacesRows(MLP):
    """After the second step the last two rows of the first weight are zeros, in other memory."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        if step == 1:
            weight = objects[0][0].weight
            weight.data = torch.cat([weight.data[:2], torch.zeros(2, self.sizes[0], dtype=weight.dtype)])


def replaced_by_one(rank: int, world: int) -> list[str]:
    """Rank 1 alone has those rows. What differs from the plain step in the end."""
    case = ReplacesRows(CASE.sizes, CASE.rows, CASE.optimizer)
    with messages(rank):
        torch.manual_seed(0)
        objects = case.build()
        step = spmd.compile(case.step, parallel_mode=spmd.DataParallel("fully_shard", defer_updates=True))
        for k in range(4):
            loss = step(*objects, *case.part(rank, k))
            if k == 1 and rank == 1:
                local = objects[0][0].weight._local_tensor
                local.data = torch.zeros_like(local)
        step.flush()
        return all_unequal(plain_run(case, world, 4)[-1:], [snapshot(loss, objects)], rank, world)


def test_what_one_rank_alone_replaces_all_finish_first(ranks: Ranks) -> None:
    assert ranks.run(2, replaced_by_one) == [[]] * 2
