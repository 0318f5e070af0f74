"""``check="nan"``: the first module of a call that has NaN or Inf, on all ranks, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from spmd.watching.statistics import STATISTICS, row_of
from tests.harness.pool import Ranks


class Scaled(nn.Module):
    """A product, whose derivative is not finite where the factor is 0 and the square root comes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).abs().sqrt()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def message(rank: int, world: int, mode: dict[str, Any], phase: str, shares: bool) -> str:
    """The error of the third call; what came instead, where an earlier one raised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Scaled(), nn.Linear(3, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if mode.get("axes"):
        mode = {**mode, "mesh": torch.distributed.init_device_mesh("cpu", (world,), mesh_dim_names=("x",))}
    step = spmd.compile(parallel_mode=spmd.DataParallel(**mode), check="nan")(train)
    for call in range(3):
        x = torch.rand(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * call + rank * shares))
        if call == 2 and phase == "forward" and (rank == world - 1 or not shares):
            x[-1, 0] = torch.nan  # of one rank's rows
        if call == 2 and phase == "gradient":
            x, _ = torch.zeros_like(x), model.get_submodule("0").bias.data.zero_()
        if call == 2 and phase == "update":
            optimizer.param_groups[0]["lr"] = torch.inf
        try:
            step(model, optimizer, x)
        except spmd.SpmdError as error:
            return f"{call}: {error}"
    return "nothing was raised"


MODES: list[tuple[dict[str, Any], bool]] = [
    ({"parallel_style": "fully_shard"}, True),
    ({"micro_batches": 2}, True),
    ({"axes": {"tensor": "x"}}, False),
    ({"axes": {"stages": "x"}, "micro_batches": 2}, False),
    ({"defer_updates": True}, True),
]
NAMED = {"forward": "model.0.output", "gradient": "model.1.factor.grad", "update": "model.0.weight"}


@pytest.mark.parametrize("mode, shares", MODES)
def test_the_first_module_is_named_on_all_ranks(ranks: Ranks, mode: dict[str, Any], shares: bool) -> None:
    found = ranks.run(2, message, mode, "forward", shares)
    assert all(each.startswith("2: call 3 of train has NaN or Inf first in forward:") for each in found), found
    assert all("of model.0.output, and 3 more of 4." in each for each in found), found


@pytest.mark.parametrize("phase", ["gradient", "update"])
def test_the_phase_is_that_of_the_first_value(ranks: Ranks, phase: str) -> None:
    for each in ranks.run(2, message, {"parallel_style": "fully_shard"}, phase, True):
        assert each.startswith(f"2: call 3 of train has NaN or Inf first in {phase}:") and NAMED[phase] in each


class Masked(nn.Module):
    """Logits, of which some are left out by -Inf, of a model that runs for each row, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.vmap(self.inner)(x)
        return rows.masked_fill(torch.arange(3) > 1, -torch.inf)


@pytest.mark.usefixtures("alone")
def test_masks_and_rows_under_vmap_are_left_alone() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).softmax(1)[:, 0].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model = Masked().double()
    compiled = spmd.compile(step, check="nan")
    for _ in range(2):
        compiled(model, torch.optim.SGD(model.parameters(), 0.1), torch.rand(4, 3, dtype=torch.float64))
    with pytest.raises(spmd.SpmdError, match="first in forward"):
        compiled(model, torch.optim.SGD(model.parameters(), 0.1), torch.full((4, 3), torch.nan, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.bfloat16, torch.int64])
def test_statistics_of_narrow_numbers_are_not_computed_in_them(dtype: torch.dtype) -> None:
    x = torch.tensor([100, 100, -128 if dtype.is_signed and dtype is not torch.bool else 1]).to(dtype)
    exact = x.double()
    for name, want in (("norm", exact.norm()), ("max", exact.abs().max())):
        found = row_of([STATISTICS[name].of(x)], STATISTICS[name], as_one=False)
        torch.testing.assert_close(found.double(), want.reshape(1), rtol=1e-6, atol=0)
