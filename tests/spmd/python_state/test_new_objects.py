"""Which objects a step made itself, however Python's collector is set."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import spmd
from spmd.python_state.reads.new_objects import NewObjects


class Settings:
    pass


@pytest.fixture(params=["enabled", "disabled", "frozen"])
def collector(request: pytest.FixtureRequest) -> Iterator[str]:
    """The collector as a user may have set it before the step."""
    {"enabled": gc.enable, "disabled": gc.disable, "frozen": gc.freeze}[request.param]()
    yield request.param
    gc.enable()


def test_what_was_there_is_not_new_and_what_is_made_is(collector: str) -> None:
    old = [Settings() for _ in range(10)]
    new = NewObjects()
    with new.watch():
        made = [Settings() for _ in range(10)]
        assert not any(each in new for each in old)
        assert all(each in new for each in made)


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_a_collection_on_the_way_changes_nothing(collector: str, generation: int) -> None:
    old = Settings()
    new = NewObjects()
    with new.watch():
        made = Settings()
        gc.collect(generation)
        assert made in new and old not in new


def test_many_objects_are_found_while_the_collector_is_off() -> None:
    gc.disable()
    try:
        old = [Settings() for _ in range(100)]
        new = NewObjects()
        with new.watch():
            made = [Settings() for _ in range(50_000)]
            assert not any(each in new for each in old)
            assert all(each in new for each in made)
            assert len(gc.get_objects(generation=0)) < 50_000
    finally:
        gc.enable()


def test_dicts_and_functions_are_never_new() -> None:
    new = NewObjects()
    with new.watch():
        assert {"a": Settings()} not in new and (lambda: None) not in new


def test_nothing_is_noted_after_the_watch() -> None:
    before = len(gc.callbacks)
    with NewObjects().watch():
        assert len(gc.callbacks) == before + 1
    assert len(gc.callbacks) == before


class Ratio:
    __slots__ = ("_value", "of")

    def __init__(self, of: int) -> None:
        self.of, self._value = of, None

    @property
    def value(self) -> float | None:
        if self._value is None:
            self._value = 1 / self.of
        return self._value


@pytest.mark.usefixtures("alone")
def test_slots_of_an_object_that_the_step_makes_are_no_state() -> None:
    def scaled(model: nn.Module, x: Tensor) -> Tensor:
        ratio = Ratio(4)
        return model(x).sum() * ratio.value * ratio.value

    step = spmd.compile(scaled)
    model, x = nn.Linear(3, 2), torch.ones(2, 3)
    assert all(torch.equal(step(model, x), model(x).sum() / 16) for _ in range(3))
    assert len(step.programs) == 1
