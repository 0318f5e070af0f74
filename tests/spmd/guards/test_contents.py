"""Arrays, other memory, variables, events, caches and the environment: a step that reads them finds today's values."""

from __future__ import annotations

import configparser
import ctypes
import functools
import multiprocessing
import os
import threading
import weakref
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import spmd


class Holder:
    """An object of the user's."""

    def __init__(self, held: Any) -> None:
        self.held = held


def add_one(held: Any, key: Any = 0) -> None:
    held[key] += 1


def add(held: ContextVar[float]) -> None:
    held.set(held.get() + 1)


def local() -> threading.local:
    made = threading.local()
    made.scale = 1.0
    return made


def local_of_a_class() -> threading.local:
    return type("Local", (threading.local,), {"scale": 1.0})()


def add_to_class(held: Any) -> None:
    type(held).scale += 1


def frozen() -> Any:
    """An array that cannot be written to, whose base can."""
    base = np.ones(3)
    shown = base.view()
    shown.flags.writeable = False
    return SimpleNamespace(base=base, shown=shown)


def settings() -> configparser.SectionProxy:
    made = configparser.ConfigParser()
    made["train"] = {"scale": "1"}
    return made["train"]


def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    made = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return made


def turn(held: Any) -> None:
    held[:] = ~held


KEY = Holder(1.0)

# What holds values, how a step reads one, and how the user writes one between calls.
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "numpy": (lambda: np.ones(3), lambda held: float(held[0]), add_one),
    "strided": (lambda: np.ones(6)[::2], lambda held: float(held.sum()), add_one),
    "objects": (lambda: np.array([1.0, "x"], dtype=object), lambda held: held[0], add_one),
    "computed": (lambda: np.ones(3), lambda held: torch.from_numpy(held * 2), add_one),
    "memory": (lambda: np.ones(3), torch.from_numpy, add_one),
    "read only": (frozen, lambda held: float(held.shown[0]), lambda held: add_one(held.base)),
    "in a list": (lambda: [np.ones(3)], lambda held: float(held[0][0]), lambda held: add_one(held[0])),
    "array": (lambda: array("d", [1.0]), lambda held: held[0], add_one),
    "bytes": (lambda: bytearray(b"a"), lambda held: held[0], add_one),
    "view": (lambda: memoryview(array("d", [1.0])), lambda held: held[0], add_one),
    "row": (lambda: np.ones(1, dtype=[("a", "f8")])[0], lambda held: float(held["a"]), add_one),
    "nested": (lambda: np.array([[1.0], None], object), lambda held: held[0][0], lambda held: add_one(held[0])),
    "mask": (lambda: np.array([True, False, True]), lambda held: torch.arange(3.0)[held].sum(), turn),
    "item": (lambda: np.ones(3), lambda held: torch.from_numpy(held)[0].item(), add_one),
    "ctypes": (lambda: (ctypes.c_double * 2)(1.0), lambda held: held[0], add_one),
    "shared": (lambda: multiprocessing.Array("d", [1.0]), lambda held: held[0], add_one),
    "event": (threading.Event, lambda held: 2.0 if held.is_set() else 3.0, lambda held: held.set()),
    "weak": (lambda: weakref.WeakKeyDictionary({KEY: 1.0}), lambda held: held[KEY], lambda held: add_one(held, KEY)),
    "settings": (settings, lambda held: held.getfloat("scale"), lambda held: held.update(scale=held["scale"] + "1")),
    "scheduler": (scheduler, lambda held: held.get_last_lr()[0], lambda held: held.step()),
    "context": (lambda: ContextVar("scale", default=1.0), lambda held: held.get(), add),
    "default": (
        lambda: ContextVar("settings", default=SimpleNamespace(scale=1.0)),  # noqa: B039
        lambda held: held.get().scale,
        lambda held: setattr(held.get(), "scale", held.get().scale + 1),
    ),
    "none": (
        lambda: ContextVar("scale", default=1.0),
        lambda held: 3.0 if held.get() is None else held.get(),
        lambda held: held.set(None),
    ),
    "class of thread": (local_of_a_class, lambda held: held.scale, add_to_class),
    "thread": (local, lambda held: held.scale, lambda held: setattr(held, "scale", held.scale + 1)),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("make", "read", "write"), HELD.values(), ids=[*HELD])
def test_what_is_held_is_that_of_each_call(
    make: Callable[[], Any], read: Callable[[Any], Any], write: Callable[[Any], Any], request: pytest.FixtureRequest
) -> None:
    step = lambda holder, x: x * read(holder.held)  # noqa: E731
    holder, compiled, x = Holder(make()), spmd.compile(step), torch.ones(3, dtype=torch.float64)
    for k in range(3):
        assert torch.equal(compiled(holder, x), step(holder, x))
        if k < 2:
            write(holder.held)
    # The tensor is read anew; some have two values, and some numbers are inputs from the second on.
    count = {"memory": 1, "event": 2, "mask": 2, "none": 2, "default": 2, "class of thread": 2, "thread": 2}.get(
        request.node.callspec.id, 3
    )
    assert len(compiled.programs) == count
    assert torch.equal(compiled(holder, x), step(holder, x))
    assert len(compiled.programs) == count


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("read", [lambda: os.environ["SCALE"], lambda: os.getenv("SCALE")], ids=["environ", "getenv"])
def test_the_environment_is_that_of_each_call(read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x = spmd.compile(lambda x: x * float(read())), torch.ones(3)
    for value in ("1", "2", "2"):
        monkeypatch.setenv("SCALE", value)
        assert torch.equal(compiled(x), x * float(value))
    assert len(compiled.programs) == 2


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_filled", [True, False])
@pytest.mark.parametrize("size", [None, 8])
def test_what_a_cache_of_a_function_holds_is_that_of_each_call(size: int | None, is_filled: bool) -> None:
    get = functools.lru_cache(size)(lambda: Holder(1.0))
    if is_filled:
        get()
    compiled, x = spmd.compile(lambda x: x * get().held), torch.ones(3)
    for _ in range(3):
        assert torch.equal(compiled(x), x * get().held)
        get().held += 1
    get.cache_clear()
    assert torch.equal(compiled(x), x)
    get().held = 5.0
    assert torch.equal(compiled(x), x * 5)


@pytest.mark.usefixtures("alone")
def test_which_entry_of_a_cache_was_used_last_compiles_nothing() -> None:
    get = functools.lru_cache(8)(lambda scale: Holder(scale))
    get(1.0), get(2.0)
    compiled, x = spmd.compile(lambda x: x * get(1.0).held), torch.ones(3)
    for scale in (1.0, 2.0, 1.0):
        assert torch.equal(compiled(x), x)
        get(scale)
    assert len(compiled.programs) == 1


@pytest.mark.usefixtures("alone")
def test_keys_of_a_dict_are_watched() -> None:
    key = Holder(1.0)
    entries, x = {key: 1}, torch.ones(3)
    compiled = spmd.compile(lambda x: x * sum(each.held for each in entries))
    for _ in range(3):
        assert torch.equal(compiled(x), x * key.held)
        key.held += 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: ContextVar("scale"), lambda held: held.set(2.0)),
        (lambda: weakref.WeakKeyDictionary({KEY: 1.0}), lambda held: add_one(held, KEY)),
    ],
    ids=["context", "weak"],
)
def test_what_a_step_writes_where_no_call_would_repeat_it_is_refused(
    make: Callable[[], Any], write: Callable[[Any], Any]
) -> None:
    holder = Holder(make())
    if isinstance(holder.held, ContextVar):
        holder.held.set(1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        write(holder.held)
        return x * 2

    with pytest.raises(spmd.CaptureError, match="would do only once"):
        spmd.compile(step)(torch.ones(3))


@pytest.mark.usefixtures("alone")
def test_what_others_may_write_at_the_same_time_is_not_put_back() -> None:
    """An event that a signal or another thread sets while the step is traced has to stay set."""
    stop = threading.Event()

    def step(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=stop.set)
        other.start()
        other.join()
        return x * (2 if stop.is_set() else 1)

    assert torch.equal(spmd.compile(step)(torch.ones(3)), torch.full((3,), 2.0))
    assert stop.is_set()


@pytest.mark.usefixtures("alone")
def test_what_a_step_writes_to_a_local_of_threads_each_call_writes() -> None:
    """Also an entry that the first call makes, as libraries do."""
    held = threading.local()

    def step(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(held, "calls"):
            held.calls, held.scales = 0, []
        held.calls += 1
        held.scales.append(held.calls)
        return x * held.scales.pop()

    compiled, x = spmd.compile(step), torch.ones(3)
    for calls in range(1, 6):
        assert torch.equal(compiled(x), x * calls)
        assert vars(held) == {"calls": calls, "scales": []}
    assert len(compiled.programs) <= 3


@pytest.mark.usefixtures("alone")
def test_a_context_variable_that_the_step_resets_is_not_refused() -> None:
    scale = ContextVar("scale", default=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        token = scale.set(scale.get() + 1)
        try:
            return x * scale.get()
        finally:
            scale.reset(token)

    compiled, x = spmd.compile(step), torch.ones(3)
    for value in (1.0, 3.0):
        scale.set(value)
        assert torch.equal(compiled(x), x * (value + 1))
