"""What a check finds beside refusals at values, and what it says that it has not looked at."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from spmd.checking import check, text_of
from tests.harness.fake import fake_world


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.inner, self.depth = nn.Linear(8, 8), depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = self.inner(x).relu()
        return x


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@spmd.compile
def clean(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return update(model, optimizer, model(x).square().mean())


def arguments(rows: int = 4) -> tuple[Any, ...]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters()), torch.randn(rows, 8)


def test_a_clean_step_compiles_in_each_mode() -> None:
    found = check(clean, *arguments(), modes=("replicate", "fully_shard", "zero1"))
    assert found and [each.mode for each in found.modes] == ["replicate", "fully_shard", "zero1"]
    assert all(each.is_compiled and not (each.refusals or each.unseen or each.whole) for each in found.modes)
    assert found.to_dict()["compiles"] is True


def test_both_branches_are_looked_at() -> None:
    def branches(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if loss > 3:
            loss = loss + random.random()
        else:
            print(loss.numpy())
        return update(model, optimizer, loss)

    found = check(spmd.compile(branches), *arguments())
    reasons = " ".join(each.reason for each in found.refusals)
    assert len(found.refusals) == 2
    assert "draws from random" in reasons and "memory" in reasons


def test_a_branch_that_raises_is_not_looked_at() -> None:
    def strict(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if loss > 3:
            raise RuntimeError("too large")
        return update(model, optimizer, loss)

    (mode,) = check(spmd.compile(strict), *arguments()).modes
    assert not mode.refusals
    (unseen,) = mode.unseen
    assert "RuntimeError: too large" in unseen and "test_check.py" in unseen


def test_a_loop_on_a_value_ends() -> None:
    def looping(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        while model(x).mean() < 100:
            x = x + 1
        while not model(x).mean() < 50:
            x = x - 1
        return update(model, optimizer, model(x).mean())

    found = check(spmd.compile(looping), *arguments())
    assert found and len([each for each in found.modes[0].anew if each.startswith("each answer at")]) == 2


def test_a_loop_over_an_iterator_ends() -> None:
    batches = iter([torch.randn(4, 8) for _ in range(3)])

    def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        for each in batches:
            x = x + model(each)
        return update(model, optimizer, x.mean() + random.random())

    found = check(spmd.compile(epoch), *arguments())
    assert ["next value" in each.reason for each in found.refusals] == [True, False]
    assert len([*batches]) == 2


def test_tensors_of_attributes_are_written_by_no_check() -> None:
    class Marked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.zeros(8)

    def marking(model: Marked, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        model.table.add_(1)
        return update(model, optimizer, model(x).mean() + random.random())

    model = Marked()
    found = check(spmd.compile(marking), model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8))
    assert ["model.table" in each.reason for each in found.refusals] == [True, False]
    assert "draws from random" in found.refusals[1].reason and not model.table.any()


def test_a_model_from_outside_gets_no_gradient() -> None:
    held = {nn.Linear(8, 8)}

    def reaching(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        (other,) = held
        return update(model, optimizer, (model(x) + other(x)).mean())

    (refusal,) = check(spmd.compile(reaching), *arguments()).refusals
    assert not refusal.goes_on and "neither among its arguments" in refusal.reason
    assert all(parameter.grad is None for other in held for parameter in other.parameters())


def test_what_no_trace_goes_past_is_the_last_one() -> None:
    def conditional(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).mean()
        if float(loss) > 1:
            loss = loss / 2
        loss = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (loss,))
        return update(model, optimizer, loss + random.random())

    (mode,) = check(spmd.compile(conditional), *arguments()).modes
    assert [each.goes_on for each in mode.refusals] == [True, False]
    assert "torch.cond" in mode.refusals[1].reason and "no trace goes past" in mode.unseen[0]


def test_an_error_of_the_steps_own_is_one() -> None:
    def wrong(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        return update(model, optimizer, F.linear(model(x), x).mean(3))

    (mode,) = check(spmd.compile(wrong), *arguments()).modes
    (refusal,) = mode.refusals
    assert refusal.kind == "IndexError" and refusal.source.startswith("return update(model")


def test_a_mode_that_refuses_is_named() -> None:
    placed = spmd.DataParallel(params={"inner.weight": Shard(5)})
    found = check(spmd.compile(clean.function, parallel_mode=placed), *arguments(), modes=("replicate", "fully_shard"))
    assert not found
    assert all("inner.weight" in each.message for each in found.refusals)
    assert all(each.kind == "PlacementError" for each in found.refusals)


def test_options_that_a_style_lacks_are_refused_in_it_alone() -> None:
    gathers = spmd.DataParallel("fully_shard", reshard_after_forward=True)
    found = check(spmd.compile(clean.function, parallel_mode=gathers), *arguments(), modes=("replicate", "fully_shard"))
    assert [each.is_compiled for each in found.modes] == [False, True]
    assert [each.message for each in found.refusals] == [
        'expected no reshard_after_forward=True: "replicate" gathers no parameters'
    ]
    assert found.modes_of(found.refusals[0]) == ("replicate",)


def test_sizes_and_values_that_compile_anew_are_listed() -> None:
    def sized(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, kind: str) -> Tensor:
        scale = 2.0 if kind == "large" else 1.0
        few = x[: int(len(x) ** 0.5)]
        return update(model, optimizer, model(x).mean() * scale + few.mean())

    (mode,) = check(spmd.compile(sized), *arguments(), "large").modes
    assert mode.is_compiled
    assert any(each.startswith("each size of dim 0 of x: it depends on the size at") for each in mode.anew)
    assert not any("dim 1 of x" in each for each in mode.anew)  # the model's width
    assert any("depth" in each and "test_check.py" in each for each in mode.anew)


def test_ops_without_a_rule_are_gathered_whole() -> None:
    def sorting(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        return update(model, optimizer, (torch.linalg.svdvals(model(x)) * torch.ones(4)).mean())

    (mode,) = check(spmd.compile(sorting), *arguments()).modes
    assert mode.is_compiled
    assert any("svd" in each and "gathered" in each for each in mode.whole)


def test_what_the_cache_does_not_keep_has_its_reason() -> None:
    step = spmd.compile(clean.function, gm_transformation=lambda module: module)
    assert check(clean, *arguments()).modes[0].not_kept == ""
    assert check(step, *arguments()).modes[0].not_kept == "it has a gm_transformation"


def test_models_on_the_meta_device_are_checked() -> None:
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    assert check(clean, model, optimizer, torch.randn(4, 8), modes=("fully_shard",))


def test_the_text_names_lines_reasons_and_modes() -> None:
    def refused(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
        return float(update(model, optimizer, model(x).mean()))

    found = check(spmd.compile(refused), *arguments(), modes=("replicate", "fully_shard"))
    lines = text_of(found).splitlines()
    assert "refused, CaptureError, the value of a tensor" in lines[0]
    assert "return float(update(model, optimizer, model(x).mean()))" in lines[1]
    assert "Instead: Return the tensor and look at it outside of the step" in "\n".join(lines)
    assert lines[-2:] == ["refused, replicate, 2 ranks: 1 refusal", "refused, fully_shard, 2 ranks: 1 refusal"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 0}, "expected world to be 1 rank or more"),
        ({"modes": ("sharded",)}, "expected mode to be one of"),
        ({"mesh": {"dp": 3}}, "the mesh has 3 ranks, but world=2"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(clean, *arguments(), **options)
    with pytest.raises(TypeError, match=r"decorate it with @spmd.compile"):
        check(clean.function, *arguments())


def test_a_plain_step_refuses_as_before_and_imports_no_check() -> None:
    with fake_world(2):
        first = clean(*arguments())
        check(clean, *arguments())
        assert clean(*arguments()).shape == first.shape
    code = (
        "import sys, torch, spmd\n"
        "step = spmd.compile(lambda model, x: model(x).sum().backward())\n"
        "step(torch.nn.Linear(2, 2), torch.randn(2, 2))\n"
        "assert not [each for each in sys.modules if each.startswith('spmd.checking')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
