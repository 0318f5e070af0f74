"""Hooks that a library puts on modules in the first forward, for a collector that each call makes anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd

SOURCE = """
class Collector:
    found = None

ACTIVE = Collector()

def collected(model, x):
    if not getattr(model, "installed", False):
        model[0].register_forward_hook(lambda module, args, output: note(output))
        model.installed = True
    found = ACTIVE.found = {"layers": []}
    result = model(x)
    ACTIVE.found = None
    found["layers"] = found["layers"][:-1] + [found["layers"][-1] * 2]
    return result, found["layers"]

def note(output):
    if ACTIVE.found is not None:
        ACTIVE.found["layers"].append(output)
"""
LIBRARY: dict[str, Any] = {"__name__": "collects"}
exec(compile(SOURCE, "/site-packages/collects.py", "exec"), LIBRARY)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Loop:
    """A trainer whose count is an input in a second trace: in each the library finds its attribute gone."""

    def __init__(self) -> None:
        self.count = 0
        self.model, self.optimizer = make()

    def step(self, x: Tensor) -> Tensor:
        self.count += 1
        result, layers = LIBRARY["collected"](self.model, x)
        loss: Tensor = result.sum() * self.count + sum(layer.square().sum() for layer in layers) * len(layers)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.usefixtures("alone")
def test_a_library_that_collects_by_hooks_puts_them_on_once() -> None:
    """Each trace put on one more, and the collector of each trace, which is another dict, was to have a journal."""
    plain, compiled = Loop(), Loop()
    step = spmd.compile(compiled.step)
    for rows in (4, 4, 3):
        x = torch.arange(3.0 * rows, dtype=torch.float64).view(rows, 3) / 8
        assert torch.equal(step(x), plain.step(x))
        assert len(compiled.model[0]._forward_hooks) == len(plain.model[0]._forward_hooks) == 1


@contextmanager
def a_hook_on_all_modules(scales: dict[str, float]) -> Iterator[None]:
    def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * scales["of all"]

    handle = nn.modules.module.register_module_forward_hook(scaled)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.usefixtures("alone")
def test_what_a_hook_on_all_modules_reads_compiles_anew() -> None:
    model, scales = make()[0], {"of all": 1.0}
    compiled = spmd.compile(lambda model, x: model(x).sum())
    with a_hook_on_all_modules(scales), torch.no_grad():
        for scales["of all"] in (1.0, 3.0):
            x = torch.ones(2, 3, dtype=torch.float64)
            assert torch.equal(compiled(model, x), model(x).sum())
