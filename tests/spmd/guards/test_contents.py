"""Arrays, views of memory, context variables and the environment: a step that reads them finds today's values."""

from __future__ import annotations

import os
import threading
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


def add_one(held: Any) -> None:
    held[0] += 1


def add(held: ContextVar[float]) -> None:
    held.set(held.get() + 1)


def local() -> threading.local:
    made = threading.local()
    made.scale = 1.0
    return made


def frozen() -> Any:
    """An array that cannot be written to, whose base can."""
    base = np.ones(3)
    shown = base.view()
    shown.flags.writeable = False
    return SimpleNamespace(base=base, shown=shown)


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
    "context": (lambda: ContextVar("scale", default=1.0), lambda held: held.get(), add),
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
    assert len(compiled.programs) == (1 if request.node.callspec.id == "memory" else 3)  # the tensor is read anew
    assert torch.equal(compiled(holder, x), step(holder, x))
    assert len(compiled.programs) == (1 if request.node.callspec.id == "memory" else 3)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("read", [lambda: os.environ["SCALE"], lambda: os.getenv("SCALE")], ids=["environ", "getenv"])
def test_the_environment_is_that_of_each_call(read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x = spmd.compile(lambda x: x * float(read())), torch.ones(3)
    for value in ("1", "2", "2"):
        monkeypatch.setenv("SCALE", value)
        assert torch.equal(compiled(x), x * float(value))
    assert len(compiled.programs) == 2
