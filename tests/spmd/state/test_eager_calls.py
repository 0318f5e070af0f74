"""A split model that is called outside of a compiled step says so, and what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from passes import SpmdError
from tests.harness.fake import fake_world


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def train(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def split(model: nn.Module, style: Any = "fully_shard") -> spmd.CompiledStep:
    """The step that has split ``model``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = spmd.compile(train, parallel_mode=spmd.DataParallel(style))
    for _ in range(3):
        step(model, optimizer, torch.ones(4, 3))
    assert len(step.programs) == 1, "what refuses eager calls is nothing that the step reads"
    return step


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy], ids=["itself", "copy"])
def test_an_eager_call_names_the_module_and_the_way_out(copied: Any) -> None:
    with fake_world(2):
        model = Model()
        split(model)
        model = copied(model)
        for called in (model, model.first):
            with pytest.raises(SpmdError, match=r"a Linear was called .* weight and bias are .*spmd\.unshard\(model\)"):
                called(torch.ones(4, 3))
        with spmd.unshard(model):
            assert model(torch.ones(4, 3)).shape == (4, 2)


def test_whole_models_are_called_as_ever() -> None:
    with fake_world(2):
        model = Model()
        split(model, "replicate")
        assert model(torch.ones(4, 3)).shape == (4, 2)


def test_plain_parameters_may_stand_in() -> None:
    with fake_world(2):
        model, plain = Model(), Model()
        split(model)
        got = torch.func.functional_call(model, dict(plain.named_parameters()), (torch.ones(4, 3),))
        assert torch.equal(got, plain(torch.ones(4, 3)))
