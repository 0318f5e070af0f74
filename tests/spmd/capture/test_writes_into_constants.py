"""Tensors that are no buffers, wherever they are held, are written into in place, also through views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd

pytestmark = pytest.mark.usefixtures("alone")

HELD: dict[str, Tensor] = {}


def _assigns(q: Tensor, f: Tensor) -> None:
    q[:4] = f


def _assigns_a_row(q: Tensor, f: Tensor) -> None:
    q[2] = f[0]


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "slice": _assigns,
    "row": _assigns_a_row,
    "whole": lambda q, f: q.mul_(2),
    "narrow": lambda q, f: q.narrow(0, 0, 4).copy_(f),
    "view": lambda q, f: q.view(-1)[:8].fill_(1),
    "transposed": lambda q, f: q.t()[:, :4].fill_(2),
    "data": lambda q, f: q.data[:4].copy_(f),
    "detached": lambda q, f: q.detach()[:4].copy_(f),
    "chunk": lambda q, f: q.chunk(2)[1].zero_(),
    "out": lambda q, f: torch.mul(q[:4], 2, out=q[:4]),
    "list": lambda q, f: torch._foreach_mul_([q[:4]], 2.0),
}


class Holder:
    """A plain object with a tensor in an attribute, a dict and a list."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.attribute = torch.randn(6, 4)
        self.dict, self.list = {"q": self.attribute.clone()}, [self.attribute.clone()]
        HELD["q"] = self.attribute.clone()


PLACES: dict[str, Callable[[Holder], Tensor]] = {
    "attribute": lambda holder: holder.attribute,
    "dict": lambda holder: holder.dict["q"],
    "list": lambda holder: holder.list[0],
    "global": lambda holder: HELD["q"],
}


def make(holder: Any, find: Callable[[Any], Tensor], write: Callable[[Tensor, Tensor], Any]) -> Any:
    def step(x: Tensor) -> Tensor:
        h = holder.model(x)
        write(find(holder), h.detach())
        total: Tensor = h.sum() + find(holder).sum()
        return total

    return step


def agrees(find: Callable[[Any], Tensor], write: Callable[[Tensor, Tensor], Any]) -> None:
    """A step that writes does so at each call, into the tensor that is there."""
    torch.manual_seed(0)
    holder = Holder()
    held, plain, compiled = find(holder), make(holder, find, write), spmd.compile(make(holder, find, write))
    batches, before, want = [torch.randn(4, 4) for _ in range(3)], held.clone(), []
    for x in batches:
        want.append((plain(x), held.clone()))
    held.copy_(before)
    for x, (result, after) in zip(batches, want, strict=True):
        torch.testing.assert_close(compiled(x), result)
        torch.testing.assert_close(held, after)
    assert find(holder) is held and len(compiled.programs) == 1


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_those_of_the_plain_step(write: str) -> None:
    agrees(PLACES["attribute"], WRITES[write])


@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_tensor_is(place: str) -> None:
    agrees(PLACES[place], _assigns)


def test_one_in_a_plain_attribute_of_a_module_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.attribute = nn.Linear(4, 4), torch.randn(6, 4)

    model = Model()
    before = model.attribute.clone()
    with pytest.raises(spmd.CaptureError, match="it may write into "):
        spmd.compile(make(model, PLACES["attribute"], _assigns))(torch.ones(4, 4))
    assert torch.equal(model.attribute, before)
