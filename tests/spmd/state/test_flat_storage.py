"""Flat storages: live tensors lie in them and stay what they are, whatever users do with them between calls."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from passes import print_program
from spmd.state.flat_storage import _flat_tensors, flat_tensor_of, is_movable, parts_of
from tests.harness.cases import MLP, make_optimizer, mlp
from tests.harness.fake import fake_world
from tests.harness.oracle import Case, all_unequal, assert_agrees, compiled_run, plain_run, snapshot
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks

pytestmark = pytest.mark.slow

SIZES = (6, 6, 6, 2)


@dataclass(frozen=True)
class Small(MLP):
    sizes: tuple[int, ...] = SIZES
    rows: int = 4
    optimizer: str = "AdamW"


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one, in this process."""
    with fake_world(1):
        yield


def flats(compiled: Any) -> list[int]:
    """The number of parts of each flat input of the program last run."""
    return [len(declared.parts) for declared in compiled.program.inputs if declared.parts]


def assert_same_alone(case: Case, steps: int = 6) -> spmd.CompiledStep:
    """The compiled step does what the plain one does, in a world of one."""
    compiled, got = compiled_run(0, case, steps)
    found = all_unequal(plain_run(case, 1, steps), got, 0, 1)
    assert not found, found
    return compiled


@pytest.mark.usefixtures("alone")
def test_tensors_lie_one_after_the_other_and_are_what_they_were() -> None:
    model, optimizer = Small().build()
    parameters = list(model.parameters())
    step = spmd.compile(Small.step)
    for k in range(4):
        step(model, optimizer, *Small().part(0, k))
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert flats(step) == [6, 6, 6] and len(step.programs) == 1
    for kind in (
        parameters,
        *([optimizer.state[p][key] for p in parameters] for key in ("exp_avg", "exp_avg_sq")),
    ):
        starts = [tensor.data_ptr() for tensor in kind]
        assert [b - a for a, b in pairwise(starts)] == [tensor.nbytes for tensor in kind[:-1]]
        assert all(t.untyped_storage().nbytes() == t.nbytes and not t.storage_offset() for t in kind)


def test_shards_lie_flat_and_are_gathered_from_there() -> None:
    model, optimizer = Small().build()
    mode = spmd.DataParallel("fully_shard")
    compiled = compile_on_fake_ranks(2, Small.step, (model, optimizer), *Small().part(0, 0), parallel_mode=mode)
    gathers = [n for n in compiled.program.graph.nodes if str(n.meta.get("collective", "")).count("all_gather")]
    assert gathers and all(node.all_input_nodes[0].op == "placeholder" for node in gathers)
    assert all(part.storage_offset() == 0 for part in (p.to_local() for p in model.parameters()))
    twin = copy.deepcopy(model)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        bits, copied = (each.to_local().detach().view(torch.uint8) for each in (one, other))
        assert torch.equal(bits, copied)  # fake collectives leave whatever lay in memory, also NaN
        assert one.to_local().data_ptr() != other.to_local().data_ptr()


class OfTheirOwn(Tensor):
    """A class of the user's."""


HELD = torch.ones(2, 3).numpy()
TENSORS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "plain": (lambda: torch.ones(2, 3), True),
    "a parameter": (lambda: nn.Parameter(torch.ones(2, 3)), True),
    "columns first": (lambda: torch.ones(3, 2).t(), False),
    "less than its memory": (lambda: torch.ones(4).resize_(3), False),
    "an array": (lambda: torch.from_numpy(HELD), False),
    "shared with processes": (lambda: torch.ones(2, 3).share_memory_(), False),
    "of inference": (torch.inference_mode()(lambda: torch.ones(2, 3)), False),
    "conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), False),
    "integers": (lambda: torch.ones(3, dtype=torch.int64), False),
    "of a class of its own": (lambda: torch.ones(3).as_subclass(OfTheirOwn), False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_memory_that_nobody_else_sees_is_movable(name: str) -> None:
    make, movable = TENSORS[name]
    assert is_movable(make()) is movable


def test_what_another_tensor_shows_may_not_move() -> None:
    tensor = torch.ones(3)
    seen = tensor.detach()
    assert not is_movable(tensor)
    del seen
    assert is_movable(tensor)


def test_tensors_are_a_flat_one_if_they_are_all_of_it_in_order() -> None:
    flat = torch.arange(6.0)
    _flat_tensors[flat.data_ptr()] = flat
    one, two = parts_of(flat, [torch.empty(2), torch.empty(2, 2)])
    assert flat_tensor_of([one, two]) is flat
    assert flat_tensor_of([one]) is None
    assert flat_tensor_of([two]) is None
    assert flat_tensor_of([two, one]) is None
    assert flat_tensor_of([one, two.t()]) is None
    assert flat_tensor_of([one, two.view(torch.int32)]) is None
    assert flat_tensor_of([one, two.clone()]) is None
    assert flat_tensor_of([one.clone(), two]) is None


class OtherData(Small):
    """Between calls, the data of parameters and state is replaced: of all, of some, and by another layout."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        parameters = list(objects[0].parameters())
        for k, parameter in enumerate(parameters):
            if step == 1 or (step == 2 and k % 2):
                parameter.data = parameter.data * 0.5
            if step == 3 and k == 0:
                parameter.data = parameter.data.t().clone().t() * 0.5
            if step == 4:
                objects[1].state[parameter]["exp_avg"].data = torch.ones_like(parameter)


class Swapped(Small):
    """Two layers are swapped by their data, and others by a shared tensor."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        first, second = objects[0][0].weight, objects[0][2].weight
        if step in (1, 3):
            first.data, second.data = second.data, first.data


class Visited(Small):
    """For two steps the model has the data of other tensors, which the user keeps, as he keeps the model's own."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        model.other = [p.detach() * 0.9 for p in model.parameters()]
        return model, optimizer

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        model = objects[0]
        if step == 1:
            model.own = [p.data for p in model.parameters()]
        if step in (1, 3):
            for parameter, data in zip(model.parameters(), model.other if step == 1 else model.own, strict=True):
                parameter.data = data
        if step == 4:
            with torch.no_grad():
                model[0].weight.add_(sum(t.sum() for t in model.other))  # what was trained meanwhile, too


class Saved(Small):
    """All state goes through a file, and comes back."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        model, optimizer = objects
        if step in (1, 2, 4):
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), list(model.parameters())[1].data), file)
            file.seek(0)
            saved = torch.load(file)
            model.load_state_dict(saved[0], assign=False)
            optimizer.load_state_dict(saved[1])


class Cast(Small):
    """The model is moved about, which gives its parameters other memory."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        if step in (1, 3):
            objects[0].float().double()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", [OtherData(), Swapped(), Visited(), Saved(), Cast()], ids=lambda c: type(c).__name__)
def test_what_happens_between_calls_counts(case: Case) -> None:
    compiled = assert_same_alone(case)
    assert len(compiled.programs) <= 3


@pytest.mark.usefixtures("alone")
def test_memory_that_is_seen_elsewhere_stays() -> None:
    model, optimizer = Small().build()
    seen = model[0].weight.detach()
    step = spmd.compile(Small.step)
    for k in range(3):
        step(model, optimizer, *Small().part(0, k))
        assert torch.equal(seen, model[0].weight) and seen.data_ptr() == model[0].weight.data_ptr()
    assert flats(step) == [6, 6]  # of state only
    shared = Small().build()
    shared[0].share_memory()
    step(*shared, *Small().part(0, 0))
    assert flats(step) == [6, 6] and all(p.is_shared() for p in shared[0].parameters())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("at", [0, 2])
def test_an_array_that_is_a_parameter_s_memory_stays_so(at: int) -> None:
    model, optimizer = Small().build()
    step = spmd.compile(Small.step)
    for k in range(4):
        if k == at:
            array = model[0].weight.detach().numpy().copy()
            model[0].weight.data = torch.from_numpy(array)
        step(model, optimizer, *Small().part(0, k))
    assert array.ctypes.data == model[0].weight.data_ptr()
    assert torch.equal(torch.from_numpy(array), model[0].weight)


@pytest.mark.usefixtures("alone")
def test_what_is_looked_at_after_the_first_call_is_kept_up() -> None:
    model, optimizer = Small().build()
    step = spmd.compile(Small.step)
    for k in range(2):
        step(model, optimizer, *Small().part(0, k))
    seen = [p.detach() for p in model.parameters()]
    model[0].weight.data = model[0].weight.data.clone()
    for k in range(2):
        step(model, optimizer, *Small().part(0, k))
    assert all(torch.equal(one, p) for one, p in zip(seen[1:], list(model.parameters())[1:], strict=True))
    assert not torch.equal(seen[0], model[0].weight)


@pytest.mark.usefixtures("alone")
def test_a_file_holds_what_was_saved_and_no_more() -> None:
    model, optimizer = Small(sizes=(64, 64, 64)).build()
    spmd.compile(Small.step)(model, optimizer, *Small(sizes=(64, 64, 64)).part(0, 0))
    file = io.BytesIO()
    torch.save(model[0].bias, file)
    assert len(file.getvalue()) < 64 * 64 * 8


@pytest.mark.usefixtures("alone")
def test_safetensors_take_the_state() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = Small().build()
    spmd.compile(Small.step)(model, optimizer, *Small().part(0, 0))
    loaded = safetensors.load(safetensors.save(model.state_dict()))
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def turns(step_one: Any, step_two: Any) -> Iterator[dict[str, Any]]:
    """Two optimizers train one model in turns."""
    torch.manual_seed(0)
    model = mlp(*SIZES)
    one, two = make_optimizer("AdamW", model.parameters()), make_optimizer("SGD momentum", model.parameters())
    for k in range(6):
        step_one(model, one, *Small().part(0, k))
        result = step_two(model, two, *Small().part(0, 10 + k))
        yield snapshot(result, (model, one, two))


@pytest.mark.usefixtures("alone")
def test_steps_that_share_a_model_share_its_storage() -> None:
    one, two = spmd.compile(Small.step), spmd.compile(Small.step)
    assert not all_unequal(list(turns(Small.step, Small.step)), list(turns(one, two)), 0, 1)
    assert flats(one) == [6, 6, 6] and flats(two) == [6, 6]


def held_by_one(rank: int, world: int) -> tuple[list[str], str, list[int]]:
    """Only rank 0 holds on to a parameter's memory; what differs from plain, the program, and its flat inputs."""
    case = Small()
    torch.manual_seed(0)
    model, optimizer = case.build()
    held = model[0].weight.detach() if rank == 0 else None
    step = spmd.compile(case.step)
    got = [snapshot(step(model, optimizer, *case.part(rank, k)), (model, optimizer)) for k in range(4)]
    assert held is None or torch.equal(held, model[0].weight)
    assert step.program is not None
    return all_unequal(plain_run(case, world, 4), got, rank, world), print_program(step.program), flats(step)


def test_ranks_agree_on_what_may_move(ranks: Ranks) -> None:
    (one, text, joined), (other, same, _) = ranks.run(2, held_by_one)
    assert one == other == [] and text == same
    assert joined == [6, 6]


def moved_by_one(rank: int, world: int) -> tuple[list[str], str, list[int]]:
    """Between two steps rank 0 gives a parameter other memory: what differs, the second program, its flat inputs."""
    case = Small()
    parts = [[case.part(r, k) for r in range(world)] for k in range(4)]

    def train(first: Any, second: Any, batches: list[Any]) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model, optimizer = case.build()
        results = [first(model, optimizer, *batch) for batch in batches[:2]]
        if rank == 0:
            model[0].weight.data = model[0].weight.data.clone()
        results += [second(model, optimizer, *batch) for batch in batches[2:]]
        return [snapshot(result, (model, optimizer)) for result in results[-1:]]

    step = spmd.compile(case.step)
    got = train(spmd.compile(case.step), step, [part[rank] for part in parts])
    expected = train(case.step, case.step, [case.whole(part) for part in parts])
    assert step.program is not None
    return all_unequal(expected, got, rank, world), print_program(step.program), flats(step)


def test_ranks_agree_on_what_is_flat_already(ranks: Ranks) -> None:
    (one, text, joined), (other, same, _) = ranks.run(2, moved_by_one)
    assert one == other == []
    assert text == same
    assert joined == [6, 6]


NUMBERS = [("replicate", "AdamW"), ("fully_shard", "SGD")]  # and AdamW where parts are uneven, below


def test_numbers(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    everything = list(product(("replicate", "fully_shard"), ("SGD", "AdamW")))
    for style, optimizer in everything if request.config.getoption("--exhaustive") else NUMBERS:
        assert_agrees(ranks, 2, Small(optimizer=optimizer), style)


def test_numbers_where_some_parts_are_uneven(ranks: Ranks) -> None:
    assert_agrees(ranks, 3, Small(sizes=(9, 9, 7, 6)), "fully_shard")


class Read(nn.Module):
    """Its step returns a parameter, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(x))
        return y


@pytest.mark.usefixtures("alone")
def test_a_returned_parameter_is_not_overwritten_later() -> None:
    def train_step(model: Read, optimizer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        before = model.one.weight * 1
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return before, model.one.weight.detach()

    model = Read()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = spmd.compile(train_step)
    for _ in range(3):
        old = model.one.weight.detach().clone()
        before, after = step(model, optimizer, torch.randn(4, 3))
        assert torch.equal(before, old) and torch.equal(after, model.one.weight) and not torch.equal(old, after)
