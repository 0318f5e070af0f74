"""A step that cannot be traced: the error names the user's line and what to do instead, and nothing has changed."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, STYLES
from tests.harness.oracle import assert_agrees, snapshot
from tests.harness.pool import Ranks
from tests.harness.torch_state import torch_state

CASE = MLP(sizes=(15, 7), rows=6, optimizer="SGD momentum")


def as_float(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    if float(loss) > 0:
        loss.backward()
    optimizer.step()
    return loss


def as_int(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    for _ in range(int(loss)):
        loss.backward()
    optimizer.step()
    return loss


def as_numpy(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    print(loss.detach().numpy())
    loss.backward()
    return loss


def raises_itself(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    F.mse_loss(model(x), y).backward()
    raise LookupError("the user's own")


def full_text(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def failed(step: Any, style: str = "replicate") -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The error's text after a failing compile, the objects, and what they were before."""
    model, optimizer = CASE.build()
    before = snapshot(None, (model, optimizer))
    with pytest.raises(spmd.CaptureError) as caught:
        spmd.compile(parallel_mode=spmd.DataParallel(style))(step)(model, optimizer, *CASE.part(0, 0))
    return full_text(caught.value), (model, optimizer), before


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step", [as_float, as_int, as_numpy], ids=lambda step: step.__name__)
def test_the_error_names_the_file_and_the_line(step: Any) -> None:
    text, _, _ = failed(step)
    assert f"test_capture_errors.py:{step.__code__.co_firstlineno + 2}" in text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step", [as_float, as_int], ids=lambda step: step.__name__)
def test_the_error_names_alternatives(step: Any) -> None:
    text, _, _ = failed(step)
    assert "Override" in text
    assert "torch.where" in text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("style", STYLES)
def test_model_optimizer_and_torch_are_as_they_were(style: str) -> None:
    state = torch_state()
    model, optimizer = CASE.build()
    parameters, groups = list(model.parameters()), optimizer.param_groups
    modules = [(module, dict(module.__dict__)) for module in model.modules()]
    before = snapshot(None, (model, optimizer))
    with pytest.raises(spmd.CaptureError):
        spmd.compile(parallel_mode=spmd.DataParallel(style))(as_float)(model, optimizer, *CASE.part(0, 0))
    after = snapshot(None, (model, optimizer))
    assert torch_state() == state
    assert optimizer.param_groups is groups and optimizer.state == {}
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert all(new is old for new, old in zip(groups[0]["params"], parameters, strict=True))
    assert [(module, list(module.__dict__)) for module in model.modules()] == [(m, list(d)) for m, d in modules]
    assert all(_same(before[name], after[name]) for name in before.keys() | after.keys())


@pytest.mark.usefixtures("alone")
def test_the_user_s_own_error_is_raised() -> None:
    model, optimizer = CASE.build()
    with pytest.raises((LookupError, spmd.CaptureError)) as caught:
        spmd.compile(raises_itself)(model, optimizer, *CASE.part(0, 0))
    assert "the user's own" in full_text(caught.value) + full_text(caught.value.__cause__ or ValueError())


def fails_first(rank: int, world: int, style: str) -> None:
    failed(as_float, style)


USUAL = [style if style == "fully_shard" else pytest.param(style, marks=pytest.mark.exhaustive) for style in STYLES]


@pytest.mark.parametrize("style", USUAL)
def test_the_next_compile_works(ranks: Ranks, style: str) -> None:
    ranks.run(2, fails_first, style)
    assert_agrees(ranks, 2, CASE, style)


def same_objects(rank: int, world: int, style: str) -> None:
    """The very objects of the failed compile train on."""
    _, objects, _ = failed(as_float, style)
    compiled = spmd.compile(parallel_mode=spmd.DataParallel(style))(CASE.step)
    losses = [compiled(*objects, *CASE.part(0, 0)).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("style", USUAL)
def test_the_objects_of_a_failed_compile_can_be_trained(ranks: Ranks, style: str) -> None:
    ranks.run(2, same_objects, style)


@pytest.mark.usefixtures("alone")
def test_a_module_or_a_tensor_that_no_name_leads_to_is_refused_with_its_line() -> None:
    model, _ = CASE.build()
    hidden = weakref.ref(model)

    def reaches_a_module(x: Tensor) -> Tensor:
        return hidden()(x).sum()  # type: ignore[misc]

    def reaches_a_parameter(x: Tensor) -> Tensor:
        return (x * next(iter(hidden().parameters()))).sum()  # type: ignore[union-attr]

    for step in (reaches_a_module, reaches_a_parameter):
        with pytest.raises(spmd.CaptureError, match="neither among its arguments nor found by a name") as caught:
            spmd.compile(step)(CASE.part(0, 0)[0])
        assert f"test_capture_errors.py:{step.__code__.co_firstlineno + 1}" in full_text(caught.value)


@pytest.mark.usefixtures("alone")
def test_an_optimizer_whose_module_is_not_an_argument_is_refused() -> None:
    model, _ = CASE.build()
    _, optimizer = CASE.build()
    with pytest.raises(spmd.CaptureError, match=r"optimizer.*module"):
        spmd.compile(CASE.step)(model, optimizer, *CASE.part(0, 0))


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and torch.equal(before, after)
    return bool(before == after)


class Repeating(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * int(x.sum())


@pytest.mark.usefixtures("alone")
def test_the_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ModuleDict({"inner": Repeating()})["inner"])
    with pytest.raises(spmd.CaptureError, match=r"test_capture_errors.py:\d+ in model\.1: "):
        spmd.compile(lambda model, x: model(x))(model, torch.ones(2, 3))


def size_from_values(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    count = (x > 0).sum()
    return F.mse_loss(model(x), y) + torch.arange(6).repeat(count).sum()


def size_written_through_a_view(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    sizes = torch.zeros(3, dtype=torch.long)
    sizes[0].add_((x > 0).sum())
    return F.mse_loss(model(x), y) + torch.arange(6).repeat(int(sizes.max())).sum()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step, line", [
    (size_from_values, 2),
    (size_written_through_a_view, 3),
])  # fmt: skip
def test_a_size_that_follows_from_values_is_refused_at_its_line(step: Any, line: int) -> None:
    text, _, _ = failed(step)
    assert f"test_capture_errors.py:{step.__code__.co_firstlineno + line}" in text
    assert "value" in text and "Override" in text


def sizes_that_are_known(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    positions = torch.arange(3).unsqueeze(0).repeat(2, 1)
    count = positions[0].max() + 1
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    equal = torch.equal(positions[0], positions[1])
    return loss, torch.arange(2.0).repeat(count), count.item() if count > 2 and equal else None


@pytest.mark.usefixtures("alone")
def test_a_known_number_may_be_a_size_or_a_condition() -> None:
    _, tiled, count = spmd.compile(sizes_that_are_known)(*CASE.build(), *CASE.part(0, 0))
    assert tiled.tolist() == [0.0, 1.0] * 3
    assert int(count) == 3


def loss_only(model: nn.Module, x: Tensor, backward: bool, graph: bool) -> Tensor:
    with torch.set_grad_enabled(graph):
        loss: Tensor = model(x).square().mean()
    if backward:
        loss.backward()
    return loss


@pytest.mark.usefixtures("alone")
def test_a_loss_that_is_to_be_trained_outside_is_warned_of_once() -> None:
    model, x, step = nn.Linear(3, 3), torch.ones(2, 3), spmd.compile(loss_only)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, x, True, True)
        step(model, x, False, False)
        step(model.eval(), x, False, True)
    assert not caught
    with pytest.warns(UserWarning, match=r"returns a loss and has no backward pass.*call it in the step") as found:
        for _ in range(2):
            loss = step(model.train(), x, False, True)
    assert len(found) == 1 and found[0].filename == __file__
    assert not loss.requires_grad
