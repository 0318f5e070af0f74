"""Every optimizer of torch that needs no closure, in each of its forms, and optimizers that users write themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, in_turn
from tests.harness.oracle import all_unequal, assert_agrees, compiled_run, plain_run, snapshot
from tests.harness.pool import Ranks

# name: (class, options, forms besides the plain one)
_KINDS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, ("foreach", "fused")),
    "SGD dampening, maximize": (optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "maximize": True}, ()),
    "SGD, zeros": (optim.SGD, {"lr": 0.0, "momentum": 0.0, "weight_decay": 0.0}, ()),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}, ("foreach", "fused")),
    "AdamW": (optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}, ("foreach", "fused")),
    "AdamW, zeros": (optim.AdamW, {"lr": 0.01, "betas": (0.0, 0.0), "weight_decay": 0.0, "eps": 0.1}, ()),
    "NAdam": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}, ("foreach",)),
    "RAdam": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.01}, ("foreach",)),
    "Adamax": (optim.Adamax, {"lr": 0.01, "weight_decay": 0.01}, ("foreach",)),
    "Adadelta": (optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01}, ("foreach",)),
    "Adagrad": (
        optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.1},
        ("foreach", "fused"),
    ),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.01}, ("foreach",)),
    "Rprop": (optim.Rprop, {"lr": 0.01}, ("foreach",)),
    "ASGD": (optim.ASGD, {"lr": 0.05, "t0": 2.0, "weight_decay": 0.01}, ()),
    "Adafactor": (optim.Adafactor, {"lr": 0.05, "weight_decay": 0.01}, ("foreach",)),
    "Muon": (optim.Muon, {"lr": 0.05}, ()),
}
_RATES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class With(MLP):
    """An MLP with one of the optimizers above; ``rate`` makes its learning rate a tensor of this dtype."""

    sizes: tuple[int, ...] = (7, 3)
    rows: int = 5
    form: str = ""
    rate: str = ""

    def build(self) -> tuple[Any, ...]:
        model = MLP.build(MLP(self.sizes))[0]
        kind, options, _ = _KINDS[self.optimizer]
        options = options | ({self.form: True} if self.form else {})
        if self.rate:
            options["lr"] = torch.tensor(options["lr"], dtype=_RATES[self.rate])
        matrices_only = kind is optim.Muon
        return model, kind([p for p in model.parameters() if p.ndim == 2 or not matrices_only], **options)

    @staticmethod
    def step(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss


@dataclass(frozen=True)
class SideBySide(MLP):
    """One step that trains several models, each with an optimizer of its own."""

    each: tuple[With, ...] = ()

    def build(self) -> tuple[Any, ...]:
        models, optimizers = zip(*(case.build() for case in self.each), strict=True)
        return list(models), list(optimizers)

    def part(self, rank: int, step: int) -> tuple[Any, ...] | dict[str, Any]:
        return self.each[0].part(rank, step)

    @staticmethod
    def step(models: Any, optimizers: Any, x: Tensor, y: Tensor) -> list[Tensor]:  # type: ignore[override]
        losses = [F.mse_loss(model(x), y) for model in models]
        torch.stack(losses).sum().backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            model.zero_grad()
        return losses


# Those of a row compile at the same calls: the first, the second, and in the last row later ones, too.
ROWS = [
    ["SGD", "SGD dampening, maximize", "Adagrad", "RMSprop", "Adafactor"],
    ["SGD, zeros", "Adam", "AdamW", "AdamW, zeros", "Adamax", "Adadelta"],
    ["NAdam", "RAdam", "Rprop", "ASGD", "Muon"],
]


def test_every_optimizer_is_in_a_row() -> None:
    assert sorted(kind for row in ROWS for kind in row) == sorted(_KINDS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_optimizers_update_as_on_one_device(ranks: Ranks, row: list[str], request: pytest.FixtureRequest) -> None:
    """A trace does not take the form "foreach", and what that changes around it is in the tests of numbers."""
    exhaustive = request.config.getoption("--exhaustive")
    forms = [(kind, form) for kind in row for form in ("", *_KINDS[kind][2]) if exhaustive or form != "foreach"]
    case = SideBySide(each=tuple(With(optimizer=kind, form=form) for kind, form in forms))
    for style, world in in_turn(request, 2 + ROWS.index(row)):
        assert_agrees(ranks, world, case, style, steps=7)


@pytest.mark.parametrize("kind, form, rate", [("AdamW", "", "float32"), ("Adam", "fused", "float32")])
def test_a_learning_rate_may_be_a_tensor(ranks: Ranks, kind: str, form: str, rate: str) -> None:
    assert_agrees(ranks, 2, With(optimizer=kind, form=form, rate=rate), "fully_shard")


def whole_matrices(rank: int, world: int) -> tuple[list[tuple[int, str]], tuple[str, ...]]:
    """What Muon gathers besides parameters, as (count, dtype), without merging; and the notes of the report."""
    mode = spmd.DataParallel("fully_shard")
    case = With(sizes=(15, 7, 3), optimizer="Muon")
    compiled, _ = compiled_run(rank, case, 2, parallel_mode=mode, passes=())
    report = compiled.report()
    rows = [row for row in report.traffic if row.kind == "all_gather" and row.role != "parameter"]
    return [(row.count, row.dtype) for row in rows], report.notes


def test_whole_matrices_are_gathered_once_and_the_report_says_so(ranks: Ranks) -> None:
    for gathered, (note,) in ranks.run(2, whole_matrices):
        assert gathered == [(2, "bfloat16")], "one for each matrix"
        size = 2 * (15 * 7 + 7 * 3)
        assert "aten.mm" in note and "test_optimizers.py" in note and "optimizer.step()" in note
        assert f"2 matrices ({size} bytes)" in note


class CountsInPython(optim.Optimizer):
    """Adam, as one writes it oneself: a Python int counts the steps; every third one decays."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
                state["step"] += 1
                self.update(parameter, state, group["lr"], *group["betas"])

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float, beta: float, other: float) -> None:
        gradient, mean, square, count = parameter.grad, state["mean"], state["square"], state["step"]
        assert gradient is not None
        mean.mul_(beta).add_(gradient, alpha=1 - beta)
        square.mul_(other).addcmul_(gradient, gradient, value=1 - other)
        size = (square.sqrt() / (1 - other**count) ** 0.5).add_(1e-8)
        parameter.addcdiv_(mean, size, value=-lr / (1 - beta**count))
        if count % 3 == 0:
            parameter.mul_(0.99)


class CountsInATensor(CountsInPython):
    """The same with a counter that is a tensor, and a warm-up by ``min``."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float, beta: float, other: float) -> None:
        state["count"] = state.get("count", torch.tensor(0.0)) + 1
        assert parameter.grad is not None
        state["mean"].lerp_(parameter.grad, 1 - beta)
        parameter.add_(state["mean"], alpha=-lr * min(1.0, state["count"].item() / 3))


class CountsInItself(CountsInPython):
    """The counter is an attribute."""

    count = 0

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float, beta: float, other: float) -> None:
        self.count += 1
        parameter.mul_(1 / self.count)


class HalvesGradients(optim.AdamW):
    """One of torch's, with a step of its own around it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step(closure)


@dataclass(frozen=True)
class WithOneOfMine(MLP):
    """An MLP with an optimizer of the user's."""

    sizes: tuple[int, ...] = (7, 3)
    rows: int = 5
    kind: Any = CountsInPython

    def build(self) -> tuple[Any, ...]:
        model = super().build()[0]
        return model, self.kind(model.parameters())


def programs(rank: int, world: int, case: MLP, style: str) -> tuple[list[str], int]:
    """What differs, and the number of programs after seven steps."""
    compiled, got = compiled_run(rank, case, 7, parallel_mode=spmd.DataParallel(style))
    return all_unequal(plain_run(case, world, 7), got, rank, world), len(compiled.programs)


@pytest.mark.parametrize(
    "kind, style, count",
    [
        (CountsInPython, "fully_shard", 3),  # the first step, those that decay, and the others
        (CountsInATensor, "replicate", 2),
        (CountsInItself, "replicate", 2),
        (HalvesGradients, "fully_shard", 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_optimizer_of_the_user_s_own(ranks: Ranks, kind: Any, style: str, count: int) -> None:
    assert ranks.run(2, programs, WithOneOfMine(kind=kind), style) == [([], count)] * 2


def refused(optimizer: Any, model: nn.Module, step: Any = WithOneOfMine.step) -> str:
    """The text of the error; model and optimizer are as before."""
    before = snapshot(None, (model, optimizer))
    with pytest.raises(spmd.CaptureError) as caught:
        spmd.compile(step)(model, optimizer, *WithOneOfMine().part(0, 0))
    after = snapshot(None, (model, optimizer))
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value) if isinstance(value, Tensor) else None
    return str(caught.value)


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_no_graph_can_hold_is_refused_with_an_alternative() -> None:
    model, _ = WithOneOfMine().build()
    sparse = refused(optim.SparseAdam(model.parameters()), model)
    assert "optimizer cannot be part" in sparse and "sparse=True" in sparse and "Adam" in sparse
    closures = refused(optim.LBFGS(model.parameters()), model)
    assert "closure" in closures and "depends on the data" in closures
