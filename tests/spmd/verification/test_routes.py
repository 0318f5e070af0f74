"""Certificates of steps with experts: shown for a routing in each form, and never where rows are lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd import Certificate, placements
from spmd.rules.experts import exchange_rows
from tests.harness import experts as harness
from tests.harness.experts import CHOSEN, EXPERTS, WIDTH, Alone, Mixture, Training
from tests.spmd.modes.test_experts import MUTANTS, without_the_first_slot

pytestmark = pytest.mark.slow
AXES: dict[str, Any] = {"axes": {"batch": ("dp", "ep"), "experts": "ep"}}


class Chooses(nn.Module):
    """A mixture whose router chooses the experts of each row."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.choose, self.mixture = nn.Linear(WIDTH, EXPERTS), Mixture(form)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> Any:
        return self.mixture(x, self.choose(x).topk(CHOSEN).indices)


def certificate(form: Any, mesh: dict[str, int], make: Any = Mixture, **options: Any) -> Certificate:
    torch.manual_seed(0)
    model, case = make(form).double(), Training(form)
    x, chosen, y = case.whole([case.part(rank, 0) for rank in range(2)])
    if len(x) > 64:  # no pair of ranks has more rows than there is room for
        chosen = (torch.arange(len(x))[:, None] + torch.arange(CHOSEN)) % EXPERTS
    batch = x, chosen, y
    step = spmd.compile(case.step, parallel_mode=spmd.DataParallel(**options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return spmd.certify(step, model, optimizer, *batch, world=mesh.get("dp", 1) * mesh["ep"], mesh=mesh)


@pytest.mark.parametrize("form, mesh, make", [
    ("ends", {"dp": 2, "ep": 2}, Chooses),
    pytest.param("numbers", {"dp": 1, "ep": 2}, Mixture, marks=pytest.mark.exhaustive),
    ("capacity", {"dp": 1, "ep": 2}, Mixture),
])  # fmt: skip
def test_each_form_is_shown(form: Any, mesh: dict[str, int], make: Any) -> None:
    found = certificate(form, mesh, make, parallel_style="fully_shard", **AXES)
    assert found and found.routed is (form != "capacity"), found


def test_an_exchange_is_shown_and_a_lost_row_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ROWS", 64)
    monkeypatch.setattr(placements, "FEWEST", 8)
    mesh, options = {"ep": 4}, {"axes": {"batch": "ep", "experts": "ep"}}
    found = certificate("ends", mesh, Alone, **options)
    assert found and found.routed, found
    monkeypatch.setattr(exchange_rows._Messages, "_exchanged", without_the_first_slot)
    assert not certificate("ends", mesh, Alone, **options)


@pytest.mark.parametrize("mutant", ["dropped row", *(pytest.param(m, marks=pytest.mark.exhaustive) for m in MUTANTS)])
def test_a_mutant_is_not_shown(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    form, *change = MUTANTS[mutant]
    monkeypatch.setattr(*change)
    assert not certificate(form, {"ep": 2}, axes={"batch": "ep", "experts": "ep"})
