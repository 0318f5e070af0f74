"""Certificates of steps that run several times in a call: right ones are shown, wrong ones never are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from passes import Pass, Program, default
from spmd.verification import certify_runs

from .test_numbers import CountsParts, DrawsAnew, Forgets, batch, clipped, masked

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]


def certificate(step: Callable[..., Any] = masked, passes: Any = None, rows: int = 12, **mode: Any) -> Any:
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**{"micro_batches": 3} | mode), passes=passes)
    return spmd.certify(compiled, model, optimizer, *batch(rows), world=2)


def in_a_tree(world: int, style: str = "replicate") -> Any:
    compiled = spmd.compile(clipped, parallel_mode=spmd.DataParallel(style, bits="same", virtual=4))
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3)).double()
    return spmd.certify(compiled, model, torch.optim.SGD(model.parameters(), lr=0.1), *batch(12), world=world)


SHORTER_END = {"parallel_style": "fully_shard", "gather_parameters": "each", "rows": 10}


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (clipped, {"parallel_style": "fully_shard", "gather_parameters": "once"}),
        pytest.param(clipped, SHORTER_END, marks=pytest.mark.exhaustive),
        (clipped, SHORTER_END | {"reduce_gradients": "each"}),
    ],
    ids=["once", "each", "reduced in each"],
)
def test_runs_of_a_step_are_shown(step: Any, options: dict[str, Any]) -> None:
    found = certificate(step, **options)
    assert found, found


@pytest.mark.exhaustive
def test_sums_that_round_otherwise_cannot_be_shown() -> None:
    found = certificate(masked, accumulate_dtype=torch.float32)
    assert found.outcome == "cannot show", found


IN_PAIRS = pytest.param(2, "fully_shard", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("world", "style"), [IN_PAIRS, (3, "replicate")])
def test_sums_of_one_tree_are_shown(world: int, style: str) -> None:
    found = in_a_tree(world, style)
    assert found, found


@dataclass(frozen=True)
class AddsTwice(Pass):
    """A wrong pass: what a run adds to a sum is added again."""

    def rewrite(self, program: Program) -> int:
        node = next(node for name, (_, node) in program.values().items() if name.startswith("accumulated."))
        (add,) = node.users
        with program.graph.inserting_after(add):
            again = program.graph.call_function(add.target, (add, add.args[1]))
        add.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
        return 1


REST = [pytest.param(each, marks=pytest.mark.exhaustive) for each in (DrawsAnew, AddsTwice)]


@pytest.mark.parametrize("wrong", [Forgets, CountsParts, *REST])
def test_wrong_programs_are_not_shown(wrong: type[Pass]) -> None:
    found = certificate(masked, passes=[wrong(), *default()])
    assert not found and found.node


def test_sums_in_the_order_of_ranks_are_not_those_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify_runs, "ascend", lambda *_: None)
    found = in_a_tree(1)
    assert not found, found
