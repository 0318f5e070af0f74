"""Kernels that compute something else than an island's ops are found on examples, which take both sides of masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import passes
from passes.ir.region import islands
from spmd.lowering.island_call import lies_as
from spmd.lowering.island_check import difference
from tests.passes.programs import make_program

aten = torch.ops.aten
X, COUNTS, MASK = torch.zeros(9, 9, dtype=torch.float64), torch.zeros(30, 30, dtype=torch.int64), torch.ones(9, 9) > 0


@dataclass(frozen=True)
class Made:
    """Kernels that compute what a function does."""

    function: Callable[..., Any]

    def bind(self, operands: Sequence[Tensor], vals: Sequence[Tensor]) -> Callable[[], Any]:
        assert all(map(lies_as, operands, vals))
        return lambda: operands[-1].copy_(self.function(*operands[:-1])[0])


def masked(x: Any, mask: Any) -> Any:
    return (aten.where.self(mask, aten.exp.default(x), aten.sin.default(x)),)


def subtracted(x: Any, y: Any) -> Any:
    return (aten.exp.default(aten.sub.Tensor(x, y)),)


def squared(x: Any) -> Any:
    return (aten.add.Tensor(aten.mul.Tensor(x, x), 1),)


def written(x: Any, y: Any) -> Any:
    """As labels are shifted in T5: the result has the strides of the part that it was written to, with gaps."""
    return (aten.copy.default(aten.slice.Tensor(aten.exp.default(x), 1, 1, 9), aten.sin.default(y)),)


def divided(x: Any, y: Any) -> Any:
    return (aten.floor_divide.default(x, aten.sub.Tensor(y, y)),)


def one_is_wrong(x: Tensor) -> Any:
    """One of 900, which may be a tie where floats are compared."""
    (found,) = squared(x)
    found[2, 3] += 1
    return (found,)


@pytest.mark.parametrize(
    ("right", "wrong", "inputs"),
    [
        (masked, lambda x, mask: (x.exp(),), {"x": X, "mask": MASK}),
        (subtracted, lambda x, y: ((y - x).exp(),), {"x": X, "y": X}),
        (squared, lambda x: (x + 1,), {"x": COUNTS}),
        (squared, one_is_wrong, {"x": COUNTS}),
        (written, lambda x, y: (y.cos(),), {"x": X, "y": X[:, 1:].contiguous()}),
    ],
)
def test_kernels_that_compute_something_else_are_found(right: Any, wrong: Any, inputs: dict[str, Any]) -> None:
    (island,) = islands(passes.run(make_program(right, **inputs), [passes.FormIslands()]).graph).values()
    made: Any = Made(right)
    assert not difference(island, made)
    made = Made(wrong)
    assert "compute another" in difference(island, made)


def test_an_island_that_fails_on_examples_stays_ops() -> None:
    program = make_program(divided, x=COUNTS, y=COUNTS)
    (island,) = islands(passes.run(program, [passes.FormIslands()]).graph).values()
    made: Any = Made(divided)
    assert "fails on examples: ZeroDivisionError" in difference(island, made)
