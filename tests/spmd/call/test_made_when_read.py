"""Containers whose items are made when they are read, so that each search of them would come to ever new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from spmd.python_state.reads.snapshots import containers_in


class Lazy(list[Any]):
    """A list that holds ranges of itself."""

    def __iter__(self) -> Iterator[Any]:
        yield Lazy([1])


class LazyDict(dict[str, Any]):
    """A dict that wraps its values."""

    def values(self) -> Any:
        return [LazyDict(a=1)]

    def items(self) -> Any:
        return [("a", LazyDict(a=1))]


@pytest.mark.usefixtures("alone")
def test_the_search_for_state_ends() -> None:
    def step(model: nn.Module, x: Tensor, lazy: Any) -> Tensor:
        return model(x).sum()  # type: ignore[no-any-return]

    with pytest.raises(spmd.CaptureError, match="lazy is a Lazy, which cannot be compared from call to call"):
        spmd.compile(step)(nn.Linear(3, 2), torch.ones(2, 3), Lazy([1, 2]))


@pytest.mark.parametrize("lazy", [Lazy([1, [2]]), LazyDict(a=[2])])
def test_the_search_for_containers_ends(lazy: Any) -> None:
    assert [type(each) for each in containers_in(lazy)] == [type(lazy), list]
