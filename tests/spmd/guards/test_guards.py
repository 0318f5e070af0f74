"""A call runs a program only while all holds that its trace took for granted; the same call never compiles again.

Each change is made between two calls of a compiled step and of the plain one; both must agree after it, a program must
have been added, and the call after it must add none.
"""

from __future__ import annotations

import argparse
import enum
import gc
import math
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import spmd
from passes.runtime.segments import allocate_segment

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]

SCALE = 1.0
SETTINGS = types.SimpleNamespace(scale=1.0)
ARGS = argparse.Namespace(scale=1.0)
TABLE = {"scale": 1.0}
loss_function = F.mse_loss
criterion = nn.SmoothL1Loss(beta=1.0)


class Config:
    """A settings object of a model."""

    def __init__(self) -> None:
        self.scale, self.nested, self.unread = 1.0, {"powers": [1.0, 2.0]}, 0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Model(nn.Module):
    """Reads plain values of many kinds in its forward."""

    power = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.0))
        self.outer = nn.Linear(4, 2)
        self.scale, self.unread, self.config, self.slotted = 1.0, 0, Config(), Slotted()
        self.activation: Callable[[Tensor], Tensor] = torch.sigmoid
        self.scales = [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) * self.scale * self.config.scale * self.slotted.scale
        h = self.activation(h) ** self.power
        for scale in (*self.scales, *self.config.nested["powers"]):
            h = h * scale
        return self.outer(h)


def helper(x: Tensor) -> Tensor:
    return x * SCALE * SETTINGS.scale * ARGS.scale * TABLE["scale"]


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    out = helper(model(x))
    loss = loss_function(out, y) + criterion(out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass
class Twins:
    """The compiled step and the plain one, each with a model and an optimizer, on the same batch."""

    step: Any = step

    def __post_init__(self) -> None:
        self.compiled = spmd.compile(self.step)
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            model = Model().double()
            self.models.append(model)
            self.optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        self.batch = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)

    def check(self, added: int, after: str = "nothing") -> None:
        """One call of each: the same numbers, and so many programs more."""
        before = len(self.compiled.programs)
        got = self.compiled(self.models[0], self.optimizers[0], *self.batch)
        want = self.step(self.models[1], self.optimizers[1], *self.batch)
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-13, msg=lambda text: f"{after}: {text}")
        for a, b in zip(self.models[0].parameters(), self.models[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=lambda text: f"{after}: {text}")
        assert len(self.compiled.programs) - before == added, f"after {after}"


def _set(name: str, value: Any) -> Callable[[Model, Any], None]:
    """``model.<name> = value``."""

    def change(model: Model, optimizer: Any) -> None:
        *path, last = name.split(".")
        owner: Any = model
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)

    return change


def _double_gradient(gradient: Tensor) -> Tensor:
    return 2 * gradient


def _double_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


CHANGES: dict[str, Callable[[Model, Any], Any]] = {
    "an attribute": _set("scale", 0.5),
    "an attribute of a settings object": _set("config.scale", 0.5),
    "another settings object": lambda m, o: setattr(m, "config", _config(0.5)),
    "an entry in a list of it": lambda m, o: m.config.nested["powers"].append(3.0),
    "a slot": _set("slotted.scale", 0.5),
    "an entry of a list": lambda m, o: m.scales.__setitem__(0, 3.0),
    "another list": _set("scales", [3.0]),
    "a function": _set("activation", torch.tanh),
    "an attribute over that of the class": _set("power", 3.0),
    "a submodule": lambda m, o: setattr(m.inner, "1", nn.ReLU()),
    "a submodule more": lambda m, o: m.inner.append(nn.Tanh()),
    "a submodule less": lambda m, o: m.inner.__delitem__(1),
    "submodules in another order": lambda m, o: m.inner.insert(0, m.inner.pop(1)),
    "a forward hook": lambda m, o: m.inner.register_forward_hook(lambda module, args, out: 2 * out),
    "a forward pre-hook": lambda m, o: m.inner.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "a backward hook": lambda m, o: m.inner.register_full_backward_hook(
        lambda module, grad_in, grad_out: tuple(None if g is None else 2 * g for g in grad_in)
    ),
    "a parameter's hook": lambda m, o: m.outer.weight.register_hook(_double_gradient),
    "a parameter's later hook": lambda m, o: m.outer.weight.register_post_accumulate_grad_hook(
        lambda p: _double_in_place(p)
    ),
    "an optimizer's hook": lambda m, o: o.register_step_pre_hook(
        lambda optimizer, args, kwargs: _double_in_place(m.outer.weight)
    ),
    "eval": lambda m, o: m.eval(),
    "eval of one module": lambda m, o: m.inner[2].eval(),
    "a dropout's rate in eval": lambda m, o: (m.eval(), setattr(m.inner[2], "p", 0.5)),
    "a frozen parameter": lambda m, o: m.outer.bias.requires_grad_(False),
    "a flag of a group": lambda m, o: o.param_groups[0].update(nesterov=True),
    "a hyper-parameter that becomes zero": lambda m, o: o.param_groups[0].update(momentum=0.0),
    "a parameter taken from its group": lambda m, o: o.param_groups[0]["params"].pop().requires_grad_(False),
    "the sign of zero": _set("scale", -0.0),
    "a forward of one's own": lambda m, o: setattr(m.inner, "forward", lambda x: m.inner[0](x).tanh() * 2),
}


def _config(scale: float) -> Config:
    config = Config()
    config.scale = scale
    return config


# Four in a row, of unlike kinds, so that a compile serves as what comes after one change and before the next.
@pytest.mark.parametrize("names", [[*CHANGES][k::7] for k in range(7)], ids=", ".join)
def test_each_change_of_what_the_step_reads_compiles_anew(names: list[str]) -> None:
    twins = Twins()
    for added in (1, 0):
        twins.check(added)
    for name in names:
        for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
            CHANGES[name](model, optimizer)
        twins.check(1, name)
        twins.check(0, name)


def test_state_that_the_step_does_not_read_may_change() -> None:
    twins = Twins()
    for added in (1, 0):
        twins.check(added)
    for k, model in enumerate(twins.models):
        model.unread, model.config.unread, model.new = k + 7, k + 7, torch.ones(3)
        model.scales = model.scales  # the same list
        model.scale = float("1.0")  # another object, the same value
        twins.optimizers[k].note = "never read"
    twins.check(0)


@pytest.mark.filterwarnings("ignore:step ")  # of how many programs there are
def test_each_changed_global_or_attribute_of_one_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    twins, globals_of = Twins(), sys.modules[__name__]
    for added in (1, 0):
        twins.check(added)
    changes: list[tuple[Any, str, Any]] = [
        (SETTINGS, "scale", 0.5),
        (ARGS, "scale", 0.5),
        (criterion, "beta", 0.5),
        (globals_of, "SCALE", 0.5),
        (globals_of, "SETTINGS", types.SimpleNamespace(scale=0.25)),
        (globals_of, "TABLE", {"scale": 0.5}),
        (globals_of, "loss_function", F.l1_loss),
        (globals_of, "criterion", nn.SmoothL1Loss(beta=0.1)),
        (globals_of, "helper", lambda x: x * 0.5),
    ]
    for holder, name, value in changes:
        monkeypatch.setattr(holder, name, value)
        twins.check(1, name)
        twins.check(0, name)


COLLECTIONS = 0


def count_collections(phase: str, info: dict[str, int]) -> None:
    """What runs whenever Python collects garbage, such as a tool's clock."""
    global COLLECTIONS
    COLLECTIONS += 1


def collecting(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    gc.collect()
    return step(model, optimizer, x, y)


def test_callbacks_of_the_garbage_collector_are_not_guarded() -> None:
    twins = Twins(collecting)
    gc.callbacks.append(count_collections)
    try:
        twins.check(1)
    finally:
        gc.callbacks.remove(count_collections)
    assert COLLECTIONS


def test_finalizers_of_shared_memory_are_not_guarded() -> None:
    twins = Twins(collecting)
    gc.disable()  # so that it is collected in the step
    try:
        for added in (1, 0):
            garbage: list[Any] = [allocate_segment(8)]
            garbage.append(garbage)
            del garbage
            twins.check(added)
    finally:
        gc.enable()


def test_settings_that_the_garbage_collector_froze_are_guarded() -> None:
    twins = Twins()
    gc.freeze()
    twins.check(1)
    for model in twins.models:
        model.scales[0], model.config.scale = 3.0, 0.5
    twins.check(1)
    twins.check(0)


def test_a_changed_method_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    for added in (1, 0):
        twins.check(added)
    monkeypatch.setattr(Model, "forward", lambda self, x: self.outer(self.inner(x)))
    twins.check(1)
    twins.check(0)


def test_a_changed_class_attribute_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    for added in (1, 0):
        twins.check(added)
    monkeypatch.setattr(Model, "power", 3.0)
    twins.check(1)


def test_a_changed_closure_compiles_anew() -> None:
    scale = 1.0

    def scaled(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(model, optimizer, scale * x, y)

    twins = Twins(scaled)
    for added in (1, 0):
        twins.check(added)
    scale = 0.5
    twins.check(1)
    twins.check(0)


def test_several_programs_are_kept() -> None:
    twins = Twins()
    for added in (1, 0):
        twins.check(added)
    for training in (False, True, False, True):
        for model in twins.models:
            model.train(training)
        twins.check(1 if not training and len(twins.compiled.programs) == 1 else 0)


class Kind(enum.Enum):
    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True)
class Frozen:
    scale: float


@pytest.mark.parametrize(
    "first, same, other",
    [
        (1, 1, 2),
        (1, int("1"), True),
        (math.nan, float("nan"), 1.0),
        ("sum", "".join(["su", "m"]), "mean"),
        (None, None, 0),
        ((1, 2.0), (1, 2.0), (1, 2)),
        (Kind.SUM, Kind("sum"), Kind.MEAN),
        (Frozen(True), Frozen(True), Frozen(False)),
        (torch.float32, torch.float32, torch.float64),
        ([1, {"a": 2}], [1, {"a": 2}], [1, {"a": 3}]),
    ],
    ids=repr,
)
def test_python_values_among_the_arguments(first: Any, same: Any, other: Any) -> None:
    compiled = spmd.compile(lambda x, value: (x + 1, value))
    x = torch.ones(3)
    compiled(x, first)
    compiled(x, same)
    assert len(compiled.programs) == 1
    assert repr(compiled(x, other)[1]) == repr(other)
    assert len(compiled.programs) == 2
    assert repr(compiled(x, first)[1]) == repr(first)
    assert len(compiled.programs) == 2


@pytest.mark.parametrize("first, other", [(0.0, -0.0), (0.5, 2.5), (Frozen(1.0), Frozen(2.0))], ids=repr)
def test_floats_among_the_arguments_are_read_at_each_call(first: Any, other: Any) -> None:
    compiled = spmd.compile(lambda x, value: (x + 1, value))
    for value in (first, other, first):
        assert repr(compiled(torch.ones(3), value)[1]) == repr(value)
    assert len(compiled.programs) == 1


def test_floats_of_numpy_among_the_arguments_are_read_at_each_call() -> None:
    x = torch.arange(3.0, dtype=torch.float64)
    compiled, asked = spmd.compile(lambda x, m: x * m + (1 - m)), spmd.compile(lambda x, m: x * m.item())
    for m in np.linspace(0.9, 1.0, 3):
        torch.testing.assert_close(compiled(x, m), x * m + (1 - m), rtol=1e-15, atol=0)
        torch.testing.assert_close(asked(x, m), x * m, rtol=1e-15, atol=0)
    assert (len(compiled.programs), len(asked.programs)) == (1, 3)


def test_an_object_among_the_arguments_is_followed() -> None:
    config = Config()
    compiled = spmd.compile(lambda x, config: x * config.scale * config.nested["powers"][0])
    x = torch.ones(3)
    assert compiled(x, config)[0] == 1
    config.scale = 2.0
    assert compiled(x, config)[0] == 2
    config.nested["powers"][0] = 3.0
    assert compiled(x, config)[0] == 6
    config.unread = 5
    compiled(x, config)
    assert len(compiled.programs) == 3


@pytest.mark.parametrize("change", [lambda x: x[:2], lambda x: x.float(), lambda x: x.requires_grad_(), nn.Parameter])
def test_tensors_of_another_spec_compile_anew(change: Callable[[Tensor], Tensor]) -> None:
    compiled = spmd.compile(lambda x: x.detach() * 2)
    compiled(torch.ones(3, dtype=torch.float64))
    x = change(torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(compiled(x), x.detach() * 2)
    assert len(compiled.programs) == 2


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "autocast"],
)
def test_torch_settings_around_the_call_compile_anew(mode: Callable[[], Any]) -> None:
    def forward(model: nn.Module, x: Tensor) -> tuple[Tensor, bool]:
        out = model(x)
        return out.detach(), out.requires_grad

    compiled, model, x = spmd.compile(forward), nn.Linear(3, 4), torch.ones(2, 3)
    compiled(model, x)
    with mode():
        got, want = compiled(model, x), forward(model, x)
    assert got[1] == want[1] and got[0].dtype == want[0].dtype
    assert len(compiled.programs) == 2


def test_a_parameter_moved_through_data_compiles_anew() -> None:
    model, x = nn.Linear(3, 4), torch.ones(2, 3)
    compiled = spmd.compile(lambda model, x: model(x).detach())
    compiled(model, x)
    model.double()
    assert compiled(model, x.double()).dtype == torch.float64
    assert len(compiled.programs) == 2


def test_a_parameter_or_buffer_that_is_taken_away_compiles_anew() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), torch.ones(2, 3)
    compiled = spmd.compile(lambda model, x: model(x).detach())
    for holder, key in ((model[0], "bias"), (model[1], "num_batches_tracked"), (model[1], "weight")):
        compiled(model, x)
        setattr(holder, key, None)
        torch.testing.assert_close(compiled(model, x), model(x).detach())
    assert len(compiled.programs) == 4


def test_a_state_tensor_passed_as_a_batch_compiles_anew() -> None:
    model = nn.Linear(3, 3, bias=False)
    compiled = spmd.compile(lambda model, x: (model(x).detach(), x is model.weight))
    compiled(model, nn.Parameter(torch.ones(3, 3)))
    assert compiled(model, model.weight)[1] is True
    assert len(compiled.programs) == 2


def test_another_model_compiles_anew_and_a_dead_one_is_released() -> None:
    compiled, x = spmd.compile(lambda model, x: model(x).detach()), torch.ones(2, 3)
    first, second = nn.Linear(3, 4), nn.Linear(3, 4)
    for model in (first, second, first, second):
        torch.testing.assert_close(compiled(model, x), model(x).detach())
    assert len(compiled.programs) == 2
    gone = weakref.ref(first.weight)
    del first, model
    gc.collect()
    assert gone() is None
    third = nn.Linear(3, 4)
    torch.testing.assert_close(compiled(third, x), third(x).detach())


def test_a_trained_model_is_released() -> None:
    compiled, x = spmd.compile(step), torch.ones(4, 3)
    model = nn.Linear(3, 2)
    compiled(model, torch.optim.SGD(model.parameters()), x, torch.ones(4, 2))
    gone = weakref.ref(model.weight)
    del model
    gc.collect()
    assert gone() is None


def test_the_eighth_program_warns_and_names_what_changes() -> None:
    compiled = spmd.compile(lambda x, step_number: x + int(step_number))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(7):
            compiled(torch.ones(3), str(k))
    with pytest.warns(UserWarning, match=r"8 programs.*step_number: '6' -> '7'.*as a tensor"):
        compiled(torch.ones(3), "7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.ones(3), "8")


def test_nothing_stays_patched() -> None:
    before = sys.gettrace()
    twins = Twins()
    twins.check(1)
    assert sys.gettrace() is before
    for kind in (nn.Module, torch.optim.Optimizer, Config, argparse.Namespace):
        assert "__getattribute__" not in vars(kind)


def test_a_trace_function_of_the_user_s_still_sees_calls() -> None:
    seen = set()

    def trace(frame: Any, event: str, argument: Any) -> None:
        seen.add(frame.f_code.co_name)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        Twins().check(1)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert "helper" in seen


COLUMNS = 3


@torch.library.custom_op("guards::widened", mutates_args=())
def widened(x: Tensor) -> Tensor:
    return x.new_ones(len(x), COLUMNS)


@widened.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(len(x), COLUMNS)


def test_globals_read_by_the_shape_function_of_a_user_s_op_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for inside of torch, where nothing else of the user's runs."""
    compiled = spmd.compile(lambda x: widened(x).sum())
    assert compiled(torch.ones(2, 3)) == 6
    monkeypatch.setitem(globals(), "COLUMNS", 4)
    assert compiled(torch.ones(2, 3)) == 8 and len(compiled.programs) == 2


LOG: list[Any] = []
COUNT = 0


def test_lists_that_the_step_appends_to_and_reads_are_refused_with_their_lines() -> None:
    seen: list[Tensor] = []

    def logging(model: nn.Module, x: Tensor) -> Tensor:
        last: Tensor = model(x)
        seen.append(last)
        return last.sum() * len(seen)

    def logging_globally(model: nn.Module, x: Tensor) -> Tensor:
        LOG.append(model(x))
        return x.sum() + LOG[0]

    for step, words in (
        (logging, r"variable seen .*: seen\.append.*reads them at .*len\(seen\)"),
        (logging_globally, r"global LOG .*: LOG\.append.*reads them at .*LOG\[0\]"),
    ):
        with pytest.raises(spmd.CaptureError, match=rf"entries of the .*{words}.*Return the value"):
            spmd.compile(step)(nn.Linear(3, 4), torch.ones(2, 3))
    assert (LOG, seen) == ([], [])


def test_globals_and_closure_variables_that_the_step_changes_are_written_at_each_call() -> None:
    last = None

    def counting(x: Tensor) -> Tensor:
        global COUNT
        nonlocal last
        COUNT += 1
        last = x.sum() + COUNT
        return x * COUNT

    compiled = spmd.compile(counting)
    for k in range(1, 5):
        assert torch.equal(compiled(torch.full((2,), float(k))), torch.full((2,), float(k * k)))
        assert (COUNT, float(last)) == (k, 3.0 * k)  # type: ignore[arg-type]
    assert len(compiled.programs) == 2  # in the first call there is no last


def test_changes_of_a_step_that_raises_are_undone() -> None:
    seen: list[Tensor] = []

    def failing(model: nn.Module, config: Config, x: Tensor) -> Tensor:
        seen.append(model(x) * config.scale)
        config.nested["powers"].append(seen[0])
        raise ValueError("the user's own")

    config, before = Config(), sys.gettrace()
    with pytest.raises(ValueError, match="the user's own"):
        spmd.compile(failing)(nn.Linear(3, 4), config, torch.ones(2, 3))
    assert seen == [] and config.nested["powers"] == [1.0, 2.0] and sys.gettrace() is before
    assert all("__getattribute__" not in vars(kind) for kind in (nn.Module, torch.optim.Optimizer, Config))


def test_a_compiled_step_called_by_another_is_a_part_of_it() -> None:
    @spmd.compile
    def inner(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    @spmd.compile
    def outer(model: nn.Module, x: Tensor) -> Tensor:
        return 2 * inner(model, x)

    model, x = nn.Linear(3, 4), torch.ones(2, 3)
    torch.testing.assert_close(outer(model, x), 2 * model(x).sum())
    assert len(outer.programs) == 1 and not inner.programs


class Scaling(TorchFunctionMode):
    """Multiplies what ``linear`` returns."""

    factor = 2.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is F.linear else result


def test_a_function_mode_around_the_call_counts() -> None:
    step = spmd.compile(lambda model, x: model(x).sum())
    model, x, mode = nn.Linear(3, 4).double(), torch.ones(2, 3, dtype=torch.float64), Scaling()
    for factor in (None, 2.0, None, 3.0):
        mode.factor = factor or 0.0
        with mode if factor else nullcontext():
            torch.testing.assert_close(step(model, x), model(x).sum().detach())
    assert len(step.programs) == 3
    with (other := Scaling()):
        other.factor = 3.0
        torch.testing.assert_close(step(model, x), model(x).sum().detach())
    assert len(step.programs) == 3  # another object of the class, with the same attributes
