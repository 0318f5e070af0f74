"""Costs of later ops count: sums are reduced where they are small, and split weights are not moved."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import spmd
from spmd.partitioner import lookahead
from tests.harness.fake import fake_world

pytestmark = pytest.mark.slow

F64 = torch.float64
WIDTH, ROWS = 64, 128


class Block(nn.Module):
    """A transformer's block without attention: pre-norm, residual, with biases."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias), nn.Linear(4 * WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


Shapes = list[tuple[int, ...]]


def traffic(model: nn.Module, sizes: dict[str, int], **options: Any) -> dict[tuple[str, str, str], Shapes]:
    """The shapes that are communicated, by phase, axis and kind; scalars are left out. No passes."""
    with fake_world(prod(sizes.values())):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        compiled = spmd.compile(parallel_mode=spmd.DTensorExpand(mesh=mesh, **options), passes=())(step)
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(ROWS, WIDTH, dtype=F64))
    found: dict[tuple[str, str, str], Shapes] = {}
    assert compiled.program is not None
    for node in compiled.program.collectives():
        collective, shape = node.meta["collective"], tuple(node.meta["val"].shape)
        if shape:
            found.setdefault((str(node.meta["phase"]), collective.axis, str(collective.kind)), []).append(shape)
    return found


COLUMNS_THEN_ROWS = {"*.up.weight": {"tp": Shard(0)}, "*.up.bias": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("data_parallel", [True, False])
def test_columns_then_rows_take_one_sum_in_each_direction(data_parallel: bool, bias: bool) -> None:
    """Megatron-LM's counts for an MLP. The first block's input has no gradient, so there only small sums are left."""
    sizes = {"dp": 2, "tp": 4} if data_parallel else {"tp": 4}
    inputs = {"x": {"dp": Shard(0)} if data_parallel else Replicate()}
    params = {name: placement for name, placement in COLUMNS_THEN_ROWS.items() if bias or "bias" not in name}
    found = traffic(nn.Sequential(*(Block(bias) for _ in range(3))).to(F64), sizes, inputs=inputs, params=params)
    assert found.pop(("forward", "tp", "all_reduce")) == [(ROWS, WIDTH)] * 3
    backward = Counter(found.pop(("backward", "tp", "all_reduce")))
    assert backward.pop((ROWS, WIDTH)) == 2
    assert set(backward) <= {(WIDTH,)}
    assert {axis for _, axis, _ in found} <= {"dp"}


class Narrow(nn.Module):
    """An activation whose columns the user splits, before weights that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(spmd.constrain(x, {"tp": Shard(1)}))))


def test_small_factors_are_moved_instead_of_reducing_a_larger_sum() -> None:
    found = traffic(Narrow().to(F64), {"tp": 4}, inputs={"x": Replicate()})
    moved = {key: shapes for key, shapes in found.items() if key[0] == "forward"}
    assert moved == {("forward", "tp", "all_gather"): [(4 * ROWS, WIDTH // 4)]}


def test_a_split_weight_is_not_moved_though_it_is_smaller_than_the_activations() -> None:
    params = {"*.up.weight": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}
    model = nn.Sequential()
    model.up, model.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    found = traffic(model.to(F64), {"tp": 2}, inputs={"x": Replicate()}, params=params)
    moved = {prod(shape) for shapes in found.values() for shape in shapes}
    assert WIDTH * WIDTH < ROWS * WIDTH in moved
    assert not moved & {WIDTH * WIDTH, WIDTH * WIDTH // 2}


class Parts(nn.Module):
    """Many products that leave every rank with a summand, concatenated."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w, self.count = nn.Linear(WIDTH, 2, bias=False), count

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.w(x * k) for k in range(self.count)], 1)


def test_operands_of_a_long_concatenation_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many operands asks what all others cost: added up anew each time, that is quadratic in their number."""
    asked = Counter[str]()
    monkeypatch.setattr(lookahead, "move_cost", lambda *args, **kwargs: asked.update(["move"]) or 0.0)
    moves, placed = [], {"inputs": {"x": Replicate()}, "params": {"*.weight": {"tp": Shard(1)}}}
    for count in (20, 40):
        asked.clear()
        found = traffic(Parts(count).to(F64), {"tp": 4}, **placed)
        assert set(found.pop(("forward", "tp", "all_reduce"))) == {(ROWS, 2 * count)}
        moves.append(asked.total())
    assert moves[1] < 3 * moves[0]
