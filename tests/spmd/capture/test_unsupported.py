"""Steps and arguments that cannot be compiled: each error is a sentence at the user's line, and nothing has changed."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import snapshot
from tests.harness.torch_state import torch_state

pytestmark = pytest.mark.slow

CASE = MLP(sizes=(5, 7, 4), rows=6, optimizer="SGD momentum")
BY_PARAMETER: dict[Any, float] = {}
BAD: list[tuple[Callable[..., Any], str]] = []


def bad(words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A step whose last line is the bad one, and words of the sentence it gets (a regular expression)."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        BAD.append((step, words))
        return step

    return register


@bad("value of a tensor.*torch.where")
def loops_as_often_as_a_value_says(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return [model(x) for _ in range(int(y.abs().sum()))]


@bad("shape of a result depends on values.*nonzero.*with the mask")
def takes_rows_by_mask(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return model(x)[y > 0].mean()


@bad("mm.* gets operands of .*float.* and .*float.*needs one dtype")
def multiplies_two_dtypes(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return x.float() @ model[0].weight.t()


@bad("shape of a result depends on values.*bincount.*minlength=classes")
def counts(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return torch.bincount(y.abs().long()[:, 0])


@bad(r"largest class.*F\.one_hot\(x, num_classes\)")
def counts_classes(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return F.one_hot(y.abs().long()[:, 0])


@bad(r"largest class.*F\.one_hot\(x, num_classes\)")
def counts_classes_by_keyword(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return F.one_hot(input=y.abs().long()[:, 0])


@bad("address of a tensor.*by `is`")
def compares_addresses(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return x * 2 if x.data_ptr() == y.data_ptr() else x


@bad("memory out of torch.*Override")
def takes_numpy(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return x.numpy().sum()


@bad("formats the value of a tensor")
def prints_a_tensor(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return f"{model(x).sum():.3f}"


@bad("generator of its own.*Leave generator= out")
def has_a_generator(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(0))


@bad("sparse tensor.*dense")
def makes_a_sparse_tensor(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return x.to_sparse() @ x.T


@bad(r"sparse=False")
def has_sparse_gradients(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    F.embedding(x.long().abs() % 4, next(model.parameters()), sparse=True).sum().backward()


@bad("nested")
def makes_a_nested_tensor(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return torch.nested.nested_tensor([x, y])


@bad("communicates itself.*Leave it out")
def communicates(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    torch.ops._c10d_functional.all_reduce(model(x).sum(), "sum", "0")


@bad("looks up a tensor in a dict.*by name")
def looks_up_by_parameter(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return sum(BY_PARAMETER[parameter] for parameter in model.parameters())


HELD = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
another = weakref.ref(HELD)  # the step's code names what leads to no optimizer


@bad("optimizer .SGD. that is not among its arguments.*Pass it")
def steps_another_optimizer(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    model(x).sum().backward()
    another().step()  # type: ignore[union-attr]


@bad("optimizer .SGD. that is not among its arguments.*Pass it")
def clears_gradients_of_another_optimizer(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    another().zero_grad()  # type: ignore[union-attr]


@bad("moves or converts a module.*outside")
def converts_the_model(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    model.float()


@bad("same shape and dtype")
def sets_data_of_another_shape(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    next(model.parameters()).data = x


@bad("share it from then on.*copy_")
def sets_data_to_other_state(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    model[0].bias.data = model[0].weight[:, 0]


@bad("written to since.*clone")
def reads_a_part_of_what_became_data(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    new = model[0].weight.data * 2
    part = new[1:]
    model[0].weight.data = new
    with torch.no_grad():
        model[0].weight.zero_()
    return part * 1


@bad("several others share.*clone")
def writes_into_what_was_data(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    before, row = model[0].weight.data, model[0].weight.data[0]
    model[0].weight.data = model[0].weight.data * 2
    row.zero_()
    model[0].weight.data = before


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step, words", BAD, ids=[step.__name__ for step, _ in BAD])
def test_a_bad_line_is_named_and_nothing_is_changed(step: Callable[..., Any], words: str) -> None:
    model, optimizer = CASE.build()
    with unchanged(model, optimizer), pytest.raises(spmd.CaptureError, match=f"(?s){words}") as caught:
        spmd.compile(step)(model, optimizer, *CASE.part(0, 0))
    last = max(line for _, _, line in step.__code__.co_lines() if line is not None)
    assert f"{step.__code__.co_filename.rsplit('/', 1)[-1]}:{last}" in str(caught.value)


def assigns_a_parameter(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    model[0].weight = nn.Parameter(model[0].weight * 2)


def adds_a_group(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def clears_state(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.state.clear()


def replaces_state(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.state = defaultdict(dict)
    model(x).sum().backward()
    optimizer.step()


def registers_a_hook(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    model[0].weight.register_hook(lambda gradient: gradient * 2)


HANDLES: list[Any] = []  # of hooks that a test has registered


def removes_a_hook(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    for handle in HANDLES:
        handle.remove()
    return CASE.step(model, optimizer, x, y)


@pytest.mark.usefixtures("alone")
def test_a_step_that_removes_a_hook_of_a_parameter_is_refused() -> None:
    """The hook of the live parameter would be gone, that of the one that is traced would run on."""
    model, optimizer = CASE.build()
    HANDLES[:] = [model[0].weight.register_hook(lambda gradient: gradient * 2)]
    words = r"registers or removes a hook of model.0.weight at .*remove"
    with unchanged(model, optimizer), pytest.raises(spmd.CaptureError, match=words):
        spmd.compile(removes_a_hook)(model, optimizer, *CASE.part(0, 0))
    assert len(model[0].weight._backward_hooks) == 1


def registers_a_hook_of_a_module(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    model[0].register_forward_hook(lambda module, given, result: result * 2)


def registers_a_hook_of_an_optimizer(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: None)


def replaces_groups(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


def hides_tensors(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return SimpleNamespace(loss=model(x).sum())


def yields(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Iterator[Any]:
    yield model(x)


async def awaits(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return model(x)


LEFT_BEHIND: dict[Callable[..., Any], str] = {
    assigns_a_parameter: r"in the place of model.0.weight.*copy_",
    adds_a_group: r"number of optimizer.param_groups.*outside",
    registers_a_hook: r"registers or removes a hook of model.0.weight at .*register_hook.*handle.remove",
    registers_a_hook_of_a_module: r"registers or removes a hook of model.0 at .*register_forward_hook.*handle.remove",
    registers_a_hook_of_an_optimizer: r"registers or removes a hook of optimizer at .*register_step_post_hook",
    replaces_groups: r"replaces optimizer.param_groups.*outside",
    hides_tensors: "returns a SimpleNamespace that holds tensors.*dataclasses",
    yields: "returns a generator.*plain function",
    awaits: "returns a coroutine.*plain function",
}


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("step, words", LEFT_BEHIND.items(), ids=[step.__name__ for step in LEFT_BEHIND])
def test_a_change_that_no_graph_can_repeat_is_refused(step: Callable[..., Any], words: str) -> None:
    model, optimizer = CASE.build()
    with unchanged(model, optimizer), pytest.raises(spmd.CaptureError, match=f"(?s){words}"):
        spmd.compile(step)(model, optimizer, *CASE.part(0, 0))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step", [clears_state, replaces_state])
def test_state_that_the_step_removes_or_replaces_is_refused(step: Callable[..., Any]) -> None:
    model, optimizer = CASE.build()
    CASE.step(model, optimizer, *CASE.part(0, 0))
    words = r"removes or replaces the state that optimizer has of model.0.weight at .*\.py:.*between calls.*zero_"
    with unchanged(model, optimizer), pytest.raises(spmd.CaptureError, match=words):
        spmd.compile(step)(model, optimizer, *CASE.part(0, 0))


def scripted() -> nn.Module:
    with pytest.warns((DeprecationWarning, FutureWarning)):  # which one depends on the version
        return nn.Sequential(nn.Linear(5, 7), torch.jit.script(nn.Linear(7, 4))).double()


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.LazyLinear(4)).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "data parallel": (lambda: nn.DataParallel(CASE.build()[0]), r"model is a DataParallel.*model.module"),
    "scripted": (scripted, r"model.1 is scripted.*plain module"),
    "lazy": (lazy, r"model.1.weight has no shape yet.*once"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("make, words", MODELS.values(), ids=MODELS.keys())
def test_a_model_that_cannot_be_traced_is_refused_by_name(make: Callable[[], nn.Module], words: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch_state()
    with pytest.raises(spmd.CaptureError, match=f"(?s){words}"):
        spmd.compile(CASE.step)(model, optimizer, *CASE.part(0, 0))
    assert torch_state() == state


def same(one: Any, other: Any) -> bool:
    """Equal, bit for bit where they are tensors."""
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


TENSORS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "meta": (lambda x: x.to("meta"), "x is on the meta device"),
    "sparse": (lambda x: x.to_sparse(), "x is a sparse tensor.*dense"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "x is a nested tensor.*Pad"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("make, words", TENSORS.values(), ids=TENSORS.keys())
def test_an_argument_that_cannot_be_split_is_refused_by_name(make: Callable[[Tensor], Tensor], words: str) -> None:
    model, optimizer = CASE.build()
    x, y = CASE.part(0, 0)
    with unchanged(model, optimizer), pytest.raises(spmd.CaptureError, match=words):
        spmd.compile(CASE.step)(model, optimizer, make(x), y)


class unchanged:
    """Checks that torch, model and optimizer are as before, and that a good step can train them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def __enter__(self) -> None:
        self.torch, self.parameters = torch_state(), list(self.model.parameters())
        self.seen = snapshot(None, (self.model, self.optimizer))

    def __exit__(self, *error: Any) -> None:
        assert torch_state() == self.torch
        assert [id(p) for p in self.model.parameters()] == [id(p) for p in self.parameters]
        assert [id(p) for p in self.optimizer.param_groups[0]["params"]] == [id(p) for p in self.parameters]
        seen = snapshot(None, (self.model, self.optimizer))
        assert seen.keys() == self.seen.keys()
        assert not [name for name, value in seen.items() if not same(value, self.seen[name])]
        step = spmd.compile(CASE.step)
        losses = [float(step(self.model, self.optimizer, *CASE.part(0, 0))) for _ in range(3)]
        assert losses == sorted(losses, reverse=True)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["FusedMovingAvgObsFakeQuantize", "FakeQuantize"])
def test_an_op_that_would_resize_state_is_refused_before_anything_is_written(kind: str) -> None:
    """Only the kernel of an observer per channel knows how many there are; run once before, it trains."""
    observer = torch.ao.quantization.MovingAveragePerChannelMinMaxObserver
    quantized = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    quantize = getattr(torch.ao.quantization, kind)(observer=observer, ch_axis=0, **quantized)
    model = nn.Sequential(nn.Linear(6, 6), quantize)

    @spmd.compile
    def step(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y

    x, before = torch.randn(8, 6), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(spmd.CaptureError, match=r"(each of 8 channels|\[8\] by resize_).*[Rr]un the model once"):
        step(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model(x)
    torch.testing.assert_close(step(model, x), model(x))
