"""A train step in files of its own, which tests edit and import again, as another process would."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from spmd import capture_call

HELPER = """
import torch

SCALE = 0.5


def squash(x, slope=1.0):
    return torch.tanh(x * slope)


def offset(x):
    return x + 1.0
"""

MODEL = """
import functools

import torch
from torch import nn
from torch.nn import functional as F

import cached_helper
from cached_helper import offset

TAU = 0.1


class Base(nn.Module):
    width = 8

    def head(self, x):
        return self.second(x) * 2.0

    @property
    def gain(self):
        return 0.25


class Config:
    def __init__(self, alpha=0.3):
        self.alpha = alpha


class Shift:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x + self.by


def halved(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * 0.5

    return wrapper


def make_bias(value):
    def bias(x):
        return x + value

    return bias


def hook(module, args, output):
    return output * 1.5


class Net(Base):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, self.width), nn.Linear(8, 2)
        self.config = Config()
        self.act = functools.partial(cached_helper.squash, slope=0.5)
        self.bias = make_bias(0.125)
        self.shift = Shift(0.75)
        self.levels = [0.5, 0.25]
        self.mask = torch.ones(8)
        self.drop = nn.Dropout(0.0)
        self.register_forward_hook(hook)

    @halved
    def scaled(self, x):
        return x * self.config.alpha

    def forward(self, x):
        x = cached_helper.squash(self.first(x), 0.7)
        x = self.act(x) + TAU * cached_helper.SCALE
        x = self.scaled(self.bias(offset(x))) * self.gain + sum(self.levels)
        return self.head(self.drop(F.gelu(self.shift(x) * self.mask)))


class Slow(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step()
"""

STEP = """
import torch
from torch.nn import functional as F

from cached_model import Net, Slow


def step(model, optimizer, x, y, smoothing=0.1, reduction="mean"):
    loss = F.mse_loss(model(x), y, reduction=reduction) * (1.0 - smoothing)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def build():
    torch.manual_seed(0)
    model = Net().double()
    return model, Slow(model.parameters(), lr=0.05, momentum=0.9)
"""
FILES = {"cached_helper": HELPER, "cached_model": MODEL, "cached_step": STEP}


class TracedError(Exception):
    """Raised in place of a trace."""


@dataclass
class Trainer:
    """The three files in a folder, and the modules of the process that is simulated now."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    modules: dict[str, ModuleType] = field(default_factory=dict)

    def write(self, **texts: str) -> None:
        for name, text in {**FILES, **texts}.items():
            (self.folder / f"{name}.py").write_text(text)

    def start(self) -> ModuleType:
        """Import the files, as a process that starts now; returns the step's module."""
        importlib.invalidate_caches()
        for name in FILES:
            sys.modules.pop(name, None)
        self.modules = {name: importlib.import_module(name) for name in FILES}
        return self.modules["cached_step"]

    def count_traces(self) -> list[Any]:
        """A list that grows by one with each trace."""
        traces: list[Any] = []
        original = capture_call.capture
        self.monkeypatch.setattr(capture_call, "capture", lambda *given: (traces.append(None), original(*given))[1])
        return traces

    def refuse_traces(self) -> None:
        """Let each trace raise ``TracedError``: the call found no entry."""

        def capture(*_: Any) -> Any:
            raise TracedError

        self.monkeypatch.setattr(capture_call, "capture", capture)


@contextmanager
def started(folder: Path) -> Iterator[ModuleType]:
    """The files in ``folder``, imported for the length of the context; the step's module."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change within a second
        made = Trainer(folder, monkeypatch)
        made.write()
        yield made.start()
    for name in FILES:
        sys.modules.pop(name, None)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change within a second
    made = Trainer(tmp_path, monkeypatch)
    made.write()
    yield made
    for name in FILES:
        sys.modules.pop(name, None)


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return tuple(torch.randn(6, n, generator=random, dtype=torch.float64) for n in (4, 2))  # type: ignore[return-value]
