"""Values that a step takes from iterators and random generators: each call would get the first again, so it is refused.

What the step makes itself goes on working, and so do generators that it reaches and does not draw from.
"""

from __future__ import annotations

import io
import itertools
import queue
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import spmd

pytestmark = pytest.mark.usefixtures("alone")


def schedule() -> Iterator[float]:
    k = 0
    while True:
        yield 1.0 / (1 + k)
        k += 1


def filled_queue() -> queue.Queue[float]:
    found = queue.Queue[float]()
    found.put(1.0)
    return found


Taken = tuple[Callable[[], Any], Callable[[Any], float], str]
ITERATORS: dict[str, Taken] = {
    "generator": (schedule, next, r"takes the next value of .*source"),
    "sent": (schedule, lambda source: source.send(None), r"takes the next value of .*source"),
    "list": (lambda: iter([1.0, 0.5, 0.25]), next, r"takes the next value of .*source"),
    "count": (lambda: itertools.count(1), lambda source: float(next(source)), r"takes the next value of .*source"),
    "loop": (lambda: iter([1.0, 2.0]), lambda source: sum(value for value in source), r"takes the next value of"),
    "zip": (lambda: iter([1.0, 2.0]), lambda source: next(zip(source, strict=True))[0], r"takes the next value of"),
    "bound": (lambda: itertools.count(1).__next__, lambda source: float(source()), r"takes the next value of"),
    "in a list": (lambda: [itertools.count(1)], lambda source: float(next(source[0])), r"takes the next value of"),
    "in a tuple": (lambda: (itertools.count(1),), lambda source: float(next(source[0])), r"in a tuple"),
    "lines": (lambda: io.StringIO("1.0\n2.0"), lambda source: float(next(source)), r"reads from .*source"),
    "read": (lambda: io.StringIO("1.0"), lambda source: float(source.read()), r"reads from .*source"),
    "queue": (filled_queue, lambda source: source.get(), r"reads from .*source"),
}
GENERATORS: dict[str, Taken] = {
    "Random": (lambda: random.Random(0), lambda source: source.random(), r"draws from .*source"),
    "default_rng": (lambda: np.random.default_rng(0), lambda source: float(source.beta(0.4, 0.4)), r"draws from"),
    "MT19937": (lambda: np.random.Generator(np.random.MT19937(0)), lambda source: float(source.normal()), "draws from"),
    "RandomState": (lambda: np.random.RandomState(0), lambda source: float(source.rand()), r"draws from"),
    "method": (lambda: random.Random(0).random, lambda source: float(source()), r"draws from"),
    "partial": (lambda: partial(random.Random(0).uniform, 0), lambda source: float(source(1)), r"draws from"),
}


class Trainer:
    """Holds a source, and trains one number."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.weight = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.ones_(self.weight.weight)

    def step(self, x: Tensor, take: Callable[[Any], float]) -> Tensor:
        loss: Tensor = self.weight(x).sum() * take(self.source)
        loss.backward()
        return loss


X = torch.ones(2, 1, dtype=torch.float64)


@pytest.mark.parametrize(("make", "take", "words"), ITERATORS.values(), ids=ITERATORS)
def test_the_next_value_of_an_iterator_is_refused_and_still_there(make: Any, take: Any, words: str) -> None:
    trainer = Trainer(make())
    with pytest.raises(spmd.CaptureError, match=words):
        spmd.compile(trainer.step)(X, take)
    if "tuple" not in words:  # where nothing could stand in its place
        assert take(trainer.source) == take(make())


@pytest.mark.parametrize(("make", "take", "words"), GENERATORS.values(), ids=GENERATORS)
def test_a_draw_is_refused_and_undone(make: Any, take: Any, words: str) -> None:
    trainer = Trainer(make())
    with pytest.raises(spmd.CaptureError, match=rf"(?s){words}.*test_taken_values\.py:\d+: .*source"):
        spmd.compile(trainer.step)(X, take)
    assert take(trainer.source) == take(make())


def test_an_iterator_of_a_closure_or_an_argument_is_refused_at_its_line() -> None:
    model, source = Trainer(None).weight, schedule()

    @spmd.compile
    def closed(x: Tensor) -> Any:
        return (model(x) * next(source)).sum()

    @spmd.compile
    def passed(x: Tensor, given: Any) -> Any:
        return (model(x) * next(given)).sum()

    with pytest.raises(spmd.CaptureError, match=r"(?s)the closure variable source.*py:\d+: return .*next\(source\)"):
        closed(X)
    with pytest.raises(spmd.CaptureError, match=r"(?s)value of given.*py:\d+: return .*next\(given\)"):
        passed(X, source)
    assert next(source) == 1.0


def test_a_refusal_that_the_step_catches_is_raised() -> None:
    def take(source: Any) -> float:
        try:
            return float(next(source))
        except Exception:
            return 1.0

    with pytest.raises(spmd.CaptureError, match="takes the next value"):
        spmd.compile(Trainer(schedule()).step)(X, take)


class Own:
    """Counts by attributes, which each call reads and writes."""

    def __init__(self) -> None:
        self.k = 0

    def __next__(self) -> float:
        self.k += 1
        return float(self.k)


def own_iterators(source: Any) -> float:
    total = 0.0
    for k, value in enumerate(zip([1.0, 2.0], range(2), strict=True)):
        total += value[0] * k
    counts = itertools.count()
    source.kept = iter(range(3))
    return total + next(counts) + next(source.kept) + next(iter([1.0]))


def own_generators(source: Any) -> float:
    return random.Random(0).random() + float(np.random.default_rng(0).random())


class Holder:
    """Holds what the step puts there, and what it does not touch."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.random, self.iterator, self.numpy = random.Random(0), schedule(), np.random.default_rng(0)


def unused(source: Any) -> float:
    assert isinstance(source.iterator, Iterator) and source.iterator.gi_frame is not None
    return 1.0 if source.random is not None and isinstance(source.numpy, np.random.Generator) else 2.0


@pytest.mark.parametrize(
    ("make", "take"), [(Own, next), (Holder, own_iterators), (Holder, own_generators), (Holder, unused)]
)
def test_what_is_made_in_the_step_and_what_is_not_used_goes_on_working(make: Any, take: Any) -> None:
    losses = []
    for decorate in (lambda step: step, spmd.compile):
        trainer = Trainer(make())
        step = decorate(trainer.step)
        losses.append([step(X, take).item() for _ in range(3)])
    assert losses[0] == losses[1]
