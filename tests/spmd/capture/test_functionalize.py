"""A graph whose writes are renamings is copied: the result is, node by node, what torch's functionalization gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes.ir.meta import TORCH_KEYS
from spmd.capture.functional.renamed_writes import RenamedWrites

pytestmark = pytest.mark.usefixtures("alone")

X = torch.arange(12.0).reshape(4, 3) / 7


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled_with(optimizer: Callable[..., Any], *layers: nn.Module) -> list[Any]:
    """The captured programs of two calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2))
    return captured(train, (model, optimizer(model.parameters()), X), 2)


def captured(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int = 1) -> list[Any]:
    step = spmd.compile(function)
    for _ in range(calls):
        step(*arguments)
    return [each.captured.program.graph for each in step._dispatch.programs.all]


def described(graph: Any) -> list[Any]:
    """All that is known of each node; numbers among the values by type, since symbols have numbers of their own."""
    return [(each.format_node(), _type(each.meta.get("val")), _rest(each.meta)) for each in graph.nodes]


def _type(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return [_type(each) for each in val]
    if isinstance(val, Tensor):
        return type(val), val.shape, val.stride(), val.storage_offset(), val.dtype, val.device, val.requires_grad
    return type(val)


def _rest(meta: dict[str, Any]) -> dict[str, str]:
    """What the project reads; torch's tracer leaves notes of its own."""
    return {key: str(value) for key, value in meta.items() if key not in {each.name for each in TORCH_KEYS}}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


CASES: dict[str, tuple[Any, ...]] = {
    "AdamW": (adamw, nn.GELU()),
    "SGD with momentum": (momentum, nn.ReLU()),
    "Rprop, which copies": (torch.optim.Rprop, nn.LayerNorm(4)),
    "RMSprop": (torch.optim.RMSprop, nn.Softmax(-1)),
    "batch norm": (torch.optim.SGD, nn.BatchNorm1d(4)),
}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each capture was copied."""
    found: list[bool] = []
    of = RenamedWrites.of

    def noted(*args: Any) -> RenamedWrites | None:
        writes = of(*args)
        found.append(writes is not None)
        return writes

    monkeypatch.setattr(RenamedWrites, "of", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_copied_programs_are_those_of_torch(name: str, copies: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    copied = compiled_with(*CASES[name])
    assert copies and all(copies)
    monkeypatch.setattr(RenamedWrites, "of", lambda *_: None)
    functionalized = compiled_with(*CASES[name])
    assert [*map(described, copied)] == [*map(described, functionalized)]


def cast(x: Tensor) -> Tensor:
    y = x.to(torch.bfloat16).clone()
    return y.add_(x)  # computed in fp32, and rounded


def element(x: Tensor) -> Tensor:
    y = x.clone()
    y[0].mul_(2)
    return y


def seen_before(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[0]
    y.mul_(2)
    return row + y.sum()


def seen_by_itself(x: Tensor) -> Tensor:
    y = x.clone()
    return y.add_(y.view(4, 3))


def grown(x: Tensor) -> Tensor:
    return F.relu_(x + 1).unsqueeze_(0) * 2


@pytest.mark.parametrize("function", [cast, element, seen_before, seen_by_itself, grown])
def test_other_writes_are_left_to_torch(function: Any, copies: list[bool]) -> None:
    step = spmd.compile(function)
    assert torch.equal(step(X.clone()), function(X.clone()))
    assert copies and not any(copies)


def chained(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[0] + 1  # a view that nobody reads after the write
    y.mul_(2).add_(y)
    z = y[1]  # a view of the new value
    turned = y.t() * 1
    return torch.cat([row, z, y.flatten(), turned.exp_().flatten()])


def argument(x: Tensor) -> Tensor:
    return x.mul_(3).sum() + x.sum()


def saved(x: Tensor) -> Tensor:
    w = torch.ones_like(x).requires_grad_()
    F.relu_(w * (x - 1)).square().sum().backward()
    return w.grad


@pytest.mark.parametrize("function", [chained, argument, saved])
def test_renamed_writes_are_read_by_all_that_comes_later(function: Any, copies: list[bool]) -> None:
    mine, theirs = X.clone(), X.clone()
    assert torch.equal(spmd.compile(function)(mine), function(theirs))
    assert torch.equal(mine, theirs)
    assert copies == [True]
