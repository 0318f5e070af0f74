"""State and arguments on other devices than the mesh's are refused, all of them by name."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spmd
from passes import PlacementError
from spmd.call.check_devices import check_devices
from spmd.call.inputs import BatchInput
from spmd.call.state import ArgumentReader, slots_of
from tests.harness.fake import fake_world


def step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


class Elsewhere(Tensor):
    """A tensor that says that it is on another device, as there is none here."""

    where: Any = torch.device("cuda", 0)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where


def mesh_of(kind: str) -> DeviceMesh:
    return DeviceMesh(kind, torch.arange(2), mesh_dim_names=("dp",))


def check(kind: str, model: nn.Module, x: Tensor) -> None:
    arguments = ArgumentReader(inspect.signature(step)).read((model, x), {})
    check_devices(mesh_of(kind), slots_of(arguments), [BatchInput("x", x, (), tuple(x.shape), False)])


def moved(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        value = getattr(model, name).detach()
        setattr(model, name, nn.Parameter(value.as_subclass(Elsewhere)))
    return model


def test_a_cuda_mesh_where_there_is_no_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with fake_world(2):
        model = nn.Linear(3, 4)
        compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(mesh=mesh_of("cuda")))
        with pytest.raises(PlacementError, match="torch finds none here"):
            compiled(model, torch.ones(2, 3))
        assert model.weight.grad is None


@pytest.mark.parametrize("kind, names, words", [
    ("cuda", ["weight"], "of cuda devices, but the call has model.weight on cuda:0 and model.bias, x on cpu. Move"),
    ("cpu", ["weight", "bias"], "of cpu devices, but the call has model.weight, model.bias on cuda:0 and x on"),
])  # fmt: skip
def test_all_tensors_are_named_where_one_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch, kind: str, names: list[str], words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with fake_world(2), pytest.raises(PlacementError, match=re.escape(words)):
        check(kind, moved(nn.Linear(3, 4), *names), torch.ones(2, 3))


def test_two_devices_of_one_kind_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    x: Any = torch.ones(2, 3).as_subclass(Elsewhere)
    x.where = torch.device("cuda", 1)
    with (
        fake_world(2),
        pytest.raises(PlacementError, match=r"model\.bias on cuda:0 and x on cuda:1"),
    ):
        check("cuda", moved(nn.Linear(3, 4), "weight", "bias"), x)


def test_a_number_may_be_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with fake_world(2):
        check("cuda", moved(nn.Linear(3, 4), "weight", "bias"), torch.tensor(0.5))
