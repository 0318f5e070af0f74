"""``backend="inductor"`` with stages: numbers, verification, and what the ranks of one stage decide together."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import passes
import spmd
from passes.ir.region import islands
from spmd.stages.stage_exchange import StageExchange
from tests.harness.cases import MLP, make_optimizer
from tests.harness.oracle import all_unequal
from tests.harness.pool import Ranks
from tests.spmd.test_islands import Block, WrongInside, takes_all

from .test_bundles import TWO, step
from .test_numbers import trained


@dataclass(frozen=True)
class Blocks(MLP):
    """A block for each stage, of which interleaved ones have four; without state: all calls run one program."""

    sizes: tuple[int, ...] = (4, 4)
    rows: int = 8
    optimizer: str = "SGD"
    layers: int = 2

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(*(Block(4) for _ in range(self.layers))).double()
        return model, make_optimizer(self.optimizer, model.parameters())

    step = staticmethod(step)


def beside_plain(rank: int, world: int, schedule: str) -> tuple[list[str], set[str]]:
    """What differs from the plain step, and the programs that have islands."""
    case = Blocks(layers=4 if schedule == "interleaved" else 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    batches = [case.part(0, k) for k in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        takes_all(patch)
        mode = spmd.DataParallel(mesh=mesh, axes={"stages": "pp"}, micro_batches=4, schedule=schedule)
        compiled = spmd.compile(case.step, parallel_mode=mode, backend="inductor")
        got = trained(case, compiled, batches)
    unequal = all_unequal(trained(case, case.step, batches), got, 0, 1, case.rtol)
    bundle: Any = compiled.program.stages
    roles = {role for role in bundle.roles_of(compiled.program) if islands(bundle.programs[role].graph)}
    assert sum(row.calls for row in compiled.report().islands) >= 2  # on each rank
    return unequal, roles


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("gpipe", "interleaved", "zb-h1"))],
)
def test_numbers_on_two_stages(ranks: Ranks, schedule: str) -> None:
    for k, (unequal, roles) in enumerate(ranks.run(2, beside_plain, schedule)):
        assert not unequal
        assert roles == {f"forward.{k}", f"backward.{k}"} or (schedule != "1f1b" and len(roles) > 1), roles


def test_ranks_of_one_stage_exchange_and_all_take_part_as_often() -> None:
    """The first stage has a program more than the second, so ranks of that one take part once more."""
    seen: list[list[str]] = [[], []]
    found: list[list[str]] = []
    for own, programs in enumerate((["a", "b"], ["c"])):
        places = {"a": [0], "b": [0], "c": [1]}
        stages = SimpleNamespace(programs=places, coordinates=places.get, coordinate_of=lambda program, own=own: own)
        program: Any = SimpleNamespace(stages=stages)

        def gather(text: str, own: int = own) -> list[str]:
            seen[own].append(text)
            return ["0 [1, 2]", text, "1 [3]", "0 " if own else "1 "]

        exchange = StageExchange(program, 1, gather)
        found += [exchange(each) for each in programs]
        exchange.end()
    assert found == [["[1, 2]", "a"], ["[1, 2]", "b"], ["c", "[3]"]]
    assert seen == [["0 a", "0 b"], ["1 c", "1 "]]


@pytest.mark.slow
def test_verification_looks_inside() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(4), Block(4)).double(), torch.randn(8, 4).double()
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), x, x + 1
    mode = spmd.DataParallel(**TWO | {"stages": ["1"]})
    right = spmd.compile(step, parallel_mode=mode, backend="inductor")
    assert spmd.verify(right, *given, world=2, mesh={"pp": 2}, steps=2)
    pipeline = passes.with_islands(passes.default())
    at = next(k for k, each in enumerate(pipeline) if isinstance(each, passes.FormIslands)) + 1
    wrong = spmd.compile(step, parallel_mode=mode, passes=[*pipeline[:at], WrongInside(), *pipeline[at:]])
    verdict = spmd.verify(wrong, *given, world=2, mesh={"pp": 2}, steps=1)
    assert not verdict and verdict.stage == "WrongInside", verdict
