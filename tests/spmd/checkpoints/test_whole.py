"""``spmd.state_dict``: whole plain tensors on every rank; ``spmd.export(only=...)``: some of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.cases import mlp
from tests.harness.pool import Ranks


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(run: Any, x: Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(5, 7, 3)  # rows that two ranks have unequal parts of
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        run(model, optimizer, x)
    return model, optimizer


def batch() -> Tensor:
    return torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def save_on_first_rank(rank: int, world: int, mode: spmd.DataParallel, folder: Path) -> bool:
    model, optimizer = trained(spmd.compile(step, parallel_mode=mode), batch().chunk(world)[rank])
    state = spmd.state_dict(model, optimizer)
    refused = False
    if rank == 0:
        torch.save(state, folder / "whole.pt")
        try:
            torch.save((model.state_dict(), optimizer.state_dict()), folder / "part.pt")
        except spmd.SpmdError as error:
            refused = "spmd.state_dict" in str(error)
    spmd.export(folder / "some", model, only=["*.bias"])
    with pytest.raises(ValueError, match="only to match names of"):
        spmd.export(folder / "none", model, only="*lora*")
    return refused


MODES = {
    "fully_shard": lambda: spmd.DataParallel("fully_shard"),
    "shard_optimizer": lambda: spmd.DataParallel("replicate", shard_optimizer=True),
}


@pytest.mark.parametrize("name", MODES)
def test_one_rank_saves_what_one_device_loads(ranks: Ranks, name: str, tmp_path: Path) -> None:
    refused, _ = ranks.run(2, save_on_first_rank, MODES[name](), tmp_path)
    assert refused, "half of the state was about to be written"
    model, optimizer = trained(step, batch())
    states = torch.load(tmp_path / "whole.pt")
    for mine, theirs in zip(states, (model.state_dict(), optimizer.state_dict()), strict=True):
        assert mine.keys() == theirs.keys()
    torch.testing.assert_close(states[0], dict(model.state_dict()), rtol=1e-9, atol=1e-12)
    other = mlp(5, 7, 3)
    again = torch.optim.Adam(other.parameters(), lr=0.1)
    other.load_state_dict(states[0])
    again.load_state_dict(states[1])
    for run in ((model, optimizer), (other, again)):
        step(*run, batch())
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=1e-9, atol=1e-12)
    safetensors = pytest.importorskip("safetensors.torch")
    assert set(safetensors.load_file(tmp_path / "some" / "model.safetensors")) == {"0.bias", "2.bias"}
