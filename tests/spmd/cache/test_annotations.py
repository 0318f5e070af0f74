"""Steps with annotated modules start warm, as long as each annotation is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd import capture_call

from .trainer import TracedError

pytestmark = pytest.mark.slow

HALF = spmd.MixedPrecisionPolicy(torch.float32, torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(annotate: Callable[[Net], object], cache: Path) -> list[Any]:
    """Two calls of a step that is compiled now; all that they computed."""
    torch.manual_seed(0)
    model = Net().double()
    annotate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = spmd.compile(step, cache=cache)
    losses = [compiled(model, optimizer, torch.ones(3, 4, dtype=torch.float64)).item() for _ in range(2)]
    with spmd.unshard(model):
        return [*losses, *(p.detach().tolist() for p in model.parameters())]


def both(net: Net, **options: Any) -> None:
    spmd.fully_shard(net.first, **options)
    spmd.fully_shard(net)


OTHERS: dict[str, Callable[[Net], object]] = {
    "none": lambda net: None,
    "one unit": lambda net: spmd.fully_shard(net),
    "another module": lambda net: (spmd.fully_shard(net.second), spmd.fully_shard(net)),
    "another style": lambda net: (spmd.replicate(net.first), spmd.fully_shard(net)),
    "two modules in one unit": lambda net: spmd.fully_shard([net.first, net.second]),
    "parameters stay whole": lambda net: both(net, reshard_after_forward=False),
    "dtypes": lambda net: both(net, mp_policy=HALF),
    "state in host memory": lambda net: both(net, offload_policy=spmd.OffloadPolicy()),
    "another dim is split": lambda net: both(
        net, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.ndim - 1)
    ),
    "a parameter is left alone": lambda net: both(net, ignored_params={net.first.bias}),
}


@pytest.mark.usefixtures("alone")
def test_annotated_steps_start_warm_unless_an_annotation_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise TracedError

    expected = trained(both, tmp_path / "cache")
    monkeypatch.setattr(capture_call, "capture", refuse)
    assert trained(both, tmp_path / "cache") == expected
    for name, annotate in OTHERS.items():
        with pytest.raises(TracedError):
            trained(annotate, tmp_path / "cache")
            pytest.fail(f"an entry was found: {name}")
