"""No stale hit: whatever a trace would read, once it has changed, the call finds no entry."""

from __future__ import annotations

import builtins
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import spmd

from .trainer import FILES, TracedError, Trainer, batch, started
from .trainer import trainer as trainer

pytestmark = pytest.mark.slow

Change = Callable[[dict[str, types.ModuleType], Any, Any, pytest.MonkeyPatch], object]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The entries of the step as it is, for the first call and for those after it."""
    folder = tmp_path_factory.mktemp("entries") / "cache"
    with started(tmp_path_factory.mktemp("files")) as module:
        model, optimizer = module.build()
        step = spmd.compile(module.step, cache=folder)
        for k in range(2):
            step(model, optimizer, *batch(k))
        assert len(list(folder.iterdir())) == 2
    dist.destroy_process_group()
    yield folder


def call(trainer: Trainer, cache: Path, change: Change | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The first call of a process that starts now, after a change; a trace raises ``TracedError``."""
    module = trainer.start()
    model, optimizer = module.build()
    trainer.refuse_traces()
    if change is not None:
        change(trainer.modules, model, optimizer, trainer.monkeypatch)
    result: torch.Tensor = spmd.compile(module.step, cache=cache)(model, optimizer, *(args or batch()), **kwargs)
    return result


@pytest.mark.usefixtures("alone")
def test_a_process_without_a_change_finds_the_entry(trainer: Trainer, cache: Path) -> None:
    call(trainer, cache)


EDITS = {
    "a method of a base class": ("cached_model", "self.second(x) * 2.0", "self.second(x) * 2.5"),
    "a property": ("cached_model", "return 0.25", "return 0.26"),
    "a function of another module": ("cached_helper", "x * slope", "x * slope * 1.5"),
    "a global of another module": ("cached_helper", "SCALE = 0.5", "SCALE = 0.6"),
    "a default": ("cached_helper", "slope=1.0", "slope=1.1"),
    "an imported function": ("cached_helper", "x + 1.0", "x + 1.1"),
    "a global": ("cached_model", "TAU = 0.1", "TAU = 0.2"),
    "a hook": ("cached_model", "output * 1.5", "output * 1.6"),
    "a decorator": ("cached_model", "* 0.5", "* 0.6"),
    "a closure's code": ("cached_model", "x + value", "x - value"),
    "a method by which an object is called": ("cached_model", "x + self.by", "x - self.by"),
    "an optimizer": ("cached_model", "mul_(0.5)", "mul_(0.6)"),
    "the step": ("cached_step", "loss.backward()", "(loss * 2).backward()"),
    "a comment": ("cached_step", "    loss.backward()", "    loss.backward()  # here"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("edit", EDITS)
def test_one_line_is_edited(trainer: Trainer, cache: Path, edit: str) -> None:
    name, before, after = EDITS[edit]
    assert before in FILES[name]
    trainer.write(**{name: FILES[name].replace(before, after, 1)})
    with pytest.raises(TracedError):
        call(trainer, cache)


def _reclassed(model: Any) -> None:
    class Other(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    model.second.__class__ = Other


def _other_config(modules: Any, model: Any) -> None:
    class Other:
        @property
        def alpha(self) -> float:
            return 0.3

    model.config = Other()


def _squash(modules: Any, change: Any) -> None:
    modules["cached_helper"].squash = change


CHANGES: dict[str, Change] = {
    "an attribute of an object": lambda m, model, o, p: setattr(model.config, "alpha", 0.4),
    "an object of another class": lambda m, model, o, p: _other_config(m, model),
    "a global": lambda m, model, o, p: setattr(m["cached_model"], "TAU", 0.2),
    "a global of another module": lambda m, model, o, p: setattr(m["cached_helper"], "SCALE", 0.6),
    "a global of another type": lambda m, model, o, p: setattr(m["cached_model"], "TAU", torch.tensor(0.1)),
    "a function of another module": lambda m, model, o, p: setattr(
        m["cached_helper"], "squash", lambda x, slope=1.0: x
    ),
    "an imported function": lambda m, model, o, p: setattr(m["cached_model"], "offset", lambda x: x),
    "an imported module": lambda m, model, o, p: setattr(m["cached_model"], "cached_helper", m["cached_step"]),
    "a function's code": lambda m, model, o, p: setattr(
        m["cached_helper"].squash, "__code__", (lambda x, slope=1.0: x * slope).__code__
    ),
    "a function's default": lambda m, model, o, p: setattr(m["cached_helper"].squash, "__defaults__", (2.0,)),
    "arguments of a partial": lambda m, model, o, p: setattr(
        model, "act", functools.partial(m["cached_helper"].squash, slope=0.4)
    ),
    "a closure": lambda m, model, o, p: setattr(model, "bias", m["cached_model"].make_bias(0.5)),
    "a cell": lambda m, model, o, p: setattr(model.bias.__closure__[0], "cell_contents", 0.5),
    "a decorated function": lambda m, model, o, p: setattr(
        m["cached_model"].Net.scaled.__closure__[0], "cell_contents", lambda self, x: x
    ),
    "an object that is called": lambda m, model, o, p: setattr(model.shift, "by", 1.0),
    "how an object is called": lambda m, model, o, p: setattr(m["cached_model"].Shift, "__call__", lambda self, x: x),
    "an entry of a list": lambda m, model, o, p: model.levels.__setitem__(0, 0.75),
    "the length of a list": lambda m, model, o, p: model.levels.append(0.0),
    "a constant tensor": lambda m, model, o, p: setattr(model, "mask", torch.zeros(8)),
    "an element of a constant tensor": lambda m, model, o, p: model.mask.__setitem__(3, 2.0),
    "an attribute of one of torch's modules": lambda m, model, o, p: setattr(model.drop, "p", 0.5),
    "a method of an instance": lambda m, model, o, p: setattr(model, "head", lambda x: x[:, :2]),
    "forward of an instance": lambda m, model, o, p: setattr(model, "forward", lambda x: x[:, :2]),
    "forward of a class": lambda m, model, o, p: setattr(m["cached_model"].Net, "forward", lambda self, x: x[:, :2]),
    "a method of a base class": lambda m, model, o, p: setattr(
        m["cached_model"].Base, "head", lambda self, x: x[:, :2]
    ),
    "a property": lambda m, model, o, p: setattr(m["cached_model"].Base, "gain", property(lambda self: 1.0)),
    "an entry of the class in front of its base's": lambda m, model, o, p: setattr(m["cached_model"].Net, "gain", 1.0),
    "the class of a submodule": lambda m, model, o, p: _reclassed(model),
    "another submodule": lambda m, model, o, p: setattr(model, "second", nn.Sequential(model.second)),
    "a submodule under two names": lambda m, model, o, p: setattr(model, "third", model.second),
    "a parameter under two names": lambda m, model, o, p: model.drop.register_parameter("scale", model.second.bias),
    "one more hook": lambda m, model, o, p: model.register_forward_hook(lambda module, args, out: out * 2),
    "a hook before": lambda m, model, o, p: model.first.register_forward_pre_hook(lambda module, args: None),
    "a hook on a parameter": lambda m, model, o, p: model.first.weight.register_hook(lambda g: g * 2),
    "an attribute of a parameter": lambda m, model, o, p: setattr(model.first.weight, "gain", 2.0),
    "evaluation": lambda m, model, o, p: model.eval(),
    "evaluation of a submodule": lambda m, model, o, p: model.drop.eval(),
    "a frozen parameter": lambda m, model, o, p: model.first.weight.requires_grad_(False),
    "a gradient": lambda m, model, o, p: setattr(model.first.weight, "grad", torch.ones(8, 4).double()),
    "a flag of a group": lambda m, model, o, p: o.param_groups[0].update(maximize=True),
    "an order of parameters": lambda m, model, o, p: o.param_groups[0]["params"].reverse(),
    "step of an optimizer": lambda m, model, o, p: setattr(o, "step", lambda: None),
    "step of an optimizer's class": lambda m, model, o, p: setattr(
        m["cached_model"].Slow, "step", torch.optim.SGD.step
    ),
    "a hook of an optimizer": lambda m, model, o, p: o.register_step_pre_hook(lambda *_: None),
    "state of an optimizer": lambda m, model, o, p: o.state[model.first.weight].update(count=1),
    "one of torch's functions": lambda m, model, o, p: p.setattr(F, "gelu", F.relu),
    "one of Python's functions": lambda m, model, o, p: p.setattr(math, "sqrt", lambda x: x**0.5),
    "another function for torch's": lambda m, model, o, p: p.setattr(F, "gelu", lambda x: x),
    "a callable for torch's": lambda m, model, o, p: p.setattr(
        F, "gelu", functools.partial(F.gelu, approximate="tanh")
    ),
    "a function made in C": lambda m, model, o, p: p.setattr(torch, "tanh", torch.sin),
    "a method of torch's modules": lambda m, model, o, p: p.setattr(nn.Linear, "forward", lambda self, x: x),
    "a method of tensors": lambda m, model, o, p: p.setattr(torch.Tensor, "__add__", torch.Tensor.__sub__),
    "another module in the place of torch's": lambda m, model, o, p: p.setitem(
        sys.modules, "torch.nn.modules.linear", types.ModuleType("torch.nn.modules.linear")
    ),
    "the optimizer's function": lambda m, model, o, p: p.setattr(
        sys.modules["torch.optim.sgd"], "sgd", torch.optim.SGD
    ),
    "a builtin": lambda m, model, o, p: p.setattr(builtins, "sum", functools.partial(sum)),
    "the version of torch": lambda m, model, o, p: p.setattr(torch, "__version__", "2.12.0"),
    "the version of Python": lambda m, model, o, p: p.setattr(sys, "version", "3.13.1"),
    "the processor": lambda m, model, o, p: p.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"),
    "the number of threads": lambda m, model, o, p: p.setattr(torch, "get_num_threads", lambda: 7),
    "attention": lambda m, model, o, p: p.setattr(torch.backends.cuda, "math_sdp_enabled", lambda: False),
    "a variable that torch reads": lambda m, model, o, p: p.setenv("TORCH_SOMETHING", "1"),
    "the default dtype": lambda m, model, o, p: p.setattr(torch, "get_default_dtype", lambda: torch.float64),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("change", CHANGES)
def test_something_that_the_trace_would_read_has_changed(trainer: Trainer, cache: Path, change: str) -> None:
    with pytest.raises(TracedError):
        call(trainer, cache, CHANGES[change])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(5, 4).double(), torch.ones(5, 2).double()), {}),
        ((torch.ones(6, 4), torch.ones(6, 2)), {}),
        ((torch.ones(6, 4).double().requires_grad_(), torch.ones(6, 2).double()), {}),
        ((), {"reduction": "sum"}),
        ((), {"smoothing": 0}),
    ],
)
def test_other_arguments(trainer: Trainer, cache: Path, args: Any, kwargs: Any) -> None:
    with pytest.raises(TracedError):
        call(trainer, cache, None, *args, **kwargs)
