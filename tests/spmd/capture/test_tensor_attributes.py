"""Tensors that modules hold as plain attributes: constants of a program, guarded by identity, never written."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import spmd


class Positions(nn.Module):
    """A layer on inputs to which a table is added that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.table, self.order = torch.randn(3, 4, dtype=torch.float64), torch.tensor([2, 0, 1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.table.detach().type_as(x).clone())[:, self.order] * self.table


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.usefixtures("alone")
def test_values_are_read_at_each_call_and_another_tensor_compiles_anew() -> None:
    torch.manual_seed(0)
    models = [model := Positions(), copy.deepcopy(model)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    compiled = spmd.compile(step)
    for k in range(5):
        x = torch.randn(5, 3, 4, dtype=torch.float64)
        for each in models:
            if k == 1:
                each.table.mul_(3)  # the same tensor: its new values are read
            elif k == 3:
                each.table = each.table - 1  # another tensor: another program
        torch.testing.assert_close(compiled(models[0], optimizers[0], x), step(models[1], optimizers[1], x))
        assert len(compiled.programs) == (1 if k < 3 else 2)


class Scaled(nn.Module):
    """Results multiplied by what ``read`` makes of a tensor in Python."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.table, self.read = torch.ones(3, dtype=torch.float64), read

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.table)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda table: table[1].item(),
    "tolist": lambda table: table.tolist()[1],
    "numpy": lambda table: float(table.numpy()[1]),
    "asarray": lambda table: torch.from_numpy(numpy.asarray(table) * 2),
    "dlpack": lambda table: float(numpy.from_dlpack(table)[1]),
    "text": lambda table: float(f"{table}"[8:9]),
    "bool": lambda table: 3.0 if table[1] > 1.5 else 5.0,
    "int": lambda table: [1.0, 2.0, 3.0][int(table[1])],
    "float": lambda table: 3.0 if float(table.sum()) > 4 else 5.0,
    "index": lambda table: [1.0, 2.0, 3.0][table[1].long()],
    "iter": lambda table: max(float(each) for each in table),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("read", READS.values(), ids=[*READS])
def test_values_that_python_takes_are_those_of_each_call(read: Callable[[Tensor], Any]) -> None:
    """An array or text of the tensor was that of a fake, or of the first call, whatever was written since."""
    model, compiled, x = Scaled(read), spmd.compile(lambda model, x: model(x)), torch.ones(3, dtype=torch.float64)
    for value in (1.0, 2.0, 2.0, 1.0):
        model.table.data.fill_(value)  # counts as no version
        assert torch.equal(compiled(model, x), model(x))
    assert len(compiled.programs) <= 2
    assert torch.equal(model.table, torch.ones(3, dtype=torch.float64))


@pytest.mark.usefixtures("alone")
def test_a_write_through_an_array_of_a_tensor_is_refused_and_undone() -> None:
    model = Scaled(lambda table: float(table.numpy().__iadd__(1.0)[0]))
    with pytest.raises(spmd.CaptureError, match=r"the step writes to model\.table"):
        spmd.compile(lambda model, x: model(x))(model, torch.ones(3, dtype=torch.float64))
    assert model.table.tolist() == [1.0, 1.0, 1.0]


class Tables(nn.Module):
    """A layer whose results are multiplied by tensors in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.listed, self.named = [torch.ones(4).double()], {"scale": torch.ones(4).double()}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.listed[0] * self.named["scale"]


@pytest.mark.usefixtures("alone")
def test_another_tensor_in_a_list_or_dict_compiles_anew() -> None:
    model, x = Tables(), torch.randn(5, 4, dtype=torch.float64)
    compiled = spmd.compile(lambda model, x: model(x))
    for programs in (1, 2, 3):
        torch.testing.assert_close(compiled(model, x), model(x))
        assert len(compiled.programs) == programs
        holder: Any = model.listed if programs == 1 else model.named
        holder[0 if programs == 1 else "scale"] = torch.full((4,), 2.0 + programs, dtype=torch.float64)


@pytest.mark.usefixtures("alone")
def test_writing_a_tensor_attribute_is_refused() -> None:
    def count(model: nn.Module, x: Tensor) -> Tensor:
        model.table.add_(1)
        return model(x)

    model = Positions()
    with pytest.raises(spmd.CaptureError, match=r"it may write into model\.table .*Make that a buffer"):
        spmd.compile(count)(model, torch.randn(5, 3, 4, dtype=torch.float64))


@functools.lru_cache
def mask_of(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.float64).tril()


@functools.cache
def rotations_of(rows: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows, dtype=torch.float64).cos(), torch.arange(rows, dtype=torch.float64).sin()


@functools.lru_cache
def learned_of(rows: int) -> Tensor:
    return torch.ones(rows, dtype=torch.float64, requires_grad=True) * 2


class Cached(nn.Module):
    """A layer that reads the caches of functions."""

    def __init__(self, *read: Callable[[int], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4).double(), read

    def forward(self, x: Tensor) -> Tensor:
        mask, *others = (each(len(x)) for each in self.read)
        y: Tensor = mask @ self.layer(x)
        return y * others[0][0][:, None] + others[0][1][:, None] if others else y


@pytest.mark.usefixtures("alone")
def test_what_the_cache_of_a_function_holds_is_a_constant_for_as_long_as_it_is_there() -> None:
    torch.manual_seed(0)
    mask_of.cache_clear()
    models = [model := Cached(mask_of, rotations_of), copy.deepcopy(model)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    x, compiled = torch.randn(5, 4, dtype=torch.float64), spmd.compile(step)
    models[0](x)  # fills the caches
    for k in range(3):
        if k == 2:
            mask_of.cache_clear()
            mask_of(5).mul_(2)  # another tensor, and another value
        torch.testing.assert_close(compiled(models[0], optimizers[0], x), step(models[1], optimizers[1], x))
        assert len(compiled.programs) == (1 if k < 2 else 2)
    learned_of(5)
    with pytest.raises(
        spmd.CaptureError, match=r"a result of learned_of, whose cache holds a tensor that requires grad"
    ):
        spmd.compile(step)(model := Cached(learned_of), torch.optim.SGD(model.parameters()), x)
