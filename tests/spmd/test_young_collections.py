"""While a step is compiled, the garbage collector looks at new objects only; afterwards all is as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from spmd.interpreter import young_collections as module
from spmd.interpreter.young_collections import young_collections


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_users_own", False)
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_garbage_is_collected_if_it_is_new() -> None:
    old = weakref.ref(Node())
    with young_collections():
        new = weakref.ref(Node())
        gc.collect()
        assert old() is not None and new() is None
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("own, inside", [(700, True), (0, False)])  # 0: it never starts by itself
def test_collections_are_rarer_inside_alone(own: int, inside: bool) -> None:
    before = gc.get_threshold()
    gc.set_threshold(own, 10, 10)
    try:
        with young_collections():
            assert (gc.get_threshold()[0] > own) is inside
        assert gc.get_threshold() == (own, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_it_ends_with_an_error() -> None:
    with pytest.raises(KeyError), young_collections():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_the_user_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with young_collections(), young_collections():
        pass
    assert gc.get_freeze_count() > 0
