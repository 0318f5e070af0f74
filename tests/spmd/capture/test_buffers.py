"""Buffers: batch statistics of the global batch, and buffers that the step itself writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes import Role
from passes.ir.program import is_sharded
from tests.harness.cases import THREE_IN_TURN, in_turn
from tests.harness.oracle import Case, all_unequal, assert_agrees, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks


@dataclass(frozen=True)
class Buffered(Case):
    """Models with buffers, side by side, trained with a squared loss each; ``kinds`` are keys of ``MODELS``."""

    kinds: tuple[str, ...]
    training: bool = True
    rows: int = 5
    synchronized: bool = False

    def build(self) -> tuple[Any, ...]:
        models = nn.ModuleDict({kind: MODELS[kind]() for kind in self.kinds}).double().train(self.training)
        models = nn.SyncBatchNorm.convert_sync_batchnorm(models) if self.synchronized else models
        return models, torch.optim.SGD(models.parameters(), lr=0.05)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return (torch.randn(self.rows, 6, generator=random, dtype=torch.float64) + rank,)

    @staticmethod
    def step(models: nn.ModuleDict, optimizer: torch.optim.Optimizer, x: Tensor) -> dict[str, Tensor]:
        losses = {kind: (model(x) - 1).square().mean() for kind, model in models.items()}
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses


class Average(nn.Module):
    """An average of its inputs, updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("average", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return (x - self.average) * self.scale


class Reassigned(Average):
    """The same, by assigning a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average * 0.9 + 0.1 * x.detach().mean(0)
        return (x - self.average) * self.scale


class AverageOfWeights(nn.Module):
    """The average of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 7)
        self.register_buffer("average", self.linear.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.linear.weight, 0.1)
        return self.linear(x) + F.linear(x, self.average)


class Queue(nn.Module):
    """A bank of the newest rows: the batch pushes the oldest out."""

    def __init__(self, slots: int = 50) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("bank", torch.randn(slots, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        scores = h @ self.bank.clone().t()
        with torch.no_grad():
            self.bank[len(h) :] = self.bank[: -len(h)].clone()
            self.bank[: len(h)] = h
        return scores


class Ring(Queue):
    """Rows are written at a pointer that is a buffer, by index."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        scores = h @ self.bank.clone().t()
        with torch.no_grad():
            rows = (torch.arange(len(h)) + self.pointer) % len(self.bank)
            self.bank.index_copy_(0, rows, h)
            self.pointer.add_(len(h)).remainder_(len(self.bank))
        return scores


class RingByIndex(Ring):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        scores = h @ self.bank.clone().t()
        rows = (torch.arange(len(h)) + self.pointer) % len(self.bank)
        self.bank[rows] = h.detach()
        self.pointer[...] = (self.pointer + len(h)) % len(self.bank)
        return scores


class OfOtherKinds(nn.Module):
    """Bool and complex buffers, and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))
        self.register_buffer("count", torch.zeros(6, dtype=torch.long))
        self.register_buffer("wave", torch.ones(6, dtype=torch.complex128))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("largest", torch.tensor(-1e9))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            self.seen |= (h > 0.5).any(0)
            self.count += (h > 0).sum(0)
            self.wave.mul_(torch.polar(torch.ones_like(h[0]), h.mean(0)))
            self.calls += 1
            self.largest.copy_(torch.maximum(self.largest, h.max()))
        return h * self.wave.real + self.seen.to(h) + self.calls


class ActNorm(nn.Module):
    """A shift that the first batch sets; ``is_new`` asks a buffer whether it is the first."""

    def __init__(self, is_new: Callable[[Tensor], Any], *shape: int) -> None:
        super().__init__()
        self.is_new, self.shift = is_new, nn.Parameter(torch.zeros(6))
        self.register_buffer("initialized", torch.zeros(shape, dtype=torch.uint8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.is_new(self.initialized):
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.initialized.fill_(1)
        self.calls += 1
        return x + self.shift


class Counting(nn.Module):
    """A schedule by a counter that is a buffer."""

    def __init__(self, is_due: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.is_due, self.scale = is_due, nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.scale * (2 if self.is_due(self.calls) else 1)


def dense(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    """Two layers with a norm between them."""
    return lambda: nn.Sequential(nn.Linear(6, 6), kind(6, **options), nn.Tanh(), nn.Linear(6, 3))


def image(**options: Any) -> Callable[[], nn.Module]:
    """A convolution of 2 x 4 x 4 images with a batch norm behind it."""
    return lambda: nn.Sequential(
        *(nn.Linear(6, 32), nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 6, 3, padding=1)),
        *(nn.BatchNorm2d(6, **options), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)),
    )


def instance() -> nn.Module:
    """Statistics per row, averaged over rows into running ones."""
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Linear(6, 3))


def spectral() -> nn.Module:
    """A weight whose norm is found by iterations on buffers."""
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": dense(nn.BatchNorm1d),
    "cumulative": dense(nn.BatchNorm1d, momentum=None),
    "without statistics": dense(nn.BatchNorm1d, track_running_stats=False),
    "without weights": dense(nn.BatchNorm1d, affine=False),
    "image": image(),
    "cumulative image": image(momentum=None),
    "instance": instance,
    "spectral": spectral,
    "average": Average,
    "reassigned": Reassigned,
    "average of weights": AverageOfWeights,
    "queue": Queue,
    "ring": Ring,
    "ring by index": RingByIndex,
    "other kinds": OfOtherKinds,
    "by item": lambda: ActNorm(lambda flag: flag.item() == 0),
    "by int": lambda: ActNorm(lambda flag: int(flag) < 1),
    "by index": lambda: ActNorm(lambda flag: flag[0] == 0, 1),
    "by not": lambda: ActNorm(lambda flag: not flag),
}


class Twice(Buffered):
    """Two micro-batches in a step: buffers move twice."""

    @staticmethod
    def step(models: nn.ModuleDict, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
        losses = [(model(part) - 1).square().mean() for model in models.values() for part in (x, x * 2 + 1)]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses


class InBothModes(Buffered):
    """The step itself puts models into evaluation, into training, and stops their statistics, as in fine-tuning."""

    @staticmethod
    def step(models: nn.ModuleDict, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
        losses = []
        for model in models.values():
            for training, tracks in ((True, True), (True, False), (False, True)):
                model.train(training)
                model.get_submodule("1").track_running_stats = tracks
                losses.append((model(x) - 1).square().mean())
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses


CASES = {
    "norms of rows": Buffered(("batch norm", "cumulative", "without statistics", "without weights")),
    "norms of images": Buffered(("image", "cumulative image", "instance")),
    "averages": Buffered(("spectral", "average", "reassigned", "average of weights", "other kinds")),
    "banks": Buffered(("queue", "ring", "ring by index")),
    "in evaluation": Buffered(("batch norm", "cumulative", "without statistics", "image"), training=False),
    "branches on one element": Buffered(("by item", "by int", "by index", "by not")),
    "called twice": Twice(("batch norm", "ring")),
    "in both modes": InBothModes(("batch norm", "cumulative")),
    "in both modes from evaluation": InBothModes(("batch norm", "cumulative"), training=False),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_due", [lambda calls: calls.item() % 2 == 0, lambda calls: int(calls) > 3])
def test_a_branch_on_a_number_that_each_call_changes_is_refused(is_due: Any) -> None:
    model = Counting(is_due).double()
    with pytest.raises(
        spmd.CaptureError, match=r"branches on the value of model.calls at .*, which is .*\(if calls == 0, not"
    ):
        spmd.compile(lambda model, x: model(x).sum())(model, torch.ones(4, 6, dtype=torch.float64))
    assert not model.calls


def test_every_model_is_in_a_case() -> None:
    assert {kind for case in CASES.values() for kind in case.kinds} == MODELS.keys()


@pytest.mark.parametrize("name", CASES)
def test_buffers_are_those_of_the_plain_step(ranks: Ranks, name: str, request: pytest.FixtureRequest) -> None:
    for style, world in in_turn(request, list(CASES).index(name), THREE_IN_TURN):
        assert_agrees(ranks, world, CASES[name], style)


def synchronized_against_plain(rank: int, world: int, steps: int) -> list[str]:
    expected = plain_run(Buffered(("batch norm",)), world, steps)
    case = Buffered(("batch norm",), synchronized=True)
    _, got = compiled_run(rank, case, steps, parallel_mode=spmd.DataParallel("fully_shard"))
    return all_unequal(expected, got, rank, world)


def test_a_synchronized_batch_norm_is_a_batch_norm_over_the_global_batch(ranks: Ranks) -> None:
    assert ranks.run(2, synchronized_against_plain, 5) == [[], []]


def test_buffers_are_never_split() -> None:
    case = Buffered(("queue",))
    mode = spmd.DataParallel("fully_shard")
    compiled = compile_on_fake_ranks(2, case.step, case.build(), *case.part(0, 0), parallel_mode=mode)
    placements = [declared.placement for declared in compiled.program.inputs if declared.role is Role.BUFFER]
    assert len(placements) == 1 and not any(is_sharded(placement) for placement in placements)


class Wider(Average):
    def forward(self, x: Tensor) -> Tensor:
        self.average = (self.average + x.detach().mean(0)).to(torch.complex128)
        return x * self.scale


class Longer(Average):
    def forward(self, x: Tensor) -> Tensor:
        self.average = torch.cat([self.average, self.average])
        return x * self.scale


@pytest.mark.parametrize("module, message", [
    (Wider, r"makes models.m.average, which is torch.float64\[6\], into torch.complex128\[6\] at test_buffers.py:\d+"),
    (Longer, r"makes models.m.average, which is torch.float64\[6\], into torch.float64\[12\]"),
])  # fmt: skip
def test_a_buffer_that_changes_its_shape_or_dtype_is_refused(module: type[nn.Module], message: str) -> None:
    model = module().double()
    before = model.average
    objects = nn.ModuleDict({"m": model}), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(spmd.CaptureError, match=message):
        compile_on_fake_ranks(2, Buffered.step, objects, torch.randn(5, 6, dtype=torch.float64))
    assert model.average is before and "forward" not in vars(model)


@pytest.mark.usefixtures("alone")
def test_a_momentum_after_none_is_not_none() -> None:
    """As ``update_bn`` sets it, and back."""
    ours, theirs = (nn.BatchNorm1d(3).double() for _ in range(2))
    step = spmd.compile(lambda model, x: model(x).sum())
    for momentum in (None, 0.1, None, 0.5):
        x = torch.randn(8, 3, dtype=torch.float64)
        ours.momentum = theirs.momentum = momentum
        step(ours, x)
        theirs(x)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        torch.testing.assert_close(ours.running_var, theirs.running_var)


class Switched(nn.Module):
    """Observes while a flag of one element is on, which the step may write in many ways before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_on", torch.ones(1, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.is_on[0] == 1 else x * 3


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "by index": lambda flag, x: flag.__setitem__(0, 0),
    "by slice": lambda flag, x: flag[:].zero_(),
    "a view": lambda flag, x: flag.view(()).fill_(0),
    "all": lambda flag, x: flag.fill_(0),
}


@pytest.mark.usefixtures("alone")
def test_a_branch_on_what_the_step_has_just_written_is_that_of_the_plain_step() -> None:
    x = torch.ones(2)
    for write in WRITES.values():
        module = Switched()

        def step(module: Switched, x: Tensor, write: Any = write) -> Tensor:
            before = module(x)
            write(module.is_on, x)
            return before + module(x)

        compiled = spmd.compile(step)
        assert [compiled(module, x)[0].item() for _ in range(3)] == [5, 6, 6]

    def by_data(module: Switched, x: Tensor) -> Tensor:
        module.is_on[0] = x.sum() > 0
        return module(x)

    module, compiled = Switched(), spmd.compile(by_data)
    assert [compiled(module, each)[0].item() for each in (x, -x, x)] == [2, -3, 2]
    assert len(compiled.programs) == 2


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_a_fake_quantizer_with_an_observer_of_its_own_is_that_of_the_plain_step() -> None:
    """It observes for two calls, and its first finds nothing observed before."""
    from torch.ao import quantization

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        model.qconfig = quantization.QConfig(  # type: ignore[assignment]
            activation=quantization.default_fake_quant, weight=quantization.default_weight_fake_quant
        )
        return quantization.prepare_qat(model.train())

    def step(model: nn.Module, x: Tensor, is_late: bool) -> Tensor:
        if is_late:
            model.apply(quantization.disable_observer)
        y: Tensor = model(x)
        y.square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        model.zero_grad()
        return y.detach()

    plain, model = build(), build()
    compiled = spmd.compile(step)
    for k in range(4):
        x = torch.randn(4, 3) * (k + 1)
        torch.testing.assert_close(compiled(model, x, k > 1), step(plain, x, k > 1))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
