"""Python state that a step reads and writes: numbers, flags and tensors that are neither parameters nor buffers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_flatten

import spmd
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow

FLOAT = torch.float64


class Stateful(nn.Module):
    """A layer, and attributes for the functions below to keep things in."""

    def __init__(self, forward: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4).double(), forward
        self.turn, self.calls, self.scale, self.name = False, 0, 1.0, "first"
        self.hidden: Any = None
        self.average, self.table = torch.zeros((), dtype=FLOAT), {}
        self.history = [torch.full((4,), float(k), dtype=FLOAT) for k in range(3)]
        self.queue = deque((torch.zeros(4, dtype=FLOAT) for _ in range(2)), maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        return FORWARDS[self.kind](self, self.layer(x))


def flips(m: Any, y: Tensor) -> Tensor:
    m.turn = not m.turn
    return y * (2 if m.turn else 3)


def renames(m: Any, y: Tensor) -> Tensor:
    scale = {"first": 1, "second": 2, "third": 3}[m.name]
    m.name = {"first": "second", "second": "third", "third": "second"}[m.name]
    return y * scale


def counts(m: Any, y: Tensor) -> Tensor:
    m.calls += 1
    return y * m.calls if m.calls % 3 else y


def anneals(m: Any, y: Tensor) -> Tensor:
    m.scale = max(m.scale * 0.7, 0.3)
    return y * m.scale


def recurs(m: Any, y: Tensor) -> Tensor:
    before = torch.zeros_like(y) if m.hidden is None else m.hidden
    after = torch.tanh(y + before)
    m.hidden = after.detach()
    return after


def recurs_in_a_tuple(m: Any, y: Tensor) -> Tensor:
    hidden, cell = m.hidden or (torch.zeros_like(y), torch.ones(4, dtype=FLOAT))
    hidden = torch.tanh(y + hidden) * cell
    m.hidden = hidden.detach(), cell * 0.9 + hidden.detach().mean(0)
    return hidden


def averages(m: Any, y: Tensor) -> Tensor:
    m.average = 0.9 * m.average + 0.1 * y.detach().mean()
    return y - m.average


def fills_a_dict(m: Any, y: Tensor) -> Tensor:
    before = m.table.get("mean", torch.zeros(4, dtype=FLOAT))
    m.table["mean"] = before * 0.5 + y.detach().mean(0)
    return y + before


def shifts_a_list(m: Any, y: Tensor) -> Tensor:
    m.history = [*m.history[1:], y.detach().mean(0)]
    return y * m.history[0]


def writes_into_a_list(m: Any, y: Tensor) -> Tensor:
    m.history[0], m.history[1] = m.history[1], y.detach().mean(0)
    return y + m.history[0]


def rotates_a_queue(m: Any, y: Tensor) -> Tensor:
    m.queue.append(y.detach().sum(0))
    return y + m.queue[0]


def makes_it_once(m: Any, y: Tensor) -> Tensor:
    if not hasattr(m, "start"):
        m.start = y.detach().mean(0)
    return y - m.start


def reads_what_another_program_wrote(m: Any, y: Tensor) -> Tensor:
    m.turn = not m.turn
    if m.turn:
        m.hidden = y.detach().mean(0)
        return y
    return y + m.hidden


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    each.__name__: each
    for each in (
        *(flips, renames, counts, anneals, recurs, recurs_in_a_tuple, averages, fills_a_dict, shifts_a_list),
        *(writes_into_a_list, rotates_a_queue, makes_it_once, reads_what_another_program_wrote),
    )
}
PROGRAMS = {
    "anneals": 1,
    "renames": 3,
    "averages": 1,
    "shifts_a_list": 1,
    "writes_into_a_list": 1,
    "rotates_a_queue": 1,
}


@dataclass(frozen=True)
class Keeps(Case):
    """Trains a ``Stateful`` with one of the functions above."""

    kind: str = "flips"

    def build(self) -> tuple[Any, ...]:
        model = Stateful(self.kind)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return (torch.randn(6, 4, generator=random_generator(rank, step), dtype=FLOAT) + rank,)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


# What they keep is equal on all ranks, as with "counts", or a mean that "shifts_a_list" keeps in the same way.
# In every run ranks keep what is split, what is averaged, and what the first call makes; the rest each does by itself.
REST = (
    *("flips", "renames", "anneals", "fills_a_dict", "writes_into_a_list", "rotates_a_queue"),
    *("counts", "recurs_in_a_tuple", "reads_what_another_program_wrote"),
)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.exhaustive) if kind in REST else kind for kind in FORWARDS]
)
def test_the_numbers_of_the_plain_step(ranks: Ranks, kind: str) -> None:
    """On one rank they are compared below."""
    assert_agrees(ranks, 2, Keeps(kind), steps=6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", FORWARDS)
def test_attributes_are_those_of_the_plain_step_after_each_call(kind: str) -> None:
    case = Keeps(kind)
    models = [model := case.build()[0], copy.deepcopy(model)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    compiled = spmd.compile(case.step)
    for k in range(6):
        for model, optimizer, step in zip(models, optimizers, (compiled, case.step), strict=True):
            step(model, optimizer, *case.part(0, k))
        got, want = [{name: v for name, v in vars(model).items() if name in ATTRIBUTES} for model in models]
        (got_leaves, got_spec), (want_leaves, want_spec) = tree_flatten(got), tree_flatten(want)
        assert got_spec == want_spec
        for have, expected in zip(got_leaves, want_leaves, strict=True):
            assert type(have) is type(expected)
            assert torch.allclose(have, expected) if isinstance(have, Tensor) else have == expected
    assert len(compiled.programs) == PROGRAMS.get(kind, 2)


ATTRIBUTES = {"turn", "calls", "scale", "name", "hidden", "average", "table", "history", "queue", "start"}


def hidden_of_each_rank(rank: int, world: int) -> tuple[bool, Any, list[str]]:
    case = Keeps("recurs")
    torch.manual_seed(0)
    model, optimizer = case.build()
    compiled = spmd.compile(case.step)
    for k in range(3):
        compiled(model, optimizer, *case.part(rank, k))
        model.hidden = model.hidden.detach().clone()  # what is computed from rows is rows, too
    assert [str(each.role) for each in compiled.program.inputs if each.name.endswith("hidden")] == ["batch"]  # type: ignore[union-attr]
    rows = [row.kind for row in compiled.report().every if row.kind == "all_gather"]
    return isinstance(model.hidden, DTensor), model.hidden.placements, rows


def test_a_hidden_state_with_a_row_per_sample_stays_split(ranks: Ranks) -> None:
    assert ranks.run(2, hidden_of_each_rank) == [(True, (Shard(0),), [])] * 2


@pytest.mark.usefixtures("alone")
def test_tensors_are_made_anew_at_each_call_as_in_eager() -> None:
    case = Keeps("averages")
    model, optimizer = case.build()
    start = model.average
    compiled, seen = spmd.compile(case.step), [start]
    for k in range(3):
        compiled(model, optimizer, *case.part(0, k))
        seen.append(model.average)
    assert not start and len({float(each) for each in seen}) == 4
    model.average = start  # as a loop does at the start of an epoch
    compiled(model, optimizer, *case.part(0, 0))
    assert not start and len(compiled.programs) == 1


def keeps_a_graph(m: Any, y: Tensor) -> Tensor:
    m.hidden = y if m.hidden is None else y + m.hidden
    return m.hidden


def appends(m: Any, y: Tensor) -> Tensor:
    m.history.append(y.detach().mean(0))
    return y + torch.stack(m.history).mean()


def keeps_state(m: Any, y: Tensor) -> Tensor:
    m.hidden = m.layer.weight.detach()
    return y


def keeps_an_object(m: Any, y: Tensor) -> Tensor:
    m.hidden = Holder(y.detach())
    return y


class Holder:
    def __init__(self, held: Tensor) -> None:
        self.held = held


REFUSED: dict[Callable[[Any, Tensor], Tensor], str] = {
    keeps_a_graph: r"keeps a tensor with its graph in model\.hidden at .*: m\.hidden = y if.*Keep tensor\.detach\(\)",
    appends: r"appends to model\.history at .*: m\.history\.append\(y\.detach\(\).*append it outside",
    keeps_state: r"keeps the memory of model\.layer\.weight in model\.hidden at .*detach\(\).*\.clone\(\)",
    keeps_an_object: r"puts a Holder that holds tensors in model\.hidden at .*Holder\(y.*in a tuple, list or dict",
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("forward, words", REFUSED.items(), ids=[each.__name__ for each in REFUSED])
def test_what_cannot_be_kept_is_refused_with_its_line(
    forward: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORWARDS, forward.__name__, forward)
    case = Keeps(forward.__name__)
    model, optimizer = case.build()
    before = dict(vars(model))
    with pytest.raises(spmd.CaptureError, match=words):
        spmd.compile(case.step)(model, optimizer, *case.part(0, 0))
    assert all(vars(model)[key] is value for key, value in before.items()) and len(model.history) == 3


def leaves_a_graph(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.hidden = y
        return y
    return m.hidden * y


@pytest.mark.usefixtures("alone")
def test_a_tensor_is_kept_without_its_graph_and_not_read_by_another_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FORWARDS, "leaves_a_graph", leaves_a_graph)
    case = Keeps("leaves_a_graph")
    model, optimizer = case.build()
    compiled = spmd.compile(case.step)
    compiled(model, optimizer, *case.part(0, 0))
    assert model.hidden.shape == (6, 4) and not model.hidden.requires_grad
    model.eval()
    with pytest.raises(
        spmd.CaptureError,
        match=r"(?s)a tensor in model\.hidden that a call before left there with its graph.*return m\.hidden",
    ):
        compiled(model, optimizer, *case.part(0, 1))


class Counting(torch.optim.Optimizer):
    """Counts its steps, and sums its rates, in parameter groups and attributes, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "rates": 0.0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            rate = group["lr"] / (group["k"] + 1) ** 0.5
            group["rates"] += rate
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (rate / group["rates"] / self.steps))
            group["k"] += 1
            group["lr"] *= 0.9


@dataclass(frozen=True)
class CountsInGroups(Keeps):
    """The same, with ``Counting``."""

    kind: str = "anneals"

    def build(self) -> tuple[Any, ...]:
        model, _ = super().build()
        return model, Counting(model.parameters())


def test_an_optimizer_that_counts_in_its_groups(ranks: Ranks) -> None:
    for world in (1, 2):
        assert_agrees(ranks, world, CountsInGroups(), steps=6)


@pytest.mark.usefixtures("alone")
def test_counters_of_groups_are_found_where_load_state_dict_puts_them() -> None:
    case = CountsInGroups()
    model, optimizer = case.build()
    compiled = spmd.compile(case.step)
    for k in range(4):
        compiled(model, optimizer, *case.part(0, k))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert (optimizer.param_groups[0]["k"], optimizer.steps) == (k + 1, k + 1)
    assert len(compiled.programs) == 1


class Hooked:
    """A hook on a gradient with state of its own, which no name in the step leads to."""

    def __init__(self) -> None:
        self.scale, self.calls, self.norm = 1.0, 0, torch.zeros(())

    def __call__(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        self.norm = gradient.norm()
        return gradient * self.scale

    def later(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = self(parameter.grad)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("later", [False, True], ids=["gradient", "accumulated"])
def test_what_a_hook_on_a_parameter_reads_and_writes_is_state(later: bool) -> None:
    case, seen = Keeps("flips"), []
    for compiled in (False, True):
        torch.manual_seed(0)
        (model, optimizer), hook = case.build(), Hooked()
        weight = next(model.parameters())
        weight.register_post_accumulate_grad_hook(hook.later) if later else weight.register_hook(hook)
        step = spmd.compile(case.step) if compiled else case.step
        for k in range(4):
            hook.scale = 1 / (1 + k)
            step(model, optimizer, *case.part(0, k))
            seen.append((weight.detach().clone(), hook.calls, hook.norm.item()))
    torch.testing.assert_close(seen[4:], seen[:4], rtol=0, atol=0)


class Meter:
    """A plain object with tensors that the step writes into."""

    def __init__(self) -> None:
        self.mean, self.seen = torch.zeros(4, dtype=FLOAT), {"square": torch.zeros(4, dtype=FLOAT)}


class Measures(Keeps):
    """Writes into tensors at an attribute and in a dict of a plain object."""

    def build(self) -> tuple[Any, ...]:
        model = nn.Linear(4, 4).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), Meter()

    @staticmethod
    def step(model: nn.Module, optimizer: Any, meter: Meter, x: Tensor) -> Any:  # type: ignore[override]
        y = model(x)
        meter.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        meter.seen["square"].lerp_(y.detach().square().mean(0), 0.1)
        loss = (y - meter.mean).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, meter.mean.clone(), meter.seen["square"].clone()


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_tensors_of_plain_objects_are_written_in_place(ranks: Ranks, style: str) -> None:
    assert_agrees(ranks, 2, Measures("flips"), style, steps=5)


@pytest.mark.usefixtures("alone")
def test_a_tensor_that_is_written_in_place_stays_the_same_object() -> None:
    model, optimizer, meter = Measures("flips").build()
    step, mean = spmd.compile(Measures.step), meter.mean
    for k in range(3):
        result = step(model, optimizer, meter, torch.ones(2, 4, dtype=FLOAT) * k)
    assert meter.mean is mean and torch.equal(mean, result[1]) and mean.abs().sum() > 0
    assert len(step.programs) == 1
