"""Split state that is read outside of steps: the numbers of the plain model on every rank, or one sentence of ours."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.cases import mlp
from tests.harness.messages import messages
from tests.harness.pool import Ranks

READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda t: float(t.norm()),
    "norm in a ratio": lambda t: float(t.norm() / t.numel() ** 0.5),
    "max norm": lambda t: t.norm(float("inf")).item(),
    "mean": lambda t: t.mean().item(),
    "squares": lambda t: t.pow(2).sum().item(),
    "largest": lambda t: t.abs().max().item(),
    "least": lambda t: t.min().item(),
    "deviation": lambda t: t.std().item(),
    "all finite": lambda t: bool(torch.isfinite(t).all()),
    "any": lambda t: bool((t > 0.1).any()),
    "last": lambda t: t.flatten()[-1].item(),
    "formatted": lambda t: f"{t.sum():.6f}",
    "detached": lambda t: float(t.detach().square().mean().sqrt()),
    "data": lambda t: t.data.abs().sum().item(),
    "columns": lambda t: t.reshape(len(t), -1).sum(0).norm().item(),
    "plain average": lambda t: torch.ones(t.shape, dtype=t.dtype).lerp_(t.detach(), 0.1).square().sum().item(),
    "plain difference": lambda t: (t.detach() - torch.ones(t.shape, dtype=t.dtype)).norm().item(),
    "median": lambda t: t.median().item(),
    "total": lambda t: torch.nn.utils.get_total_norm([t, t * 2]).item(),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.detach().numpy(),
    "list": lambda t: t.tolist(),
    "shared memory": lambda t: t.share_memory_(),
    "pointer": lambda t: t.data_ptr(),
    "pickle": lambda t: pickle.dumps(t.detach()),
}


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def clearing_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(run: Callable[..., Any], x: Tensor, calls: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(5, 7, 3)  # rows that two ranks have unequal parts of
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(calls):
        run(model, optimizer, x)
    return model, optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found: dict[str, Any] = dict(model.named_parameters())
    found |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return found | {f"{name}.exp_avg": optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}


def batch() -> Tensor:
    return torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def seen(rank: int, world: int, mode: spmd.DataParallel) -> dict[str, Any]:
    compiled = spmd.compile(step, parallel_mode=mode)
    model, optimizer = trained(compiled, batch().chunk(world)[rank])
    found: dict[str, Any] = {}
    for name, tensor in state(model, optimizer).items():
        found |= {f"{name} {read}": function(tensor) for read, function in READS.items()}
        if isinstance(tensor, torch.distributed.tensor.DTensor):
            for function in REFUSED.values():
                with pytest.raises(spmd.SpmdError, match="split over the ranks") as error:
                    function(tensor)
                assert "spmd." in str(error.value)
    average = copy.deepcopy(model)
    found["copied gradients"] = [p.grad is not None for p in average.parameters()]
    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
        mine.data.lerp_(theirs.data, 0.5).add_(1.0)
    found["average"] = sum(float(p.sum()) for p in average.parameters())
    with torch.no_grad():
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    found["clipped"] = sum(float(p.grad.square().sum()) for p in model.parameters())  # type: ignore[union-attr]
    whole = trained(step, batch(), calls=0)[0].state_dict()
    model.load_state_dict(whole)
    found["loaded"] = [float(p.double().pow(3).sum()) for p in model.parameters()]
    return found


def expected() -> dict[str, Any]:
    model, optimizer = trained(step, batch())
    found: dict[str, Any] = {"copied gradients": [False for _ in model.parameters()]}  # torch copies none
    for name, tensor in state(model, optimizer).items():
        found |= {f"{name} {read}": function(tensor) for read, function in READS.items()}
    found["average"] = sum(float(p.sum() + p.numel()) for p in model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    found["clipped"] = sum(float(p.grad.square().sum()) for p in model.parameters())  # type: ignore[union-attr]
    found["loaded"] = [float(p.double().pow(3).sum()) for p in trained(step, batch(), calls=0)[0].parameters()]
    return found


MODES = {
    "fully_shard": lambda: spmd.DataParallel("fully_shard"),
    "shard_optimizer": lambda: spmd.DataParallel("replicate", shard_optimizer=True),
}


@pytest.mark.parametrize("name", ["fully_shard", pytest.param("shard_optimizer", marks=pytest.mark.exhaustive)])
def test_what_is_read_is_the_plain_models_or_refused(ranks: Ranks, name: str) -> None:
    plain = expected()
    for found in ranks.run(2, seen, MODES[name]()):
        assert found.keys() == plain.keys()
        for what, value in plain.items():
            if isinstance(value, str):
                value, found[what] = float(value), float(found[what])
            assert found[what] == pytest.approx(value, rel=1e-9, abs=1e-12), what


def read_while_pending(rank: int, world: int) -> list[float]:
    mode = spmd.DataParallel("fully_shard", defer_updates=True)
    with messages(rank):  # through shared memory nothing would be pending
        model, _ = trained(spmd.compile(clearing_step, parallel_mode=mode), batch().chunk(world)[rank], calls=3)
        averages = [torch.zeros(p.shape, dtype=p.dtype).lerp_(p.detach(), 0.5) for p in model.parameters()]
        return [float(average.norm()) for average in averages]


def data_for_a_while(run: Callable[..., Any], x: Tensor) -> list[float]:
    """What is read by ``.data`` stays when other data is put there, and can be put back."""
    model, _ = trained(run, x)
    kept, norms = [p.data for p in model.parameters()], list[float]()
    for p in model.parameters():
        p.data = torch.ones(p.shape, dtype=p.dtype)
    norms += [float(p.norm()) for p in model.parameters()]
    for p, data in zip(model.parameters(), kept, strict=True):
        p.data = data
    return norms + [float(p.norm()) for p in model.parameters()]


def data_of_split_state(rank: int, world: int) -> list[float]:
    return data_for_a_while(spmd.compile(step, parallel_mode="fully_shard"), batch().chunk(world)[rank])


def test_data_that_was_read_can_be_put_back(ranks: Ranks) -> None:
    for found in ranks.run(2, data_of_split_state):
        assert found == pytest.approx(data_for_a_while(step, batch()), rel=1e-9)


def test_an_update_that_is_pending_is_finished_before_a_read(ranks: Ranks) -> None:
    plain = [float(p.norm()) / 2 for p in trained(clearing_step, batch(), calls=3)[0].parameters()]
    for found in ranks.run(2, read_while_pending):
        assert found == pytest.approx(plain, rel=1e-9)
