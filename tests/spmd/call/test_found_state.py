"""Models and optimizers that are no arguments: attributes of the instance, closure variables, globals, nested ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, mlp
from tests.harness.oracle import Snapshot, all_unequal, snapshot
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow

Decorator = Callable[[Any], Any]
Made = tuple[Callable[..., Any], tuple[Any, ...]]  # the step, and the objects to compare


TEXT = """
def step(x):
    loss = model(x).sum() * scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""


@pytest.mark.usefixtures("alone")
def test_code_without_a_file_finds_what_it_names_and_is_guarded() -> None:
    model = nn.Linear(3, 4)
    scope: dict[str, Any] = {"__name__": __name__, "model": model, "scale": 1.0}
    scope["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(TEXT, scope)
    x, step = torch.ones(2, 3), spmd.compile(scope["step"])
    for scale in (1.0, 2.0, 3.0):
        scope["scale"] = scale
        expected = model(x).sum().item() * scale
        assert step(x).item() == pytest.approx(expected)
    scope["step"] = None
    with pytest.raises(RuntimeError) as caught:
        step(torch.ones(2, 5))
    assert "<string>:3" in str(caught.value.__notes__)


class Trainer:
    """Has a model, an optimizer and settings as attributes, and keeps an average of its loss."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.settings = {"scale": 2.0}
        self.steps, self.average = 0, torch.zeros((), dtype=torch.float64)
        self.weights = torch.linspace(1, 2, 4, dtype=torch.float64)
        self.parameters = list(model.parameters())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = ((self.model(x) - y).square() * self.weights).mean() * self.settings["scale"]
        self.average = 0.5 * self.average + loss.detach()
        return loss

    def train_step(self, x: Tensor, y: Tensor) -> Any:
        self.steps += 1
        loss = self.loss(x, y) + 0.1 * self.average / self.steps
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, 0.7)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, self.average, norm


def of_a_trainer(build: tuple[Any, ...], compiled: Decorator) -> Made:
    trainer = Trainer(*build)
    return compiled(trainer.train_step), build


def of_a_decorated_method(build: tuple[Any, ...], compiled: Decorator) -> Made:
    class Decorated(Trainer):
        train_step = compiled(Trainer.train_step)

    return Decorated(*build).train_step, build


def of_a_closure(build: tuple[Any, ...], compiled: Decorator) -> Made:
    model, optimizer = build
    scale = torch.full((), 2.0, dtype=torch.float64)

    def update(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @compiled
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) * scale
        update(loss)
        return loss

    return train_step, build


model: Any = None
optimizer: Any = None


def global_step(x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def of_globals(build: tuple[Any, ...], compiled: Decorator) -> Made:
    globals().update(model=build[0], optimizer=build[1])
    return compiled(global_step), build


class Lightning(nn.Module):
    """A module that makes its optimizers itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.logged = net, dict[str, Tensor]()
        self.made: list[torch.optim.Optimizer] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def optimizers(self) -> torch.optim.Optimizer:
        return self.made[0]

    def log(self, name: str, value: Tensor) -> None:
        self.logged[name] = value.detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y) / 2**batch_idx
        self.log("loss", loss)
        self.optimizers().zero_grad()
        loss.backward()
        self.optimizers().step()
        return loss


def of_a_lightning_module(build: tuple[Any, ...], compiled: Decorator) -> Made:
    module = Lightning(build[0])
    module.made.append(build[1])
    step = compiled(module.training_step)
    return lambda x, y: (step((x, y), 1), module.logged["loss"]), (module, build[1])


@dataclass
class Options:
    accumulation: int = 2
    clip: float | None = 0.5


class Hugging:
    """As the trainer of ``transformers``: the model is an argument of methods that are also called with others."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, args: Options) -> None:
        self.model, self.optimizer, self.args = model, optimizer, args
        self.state: dict[str, Any] = {"global_step": 0}
        self.data = [torch.randn(3) for _ in range(2)]  # no name in the code of the step

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(inputs["x"]), inputs["labels"])

    def training_step(self, inputs: dict[str, Tensor]) -> Tensor:
        self.model.train()
        loss = self.compute_loss(self.model, inputs)
        (loss / self.args.accumulation).backward()
        if self.args.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def of_a_hugging_face_trainer(build: tuple[Any, ...], compiled: Decorator) -> Made:
    step = compiled(Hugging(*build, Options()).training_step)
    return lambda x, y: step({"x": x, "labels": y}), build


@dataclass
class Parts:
    nets: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


@dataclass
class Nested:
    """A dataclass whose parts are two levels down; its step counts in a field."""

    parts: Parts
    calls: int = 0

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.parts.nets["body"](x)
        loss = F.mse_loss(self.parts.nets["head"](hidden), y) * self.calls
        loss.backward()
        for each in self.parts.optimizers:
            each.step()
            each.zero_grad()
        return loss


def of_nested_parts(build: tuple[Any, ...], compiled: Decorator) -> Made:
    body, head = build[0], mlp(4, 4)
    rate = build[1].param_groups[0]["lr"]
    optimizers = [build[1], torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9)]

    class Compiled(Nested):
        step = compiled(Nested.step)

    return Compiled(Parts({"body": body, "head": head}, optimizers)).step, (body, head, *optimizers)


KINDS = {
    each.__name__: each
    for each in (
        *(of_a_trainer, of_a_decorated_method, of_a_closure, of_globals),
        *(of_a_lightning_module, of_a_hugging_face_trainer, of_nested_parts),
    )
}


def run(case: MLP, kind: str, compiled: Decorator, ranks: Sequence[int], steps: int = 4) -> list[Snapshot]:
    torch.manual_seed(0)
    step, objects = KINDS[kind](case.build(), compiled)
    seen = []
    for k in range(steps):
        parts = [case.part(rank, k) for rank in ranks]
        seen.append(snapshot(step(*map(torch.cat, zip(*parts, strict=True))), objects))
    return seen


def differences(rank: int, world: int, kind: str, style: str, optimizer: str) -> list[str]:
    """Against the plain step on the whole batch."""
    case = MLP(sizes=(15, 17, 4), rows=6, optimizer=optimizer)
    expected = run(case, kind, lambda function: function, range(world))
    mode = spmd.DataParallel(style)
    got = run(case, kind, lambda function: spmd.compile(parallel_mode=mode)(function), [rank])
    return all_unequal(expected, got, rank, world)


STYLES = ("replicate", "fully_shard")
OPTIMIZERS = ("SGD", "SGD momentum")
METHODS = [
    pytest.param("of_a_trainer", "replicate", "SGD", marks=pytest.mark.exhaustive),  # as a decorated method has it
    ("of_a_trainer", "fully_shard", "SGD momentum"),
]
OTHERS = [
    (kind, STYLES[k % 2], OPTIMIZERS[(k // 2) % 2])
    for k, kind in enumerate(each for each in KINDS if each != "of_a_trainer")
]


@pytest.mark.parametrize("kind, style, name", METHODS + OTHERS)
def test_the_numbers_of_the_plain_step(ranks: Ranks, kind: str, style: str, name: str) -> None:
    found = [line for lines in ranks.run(2, differences, kind, style, name) for line in lines]
    assert not found, "\n".join(found[:20])


def made(kind: Callable[..., Made] = of_a_trainer) -> tuple[spmd.CompiledStep, Any, tuple[Tensor, ...]]:
    """A compiled step, its trainer, and a batch, after one call."""
    case = MLP(sizes=(6, 8, 4), rows=3, optimizer="Adam")
    trainer = Trainer(*case.build())
    step = spmd.compile(trainer.train_step)
    step(*case.part(0, 0))
    return step, trainer, case.part(0, 1)


@pytest.mark.usefixtures("alone")
def test_names_are_those_of_the_code() -> None:
    step, _, _ = made()
    names = {declared.name for declared in step.programs[0].inputs}
    assert {"self.optimizer.step[self.model.0.weight]", "self.steps", "self.average", "x"} <= names


@pytest.mark.usefixtures("alone")
def test_another_model_compiles_anew_and_the_old_one_can_go() -> None:
    step, trainer, batch = made()
    first = trainer.model, trainer.optimizer, trainer.parameters
    other = mlp(6, 8, 4)
    trainer.model, trainer.optimizer = other, torch.optim.SGD(other.parameters(), lr=0.1)
    trainer.parameters = list(other.parameters())
    before = other[0].weight.detach().clone()
    step(*batch)
    assert len(step.programs) == 2 and not torch.equal(other[0].weight, before)
    trainer.model, trainer.optimizer, trainer.parameters = first
    step(*batch)
    assert len(step.programs) == 2
    gone = weakref.ref(first[0])
    del first
    trainer.model, trainer.optimizer, trainer.parameters = other, torch.optim.SGD(other.parameters(), lr=0.1), []
    step(*batch)
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("alone")
def test_programs_of_a_dead_trainer_are_dropped() -> None:
    class Compiled(Trainer):
        train_step = spmd.compile(Trainer.train_step)

    case = MLP(sizes=(6, 8, 4), rows=3)
    for _ in range(2):
        trainer = Compiled(*case.build())
        gone = [weakref.ref(each) for each in (trainer, trainer.model, trainer.optimizer)]
        for k in range(2):
            trainer.train_step(*case.part(0, k))
        assert len(trainer.train_step.programs) == 1 and trainer.steps == 2
        del trainer
        gc.collect()
        assert [each() for each in gone] == [None] * 3


@pytest.mark.usefixtures("alone")
def test_instances_have_programs_of_their_own() -> None:
    class Compiled(Trainer):
        train_step = spmd.compile(Trainer.train_step)

    case = MLP(sizes=(6, 8, 4), rows=3)
    pair = [Compiled(*case.build()) for _ in range(2)]
    for k in range(3):
        for trainer in pair[: k + 1]:
            trainer.train_step(*case.part(0, k))
    assert [trainer.steps for trainer in pair] == [3, 2]
    assert len(Compiled.train_step.programs) == 2


class Odd(Trainer):
    """What cannot be a part of a compiled step, each in a method."""

    def __init__(self) -> None:
        case = MLP(sizes=(6, 8, 4), rows=3)
        super().__init__(*case.build())
        self.lone, self.count = nn.Parameter(torch.ones(4).double()), torch.zeros(4).double()
        self.several = torch.optim.SGD([*self.model.parameters(), self.lone], lr=0.1)
        self.stranger = torch.optim.SGD(mlp(2, 2).parameters(), lr=0.1)
        self.fixed = tuple(self.model.parameters())

    def a_parameter_without_module(self, x: Tensor) -> Tensor:
        return (self.model(x) * self.lone).sum()

    def an_optimizer_of_one(self, x: Tensor) -> None:
        self.model(x).sum().backward()
        self.several.step()

    def an_optimizer_without_model(self, x: Tensor) -> None:
        self.stranger.step()

    def parameters_in_a_tuple(self, x: Tensor) -> Tensor:
        self.model(x).sum().backward()
        return nn.utils.clip_grad_norm_(self.fixed, 1.0)

    def keeps_a_graph(self, x: Tensor) -> None:
        self.last = self.model(x).sum() + getattr(self, "last", 0)


ODD = {
    "a_parameter_without_module": r"a parameter that no module holds.*keep parameters in modules.*\.sum\(\)",
    "an_optimizer_of_one": r"self\.several updates 1 parameter\(s\) of shape \[\(4,\)\] that belong.*param_groups",
    "an_optimizer_without_model": r"an optimizer \(SGD\) that is not among its arguments, nor found with its module",
    "parameters_in_a_tuple": r"reads self\.fixed, which refers to state of a model from a tuple.*keep them in a list",
    "keeps_a_graph": r"keeps a tensor with its graph in self\.last at .*self\.last = .*Keep tensor\.detach\(\)",
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ODD)
def test_what_is_not_possible_is_a_sentence_with_the_name(name: str) -> None:
    odd = Odd()
    before = {key: value for key, value in vars(odd).items() if key != "count"}
    with pytest.raises(spmd.CaptureError, match=f"(?s){ODD[name]}"):
        spmd.compile(getattr(odd, name))(torch.randn(3, 6, dtype=torch.float64))
    assert all(vars(odd)[key] is value for key, value in before.items()) and not odd.count.any()
    assert all(parameter.grad is None for parameter in odd.model.parameters())


def other_attributes(rank: int, world: int) -> str:
    case = MLP(sizes=(6, 8, 4), rows=3)
    trainer = Trainer(*case.build())
    trainer.model = mlp(6, 8, 4) if rank else trainer.model
    try:
        spmd.compile(trainer.train_step)(*case.part(rank, 0))
    except spmd.SpmdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_find_other_models_raise(ranks: Ranks) -> None:
    assert all(ranks.run(2, other_attributes))


class Slots:
    """An object that is called, and that cannot be referred to weakly."""

    __slots__ = ("net", "steps")

    def __init__(self) -> None:
        self.net, self.steps = nn.Linear(4, 4), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.net(x).sum() * self.steps


@pytest.mark.usefixtures("alone")
def test_objects_that_are_called_and_partials() -> None:
    x = torch.ones(2, 4)
    for made in (Slots(), Slots()):
        for step in (made, made.__call__, partial(Slots.__call__, made)):
            compiled, before = spmd.compile()(step), made.steps
            for k in range(1, 4):
                torch.testing.assert_close(compiled(x), made.net(x).sum() * (before + k))
            assert len(compiled.programs) == 1 and made.steps == before + 3


@pytest.mark.usefixtures("alone")
def test_a_weak_proxy_of_a_model_is_passed_by() -> None:
    model = nn.Linear(3, 1)
    held = SimpleNamespace(model=weakref.proxy(model), scale=2.0)  # as the profilers of Lightning have it

    @spmd.compile()
    def step(model: nn.Module, x: Tensor) -> None:
        (model(x).sum() * (held.scale or held.model.scale)).backward()

    step(model, torch.ones(2, 3))
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[4.0] * 3]
