"""Settings that are neither attributes of an object nor globals: those of classes, modules and functions, and more.

Each is changed between two calls; the compiled step must compile anew and then do what the plain one does.
"""

from __future__ import annotations

import argparse
import copy
import pickle
import sys
import types
from collections import UserDict, deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]

settings = types.ModuleType("settings_of_the_user")
arguments, namespace, read_by_name = argparse.Namespace(), types.SimpleNamespace(), 1.0
recent, user_dict = deque([1.0, 2.0], maxlen=2), UserDict(scale=1.0)
dropout, chain = nn.Dropout(1.0).eval(), nn.Sequential(nn.Tanh())


class Table:
    """Settings as attributes of a class."""

    scale, powers = 1.0, {"powers": [1.0]}

    @classmethod
    def scaled(cls) -> float:
        return cls.scale

    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return 2 * x


class Heir(Table):
    scale = 2.0

    def own(self) -> float:
        return type(self).scale

    def inherited(self) -> float:
        return super().scale


class Called:
    """Operators, an attribute of a base, and one that is not there."""

    factor = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * len(self)

    def __len__(self) -> int:
        return 2


class Layer(nn.Module):
    """Inherits ``__call__``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class HeirOfAll(Called):
    """Has nothing of its own."""


class Another(Called):
    """Does otherwise what its base does."""

    def __len__(self) -> int:
        return 3


called, layer = HeirOfAll(), Layer()


class Hidden:
    """Finds its attributes for itself."""

    def __init__(self) -> None:
        self.fields = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["fields"][name]


class Named:
    """Equal to all of its name."""

    def __init__(self, scale: float) -> None:
        self.name, self.scale = "name", scale

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


heir, hidden = Heir(), Hidden()


def helper(x: Tensor, factor: float = 1.0) -> Tensor:
    return x * factor * helper.scale  # type: ignore[attr-defined]


def importing(x: Tensor) -> Tensor:
    from settings_of_the_user import scale  # type: ignore[import-not-found]

    return x * scale


def renaming(x: Tensor) -> Tensor:
    chosen = settings
    return x * chosen.scale


Step = Callable[[Tensor], Tensor]
CHANGES: dict[str, tuple[Step, Callable[[pytest.MonkeyPatch], None]]] = {
    "an attribute of a class": (lambda x: x * Table.scale, lambda m: m.setattr(Table, "scale", 0.5)),
    "one found by its name": (lambda x: x * getattr(Table, "scale"), lambda m: m.setattr(Table, "scale", 0.5)),  # noqa: B009
    "one of a class method's": (lambda x: x * heir.scaled(), lambda m: m.setattr(Heir, "scale", 0.5)),
    "one read off type()": (lambda x: x * heir.own(), lambda m: m.setattr(Heir, "scale", 0.5)),
    "one read off super()": (lambda x: x * heir.inherited(), lambda m: m.setattr(Table, "scale", 0.5)),
    "the class that an operator calls": (lambda x: called(x), lambda m: m.setattr(Called, "__len__", lambda self: 3)),
    "an operator before a base's": (
        lambda x: layer(x),
        lambda m: m.setattr(Layer, "__call__", lambda self, x: x + 2, raising=False),
    ),
    "the class of an object": (lambda x: called(x), lambda m: m.setattr(called, "__class__", Another)),
    "an attribute before a base's": (
        lambda x: x * called.factor,
        lambda m: m.setattr(HeirOfAll, "factor", 3.0, raising=False),
    ),
    "one that was not there": (
        lambda x: x * getattr(heir, "power", 1.0),
        lambda m: m.setattr(Heir, "power", 3.0, raising=False),
    ),
    "one that settings had not": (
        lambda x: x * getattr(arguments, "scale", 1.0),
        lambda m: m.setattr(arguments, "scale", 0.5, raising=False),
    ),
    "one that a namespace had not": (
        lambda x: x * 2 if hasattr(namespace, "scale") else x,
        lambda m: m.setattr(namespace, "scale", 0.5, raising=False),
    ),
    "a global read off globals()": (
        lambda x: x * globals()["read_by_name"],
        lambda m: m.setitem(globals(), "read_by_name", 0.5),
    ),
    "a container of a class": (
        lambda x: x * Table.powers["powers"][0],
        lambda m: m.setitem(Table.powers, "powers", [3]),
    ),
    "a static method": (lambda x: heir.twice(x), lambda m: m.setattr(Table, "twice", staticmethod(lambda x: 3 * x))),
    "a field read off __dict__": (lambda x: x * hidden.scale, lambda m: m.setitem(hidden.fields, "scale", 0.5)),
    "a module imported within": (importing, lambda m: m.setattr(settings, "scale", 0.5)),
    "a module by another name": (renaming, lambda m: m.setattr(settings, "scale", 0.5)),
    "an attribute of a function": (lambda x: helper(x), lambda m: m.setattr(helper, "scale", 0.5)),
    "a default of a function": (lambda x: helper(x), lambda m: m.setattr(helper, "__defaults__", (0.5,))),
    "a function's code": (
        lambda x: helper(x),
        lambda m: m.setattr(helper, "__code__", (lambda x, factor: -x).__code__),
    ),
    "a deque": (lambda x: x * recent[0], lambda m: recent.append(3.0)),
    "a UserDict": (lambda x: x * user_dict["scale"], lambda m: m.setitem(user_dict, "scale", 0.5)),
    "the mode of a module that is global": (lambda x: dropout(x), lambda m: m.setattr(dropout, "training", True)),
    "a submodule of one": (lambda x: chain(x), lambda m: m.setitem(chain._modules, "0", nn.ReLU())),
}


@pytest.fixture(autouse=True)
def _as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    monkeypatch.setattr(settings, "scale", 1.0, raising=False)
    monkeypatch.setattr(helper, "scale", 1.0, raising=False)


# One step reads all settings of a row; no two of them look at the same value, so that each guards it for itself.
SECOND, THIRD = ("one found by its name", "one read off type()", "a module by another name"), ("one read off super()",)
ROWS = [[name for name in CHANGES if name not in SECOND + THIRD], SECOND, THIRD]


def test_every_setting_is_changed() -> None:
    assert sorted(name for row in ROWS for name in row) == sorted(CHANGES)


@pytest.mark.filterwarnings("ignore:.*has compiled 8 programs.*:UserWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_changed_setting_compiles_anew(row: list[str]) -> None:
    """And where it is changed back, the program from before runs."""

    def step(x: Tensor) -> list[Tensor]:
        return [CHANGES[name][0](x) for name in row]

    def check(programs: int) -> None:
        for got, expected in zip(compiled(x), step(x), strict=True):
            assert torch.equal(got, expected)
        assert len(compiled.programs) == programs

    compiled, x = spmd.compile(step), torch.arange(6.0)
    check(programs=1)
    for programs, name in enumerate(row, start=2):
        function, change = CHANGES[name]
        with pytest.MonkeyPatch.context() as patched:
            before = function(x)
            change(patched)
            assert not torch.equal(function(x), before)
            check(programs)
            check(programs)
        check(programs)


def test_a_class_attribute_that_no_code_names_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = spmd.compile(lambda x: x * Table.scale)
    compiled(torch.ones(3))
    monkeypatch.setattr(Table, "calls", 1, raising=False)
    compiled(torch.ones(3))
    assert len(compiled.programs) == 1


def test_an_argument_that_is_equal_but_holds_something_else_compiles_anew() -> None:
    compiled = spmd.compile(lambda x, named: x * named.scale)
    for scale, programs in ((1.0, 1), (1.0, 1), (2.0, 2)):
        assert torch.equal(compiled(torch.ones(3), Named(scale)), torch.ones(3) * scale)
        assert len(compiled.programs) == programs


def test_one_tensor_in_two_places_is_one_in_the_step() -> None:
    compiled, x, y = spmd.compile(lambda x, y: x * 2 if x is y else x * 3), torch.ones(2), torch.ones(2)
    assert [compiled(*given).tolist()[0] for given in ((x, y), (x, x), (y, x), (y, y))] == [3, 2, 3, 2]
    assert len(compiled.programs) == 2
    layer = nn.Linear(2, 2)
    compiled = spmd.compile(lambda model, weight, x: model(x).sum() + weight.sum())
    for _ in range(3):
        compiled(layer, layer.weight, x)
    assert len(compiled.programs) == 1


def test_strides_that_a_step_asks_for_are_those_of_contiguous_arguments() -> None:
    compiled, x = spmd.compile(lambda x: x * 2 if x.is_contiguous() else x * 3), torch.ones(3, 3)
    assert compiled(x).sum() == 18
    with pytest.raises(spmd.CaptureError, match=r"its argument x has strides \(1, 3\), .* Pass x\.contiguous\(\)\."):
        compiled(x.t())
    assert compiled(x.t().contiguous()).sum() == 18 and len(compiled.programs) == 1


def test_strides_of_what_arguments_do_not_give_theirs_to_refuse_no_argument() -> None:
    def step(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        gradient, rows = model.weight.grad, nn.functional.embedding(labels, model.weight)
        is_plain = rows.is_contiguous() and gradient.stride() == model.weight.stride()
        model.zero_grad()
        return loss if is_plain else loss * 2

    def column(of: Tensor) -> Tensor:
        return torch.stack([of, of], 1)[:, 0]

    compiled, model, labels = spmd.compile(step), nn.Linear(3, 4), torch.tensor([0, 3])
    x = torch.randn(2, 3)
    assert torch.equal(compiled(model, x, column(labels)), compiled(model, x, labels))
    assert not column(labels).is_contiguous() and len(compiled.programs) == 1
    asks = spmd.compile(lambda x, labels: x * 2 if labels.is_contiguous() else x * 3)
    asks(x[:, :2], labels)
    with pytest.raises(spmd.CaptureError, match="its argument labels has strides"):
        asks(x[:, :2], column(labels))


def test_another_class_of_a_module_compiles_anew() -> None:
    model, x = nn.Sequential(nn.Tanh()), torch.arange(6.0)
    compiled = spmd.compile(lambda model, x: model(x))
    compiled(model, x)
    model[0].__class__ = nn.ReLU
    model[0].inplace = False
    assert torch.equal(compiled(model, x), x)


class Config:
    """What a step copies."""

    def __init__(self) -> None:
        self.scale, self.decoder_scale = 2.0, 3.0


COPIES: dict[str, Callable[[Any], Any]] = {
    "vars": vars,
    "copy": lambda config: vars(copy.copy(config)),
    "deepcopy": lambda config: vars(copy.deepcopy(config)),
    "pickle": lambda config: vars(pickle.loads(pickle.dumps(config))),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_reads_all_attributes(copied: Callable[[Any], Any]) -> None:
    config = Config()
    compiled = spmd.compile(lambda x: x * sum(copied(config).values()))
    for k, change in enumerate([{}, {}, {"scale": 4.0}, {"another": 2.0}]):
        vars(config).update(change)
        assert compiled(torch.ones(1)).item() == sum(vars(config).values())
        assert len(compiled.programs) == max(1, k)


class Slotted:
    """Attributes in slots."""

    __slots__ = ("scale",)


def test_a_copy_reads_all_slots() -> None:
    config = Slotted()
    config.scale = 2.0
    compiled = spmd.compile(lambda x: x * copy.deepcopy(config).scale)
    assert compiled(torch.ones(1)).item() == 2
    config.scale = 3.0
    assert compiled(torch.ones(1)).item() == 3


def test_what_the_step_copies_and_changes_is_not_guarded() -> None:
    config = Config()

    def step(x: Tensor) -> Tensor:
        own = copy.deepcopy(config)
        for name in vars(own).copy():
            if name.startswith("decoder_"):
                own.scale = own.__dict__.pop(name)
        return x * own.scale

    compiled = spmd.compile(step)
    assert [compiled(torch.ones(2)).tolist() for _ in range(2)] == [[3.0, 3.0]] * 2 and len(compiled.programs) == 1
    config.decoder_scale = 4.0
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0] and len(compiled.programs) == 2


numbers = {"scale": 1.0, "powers": [1.0, 2.0]}


def test_equal_numbers_in_new_containers_do_not_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = spmd.compile(lambda x, loss: loss(x * numbers["scale"] * numbers["powers"][1]))
    for scale, programs in (("1.0", 1), ("1.0", 1), ("3.0", 2)):
        numbers.update(scale=float(scale), powers=[float("1.0"), float("2.0")])
        loss = partial(torch.sum, dim=0)
        assert torch.equal(compiled(torch.ones(3), loss), torch.tensor(6.0 * float(scale)))
        assert len(compiled.programs) == programs


@lru_cache
def positions(count: int) -> Tensor:
    return torch.arange(count)


def test_a_cache_that_the_trace_fills_is_emptied() -> None:
    compiled, x = spmd.compile(lambda x: x * positions(3)), torch.ones(3)
    assert torch.equal(compiled(x), torch.arange(3.0))
    assert positions.cache_info().currsize == 0
    assert torch.equal(positions(3), torch.arange(3))


class Trainer:
    """Stores its last loss in itself, its class and a function."""

    last_of_all: Any = None

    def step(self, x: Tensor) -> Tensor:
        self.loss = Trainer.last_of_all = helper.loss = x.sum()  # type: ignore[attr-defined]
        return self.loss * helper(x).sum()


def test_tensors_stored_by_the_step_are_those_of_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "last_of_all", None)
    trainer = Trainer()
    compiled = spmd.compile(trainer.step)
    for k in (1, 2, 3):
        assert compiled(torch.full((3,), float(k))) == 9 * k * k
        stored = (trainer.loss, Trainer.last_of_all, vars(helper).pop("loss"))
        assert [type(each) for each in stored] == [Tensor] * 3 and all(each == 3 * k for each in stored)


def test_classes_that_hand_out_attributes_themselves_are_watched_like_others() -> None:
    class Checked:
        def __init__(self) -> None:
            self.scale = 2.0

        def __getattribute__(self, key: str) -> Any:
            return super().__getattribute__(key)

    class Adapter:
        """Stands for another object, also where it is asked for its class, as accelerate's data loaders."""

        def __init__(self, base: Any) -> None:
            self.base, self.factor = base, 3.0

        @property
        def __class__(self) -> Any:
            return self.base.__class__

    checked, adapter = Checked(), Adapter(Table())

    @spmd.compile()
    def step(x: Tensor) -> Tensor:
        return x * checked.scale * adapter.factor

    for _ in range(2):
        assert step(torch.ones(2)).tolist() == [6.0, 6.0]
    assert len(step.programs) == 1
    checked.scale, adapter.factor = 3.0, 5.0
    assert step(torch.ones(2)).tolist() == [15.0, 15.0]
