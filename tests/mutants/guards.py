"""A step that all kinds of guards look at, and for each kind a change that no other kind sees."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from spmd._torch import TensorGuards
from spmd.capture.hyper_conditions import HyperGuards
from spmd.guards import guards
from spmd.guards.annotation_guards import AnnotationGuards
from spmd.guards.carried_tensors import CarriedTensors
from spmd.guards.found_owners import Found, FoundOwners
from spmd.guards.leaves import Leaves
from spmd.guards.module_tree import ModuleTree
from spmd.guards.parameter_groups import ParameterGroups
from spmd.guards.read_guards import ReadGuards

SETTINGS = guards.torch_settings()
HELD = types.SimpleNamespace(scale=1.0, optimizer=None, total=None)


class Net(nn.Module):
    """A layer, dropout, and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("like_a_batch", torch.zeros(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.layer(x).tanh()))
        return out


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Uses a model and an optimizer that it is given, and another optimizer that it finds."""
    loss = F.mse_loss(model(x), y) * HELD.scale
    if optimizer.param_groups[0]["lr"] > 0.05:
        loss = loss * 2
    if model.seen > 5:
        loss = loss * 3
    loss.backward()
    HELD.total = HELD.total + loss.detach()
    for each in (optimizer, HELD.optimizer):
        each.step()
        each.zero_grad()
    return loss.detach()


class Other(torch.optim.SGD):
    """Another class of optimizers."""


class Trial:
    """The step, compiled and called twice; ``runs_stale`` says whether a call now would run that program."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net().double()
        self.optimizer = torch.optim.SGD(self.model.layer.parameters(), lr=0.1, momentum=0.9)
        HELD.optimizer = torch.optim.SGD(self.model.head.parameters(), lr=0.1, momentum=0.9)
        HELD.scale, HELD.total = 1.0, torch.zeros(1, dtype=torch.float64)
        self.batch = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.compiled = spmd.compile(step)
        for _ in range(2):
            self.compiled(self.model, self.optimizer, *self.batch)

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group of the optimizer that is an argument."""
        group: dict[str, Any] = self.optimizer.param_groups[0]
        return group

    def runs_stale(self) -> bool:
        """Whether guards admit a call to the last program."""
        dispatch = self.compiled._dispatch
        given = dispatch.read((self.model, self.optimizer, *self.batch), {})
        with self.around():
            last: Any = dispatch.programs.last
            return last.guards.admit(given) is not None


@dataclass(frozen=True)
class Guard:
    """A kind of guard, as the function that checks it, a wrong version of that, and a change that it alone sees."""

    owner: Any
    name: str
    wrong: Callable[..., Any]
    change: Callable[[Trial], object]


def holds(*_: Any) -> bool:
    """The wrong version of most: the check is dropped."""
    return True


def remembered(self: FoundOwners, given: Any) -> Any:
    """What was found is stale: that of the call before, whatever stands there now."""
    return given.with_found([Found(path, each()) for path, each in zip(self.paths, self.expected, strict=True)])


def annotate(trial: Trial) -> None:
    spmd.replicate(trial.model.layer)


def find_another(trial: Trial) -> None:
    """The same optimizer, of another class: of reads, identity counts."""
    HELD.optimizer.__class__ = Other


def pass_state(trial: Trial) -> None:
    trial.batch = trial.model.get_buffer("like_a_batch"), trial.batch[1]


def pass_fewer_rows(trial: Trial) -> None:
    trial.batch = trial.batch[0][:4], trial.batch[1][:4]


def leave_gradients(trial: Trial) -> None:
    trial.around = torch.no_grad


GUARDS: dict[str, Guard] = {
    "leaves": Guard(Leaves, "hold", holds, pass_fewer_rows),
    "state among the arguments": Guard(Leaves, "hold_state", holds, pass_state),
    "found": Guard(FoundOwners, "complete", remembered, find_another),
    "settings": Guard(guards, "torch_settings", lambda: SETTINGS, leave_gradients),
    "tree": Guard(ModuleTree, "hold", holds, lambda trial: trial.model.drop.eval()),
    "annotations": Guard(AnnotationGuards, "hold", holds, annotate),
    "groups": Guard(
        ParameterGroups, "hold", holds, lambda trial: trial.optimizer.param_groups[0].update(maximize=True)
    ),
    "reads": Guard(ReadGuards, "hold", holds, lambda _: setattr(HELD, "scale", 0.5)),
    "layout": Guard(TensorGuards, "check", holds, lambda trial: trial.model.head.bias.requires_grad_(False)),
    "carried": Guard(CarriedTensors, "hold", holds, lambda _: setattr(HELD, "total", torch.zeros(1))),
    "conditions": Guard(HyperGuards, "hold", holds, lambda trial: trial.group.update(lr=0.01)),
    "conditions on state": Guard(HyperGuards, "hold_for_state", holds, lambda trial: trial.model.seen.fill_(9.0)),
}
