"""What was built from parameters before a step split the model refers to the split ones after it, whatever it is."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.fake import fake_world
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def split(model: nn.Module, x: Tensor) -> None:
    """Train one step under "fully_shard", without a warning."""
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spmd.compile(train_step, parallel_mode=spmd.DataParallel("fully_shard"))(model, optimizer, x)


class Plain:
    def __init__(self, weight: Any) -> None:
        self.weight = weight


class Slots:
    __slots__ = ("weight",)

    def __init__(self, weight: Any) -> None:
        self.weight = weight


@dataclass(frozen=True)
class Frozen:
    weight: Any


Named = namedtuple("Named", "count weight")


def holders_of(weight: Tensor) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """What can refer to a parameter, each with how to read that."""

    def closure() -> Tensor:
        return weight

    def default(tensor: Tensor = weight) -> Tensor:
        return tensor

    return {
        "list": ([0, weight], lambda x: x[1]),
        "deque": (deque([weight]), lambda x: x[0]),
        "set": ({weight}, lambda x: next(iter(x))),
        "tuple": ([(1, (weight, 2))], lambda x: x[0][1][0]),
        "frozenset": ([frozenset([weight])], lambda x: next(iter(x[0]))),
        "named tuple": ([Named(1, weight)], lambda x: x[0].weight),
        "value": ({"a": weight}, lambda x: x["a"]),
        "key": ({1: 2, weight: 3, 4: 5}, lambda x: [*x][1]),
        "ordered key": (OrderedDict([(1, 2), (weight, 3), (4, 5)]), lambda x: [*x][1]),
        "attribute": (Plain(weight), lambda x: x.weight),
        "slot": (Slots(weight), lambda x: x.weight),
        "frozen": (Frozen(weight), lambda x: x.weight),
        "class": (type("Class", (), {"weight": weight}), lambda x: x.weight),
        "closure": (closure, lambda x: x()),
        "default": (default, lambda x: x()),
        "partial": (partial(default, weight), lambda x: x()),
        "keyword": (partial(default, tensor=weight), lambda x: x()),
        "parameter list": (nn.ParameterList([weight]), lambda x: x[0]),
        "parameter dict": (nn.ParameterDict({"a": weight}), lambda x: x["a"]),
        "optimizer": (torch.optim.SGD([weight], lr=0.1), lambda x: x.param_groups[0]["params"][0]),
        "attribute of a parameter": (attached(weight), lambda x: x.twin),
    }


def attached(weight: Tensor) -> nn.Parameter:
    other = nn.Parameter(torch.ones(1))
    other.twin = weight  # type: ignore[attr-defined]
    return other


def all_that_refers(rank: int, world: int) -> None:
    """Modules that share it are split with it."""
    with fake_world(2):
        model, tied, recurrent = (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
            nn.Linear(4, 4),
            nn.RNN(4, 4),
        )
        holders, optimizer = holders_of(model[0].weight), torch.optim.LBFGS(model.parameters())  # type: ignore[arg-type]
        tied.weight = recurrent.weight_ih_l0 = model[0].weight  # type: ignore[assignment]
        split(model, torch.ones(2, 4))
        others = [name for name, (holder, read) in holders.items() if read(holder) is not model[0].weight]
        assert tied.weight is recurrent.weight_ih_l0 is recurrent._flat_weights[0] is model[0].weight
        with pytest.raises(spmd.SpmdError, match="outside of a compiled step"):
            tied(torch.ones(2, 4))
    assert others == []
    assert [*map(id, optimizer._params)] == [*map(id, model.parameters())]


def a_variable(rank: int, world: int) -> None:
    with fake_world(2):
        model = nn.Linear(4, 4)
        weight = model.weight
        weight.note = "before"  # type: ignore[attr-defined]
        split(model, torch.ones(2, 4))
        weight.note = "after"  # type: ignore[attr-defined]
        weight.grad = torch.ones_like(weight)
        with torch.no_grad():
            weight.fill_(3.0)
        now = model.weight
        assert weight is not now and isinstance(weight, nn.Parameter)
        assert weight.to_local().eq(3).all() and now.to_local().eq(3).all()  # type: ignore[attr-defined]
        assert now.grad is weight.grad and now.note == "after"  # type: ignore[attr-defined]
        assert copy.deepcopy(weight).placements == now.placements  # type: ignore[attr-defined]
        with pytest.raises(spmd.SpmdError, match="pickled"):
            copy.copy(weight).__reduce_ex__(2)


def on_the_meta_device(rank: int, world: int) -> None:
    with fake_world(2):
        models = [nn.Linear(4, 4, device="meta") for _ in range(2)]
        held = [each.weight for each in models]
        spmd.materialize(models[0], "fully_shard")
        split(models[1], torch.ones(2, 4))
        assert [*map(id, held)] == [id(each.weight) for each in models]


# In processes of few objects: what refers to a parameter is found among all that there are.
@pytest.mark.parametrize("job", [all_that_refers, a_variable, on_the_meta_device], ids=lambda job: job.__name__)
def test_what_refers_to_a_parameter_refers_to_the_split_one(ranks: Ranks, job: Callable[..., None]) -> None:
    ranks.run(1, job, process_group=False)


class Agent:
    """As in SAC: a list of parameters has the temperature, which the step and the optimizer know by an attribute."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2).double()
        self.held = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.float64))])
        self.alpha = self.held[0]
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1), torch.optim.Adam([self.alpha], lr=0.05)]

    def step(self, x: Tensor) -> Tensor:
        y = self.model(x).square().sum(1)
        second = -(self.alpha * (y.detach() - 2.0)).mean()
        loss = (self.alpha.exp().detach() * y).mean()
        for each, optimizer in zip((loss, second), self.optimizers, strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        return loss


def train_two_names(rank: int, world: int, style: str) -> None:
    ours, plain = Agent(), Agent()
    before = ours.alpha
    step = spmd.compile(ours.step, parallel_mode=style)  # type: ignore[arg-type]
    for k in range(4):
        parts = [torch.randn(4, 4, generator=random_generator(r, k), dtype=torch.float64) for r in range(world)]
        torch.testing.assert_close(step(parts[rank]), plain.step(torch.cat(parts)), rtol=1e-12, atol=1e-12)
    assert ours.held[0] is ours.alpha
    whole, kept = spmd.state_dict(ours.held)["0"], before.detach()
    kept = kept.full_tensor() if hasattr(kept, "full_tensor") else kept
    torch.testing.assert_close([whole, kept], [plain.alpha.detach()] * 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("style", ["fully_shard", "zero1", pytest.param("replicate", marks=pytest.mark.exhaustive)])
def test_a_parameter_under_two_names_is_one(ranks: Ranks, style: str) -> None:
    ranks.run(2, train_two_names, style)


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def update_outside(rank: int, world: int, kind: str, style: str) -> None:
    """Train with an optimizer that the step does not take, and that is built before the first call; compare."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double())
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    optimizers = [getattr(torch.optim, kind)(each.parameters(), lr=0.1, **settings) for each in models]
    steps = [spmd.compile(parallel_mode=spmd.DataParallel(style))(gradients), gradients]
    for k in range(4):
        x = torch.randn(2 * world, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        losses = [step(model, part) for step, model, part in zip(steps, models, (x[2 * rank :][:2], x), strict=True)]
        torch.testing.assert_close(losses[0], losses[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with spmd.unshard(models[0]):
        for ours, theirs in zip(*(each.parameters() for each in models), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind, style", [
    ("SGD", "fully_shard"), ("SGD", "replicate"), pytest.param("AdamW", "fully_shard", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_an_optimizer_outside_of_the_step_updates_the_model(ranks: Ranks, kind: str, style: str) -> None:
    ranks.run(2, update_outside, kind, style)


def update_frozen(rank: int, world: int) -> None:
    """As above, where the user has kept the collector from all there is, which then finds no referrers of it."""
    optimizer = torch.optim.Optimizer
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer, "__init__", frozen_after(optimizer.__init__))
            update_outside(rank, world, "SGD", "fully_shard")
    finally:
        gc.unfreeze()


def frozen_after(init: Any) -> Any:
    def freezing(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        gc.freeze()

    return freezing


def test_so_does_one_that_is_frozen(ranks: Ranks) -> None:
    ranks.run(2, update_frozen)


def update_passed(rank: int, world: int) -> None:
    """Pass a parameter, and a list of some, that were noted before the first call."""

    def step(model: nn.Module, weight: Tensor, others: list[Tensor], x: Tensor) -> Tensor:
        loss = model(x).square().mean() + 0.1 * weight.square().sum() + sum(each.sum() for each in others)
        loss.backward()
        return loss

    torch.manual_seed(0)
    models = [nn.Linear(4, 6).double()]
    models.append(copy.deepcopy(models[0]))
    named = [(model, model.weight, [model.bias]) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    run = spmd.compile(step, parallel_mode="fully_shard")
    for k in range(3):
        parts = [torch.randn(2, 4, generator=random_generator(r, k), dtype=torch.float64) for r in range(world)]
        got, want = run(*named[0], parts[rank]), step(*named[1], torch.cat(parts))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_parameters_that_were_noted_before_can_be_passed(ranks: Ranks) -> None:
    ranks.run(2, update_passed)


def taking_parameters(rank: int, world: int) -> None:
    def step(model: nn.Module, parameters: list[Tensor], x: Tensor) -> Tensor:
        return model(x).sum().detach() + sum(parameter.detach().sum() for parameter in parameters)

    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(4, 4)
        compiled = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(step)
        compiled(model, list(model.parameters()), torch.ones(2, 4))
        compiled(model, list(model.parameters()), torch.ones(2, 4))


def test_a_step_that_takes_parameters_knows_what_to_do(ranks: Ranks) -> None:
    ranks.run(1, taking_parameters, process_group=False)
